"""The calls of ops in each layer of a job or of a typical model, which implementation each gets here, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lorafusion_jax.config.schema import JobConfig, TrainSettings
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.planning.memory import memory_problem, site_shape
from lorafusion_jax.tuning_table import table_path
from pallas_kernels import config_store, policy
from pallas_kernels.measured import OpCall
from pallas_kernels.policy import LinearShape

SITES = {"qkv": "q, k and v", "o": "o", "gate_up": "gate and up", "down": "down"}

if TYPE_CHECKING:
    from pallas_kernels.tuning.ops import OpCase

TYPICAL_MODEL = ModelConfig(
    family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128,
)  # fmt: skip
TYPICAL_RANK, TYPICAL_ADAPTERS, TYPICAL_TOKENS = 16, 4, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCalls:
    """What one layer calls for a microbatch of one size.

    Args:
        linears: the call of each site: "qkv", "o", "gate_up", "down".
    """

    model: ModelConfig
    rows: int
    dtype: str
    linears: dict[str, LinearShape]

    @property
    def attention(self) -> dict:
        model = self.model
        sizes = {"rows": self.rows, "heads": model.num_heads, "key_heads": model.num_kv_heads}
        return sizes | {"width": model.head_dim, "dtype": self.dtype}

    @property
    def norm(self) -> dict:
        return {"rows": self.rows, "width": self.model.hidden_size, "dtype": self.dtype}


def calls_of_job(config: JobConfig, model: ModelConfig) -> list[LayerCalls]:
    """One for each size of microbatch."""
    problem = memory_problem(config, model)
    return [
        LayerCalls(
            model=model, rows=rows, dtype=config.base.dtype,
            linears={
                site: replace(
                    site_shape(replace(problem, capacity_tokens=rows), site, model.layers.index(layer)),
                    dtype=config.base.dtype,
                )
                for layer in model.kinds
                for site, linears in layer.sites.items()
                if not linears[0].experts
            },
        )
        for rows in config.batch.sizes
    ]  # fmt: skip


def typical_calls(*, rows: int = TYPICAL_TOKENS, rank: int = TYPICAL_RANK, adapters: int = TYPICAL_ADAPTERS,
                  dropout: bool = True) -> LayerCalls:  # fmt: skip
    """A layer of Llama-3.1-8B."""
    linears = {
        site: LinearShape(
            rows=rows,
            in_features=of_site[0].in_features,
            out_features=tuple(linear.out_features for linear in of_site),
            ranks=(rank,) * len(of_site),
            tile=128,
            adapters=adapters,
            least_rank=rank,
            dropout=dropout,
        )
        for site, of_site in TYPICAL_MODEL.layer(0).sites.items()
    }
    return LayerCalls(model=TYPICAL_MODEL, rows=rows, dtype="bfloat16", linears=linears)


def named_calls(*, quick: bool) -> list[LayerCalls]:
    """What `lorafusion tune` measures without a job. Rows of a table reach factors of two, so these serve 1024 to 16384
    tokens, ranks 8 to 128, and models from half to twice the width of Llama-3.1-8B."""
    return [
        typical_calls(rows=rows, rank=rank, adapters=adapters, dropout=dropout)
        for rows in ((8192,) if quick else (2048, 8192))
        for rank in ((16,) if quick else (16, 64))
        for adapters in ((4,) if quick else (4, 1))
        for dropout in (True, False)
    ]


def op_cases(calls: Sequence[LayerCalls]) -> Iterator[OpCase]:
    """Every different call, as the tuner times it."""
    from lorafusion_jax.models.attention.tuning_case import attention_case
    from pallas_kernels.tuning.op_cases import calls_of, linear_case, norm_case

    linears = (shape for call in calls for site in call.linears.values() for shape in calls_of(site))
    for shape in dict.fromkeys(shape for shape in linears if shape.with_lora):
        yield linear_case(shape)
    for sizes in _different([call.attention for call in calls]):
        yield attention_case(**sizes)
    for sizes in _different([call.norm for call in calls]):
        yield norm_case(**sizes)


def _different(dictionaries: list[dict]) -> list[dict]:
    return [sizes for index, sizes in enumerate(dictionaries) if sizes not in dictionaries[:index]]


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
