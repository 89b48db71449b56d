"""Which implementation a job takes for each op on this device, and where that default comes from; compiles nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lorafusion_jax.cli.job_calls import LayerCalls
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.tuning_table import table_path
from pallas_kernels import config_store, policy
from pallas_kernels.measured import OpCall

SITES = {"qkv": "q, k and v", "o": "o", "gate_up": "gate and up", "down": "down"}


def defaults(calls: LayerCalls, train: TrainSettings | None, measure: str) -> dict[str, str]:
    """Returns "implementation: reason" by op.

    Args:
        train: the settings of a job, whose choices come first.
        measure: the command that measures these calls.
    """
    settings = (train.implementation, train.attention) if train else (None, None)
    return {
        "tuning table": table_state(),
        **{f"linear {SITES.get(site, site)}": _linear(shape, settings[0], measure)
           for site, shape in calls.linears.items()},
        "mlp": _mlp(calls, settings[0]),
        "attention": _attention(calls, settings[1], measure),
        "norm": _norm(calls, measure),
        "loss": "xla: the only implementation",
    }  # fmt: skip


def table_state() -> str:
    """The table of this machine that is in use."""
    from pallas_kernels.device import device_kind

    source = config_store.sources(device_kind())[0]
    if source.path is None:
        return f"none of this machine: {table_path(device_kind())}"
    return f"{source.path}: {len(source.table.ops)} calls, {len(source.table.entries)} tile sizes, {_when(source)}"


def _linear(shape: policy.LinearShape, setting: str | None, measure: str) -> str:
    from pallas_kernels.tuning.op_cases import calls_of, select_backend

    if not shape.with_lora:
        return "xla: no adapter trains it"
    reasons = {}
    for call in calls_of(shape) if setting is None else [shape]:
        if call.with_lora:
            reasons.setdefault(_said(call.op_call, setting, lambda call=call: select_backend(call, setting), measure))
    return "; ".join(reasons)


def _mlp(calls: LayerCalls, setting: str | None) -> str:
    from pallas_kernels.backend import measured_backend
    from pallas_kernels.device import is_hopper, num_sms

    if "gate_up" not in calls.linears:
        return "experts: products of their own"
    gate_up, down = calls.linears["gate_up"], calls.linears["down"]
    device: dict[str, Any] = {"hopper": is_hopper(), "num_sms": num_sms(), "measured": measured_backend}
    if policy.mlp_is_fused(gate_up, down, setting, **device):
        return f"{policy.HOPPER}: one op, because its projections are"
    return "xla between its projections, which are ops of their own"


def _attention(calls: LayerCalls, setting: str | None, measure: str) -> str:
    import jax
    import jax.numpy as jnp

    from lorafusion_jax.models.attention import default_implementation

    sizes = calls.attention
    q, k = (
        jax.ShapeDtypeStruct((sizes["rows"], sizes[heads], sizes["width"]), jnp.dtype(sizes["dtype"]))
        for heads in ("heads", "key_heads")
    )
    call = policy.attention_call(**sizes)
    return _said(call, setting, lambda: setting or default_implementation(q, k), measure)


def _norm(calls: LayerCalls, measure: str) -> str:
    from pallas_kernels.device import device_kind, is_hopper

    def measured(call: OpCall) -> str | None:
        return config_store.fastest(device_kind(), call)

    implementation = policy.preferred_norm(**calls.norm, hopper=is_hopper(), measured=measured)
    return _said(policy.norm_call(**calls.norm), None, lambda: implementation, measure)


def _said(call: OpCall, setting: str | None, choose: Callable[[], str], measure: str) -> str:
    """The implementation and the reason."""
    from pallas_kernels.device import device_kind, is_hopper, target_platform

    try:
        implementation = choose()
    except NotImplementedError as problem:
        return f"refused: {problem}"
    if setting is not None:
        return f"{implementation}: the job asks for it"
    measurement = config_store.op_row(device_kind(), call)
    if measurement is not None and measurement[0].winner == implementation:
        row, source = measurement
        where = source.path or f"shipped measurements of {source.table.device}"
        faster = f", {row.speedup:.2f} × as fast as {row.default}" if row.speedup > 1 else ""
        return f"{implementation}: measured{faster} ({where}, {_when(source)})"
    if target_platform() == "cpu":
        return f"{implementation}: kernels are interpreted here"
    reason = f"the measured {measurement[0].winner} does not serve this call; " if measurement is not None else ""
    if is_hopper():
        return f"{implementation}: {reason}shipped measurements of an NVIDIA H200"
    return f"{implementation}: {reason}not measured on this device, so the fallback; to measure: {measure}"


def _when(source: config_store.Source) -> str:
    conditions = source.table.conditions
    return f"{conditions.get('date', 'no date')}, jax {conditions.get('jax', '?')}"


def command_to_measure(jobs: Path | None) -> str:
    return f"lorafusion tune {jobs}" if jobs else "lorafusion tune jobs.yaml"
