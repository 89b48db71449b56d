"""lorafusion doctor: versions, devices, and the kernels that will be used and why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from lorafusion_jax.cli.common import Json, Overrides, next_command
from lorafusion_jax.cli.job_calls import LayerCalls
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.errors import LoraFusionError, install_line
from lorafusion_jax.machine import program_cache
from lorafusion_jax.report.console import out, plain_table
from lorafusion_jax.report.format import count
from lorafusion_jax.tuning_table import table_path, use_tables
from pallas_kernels import config_store, policy
from pallas_kernels.measured import OpCall

SITES = {"qkv": "q, k and v", "o": "o", "gate_up": "gate and up", "down": "down"}
EXTRAS = {
    "hf": "datasets",
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "plots": "matplotlib",
}


def command(
    jobs: Annotated[
        Path | None,
        typer.Argument(
            metavar="JOBS",
            help="job file whose ops are looked at",
            show_default="a layer of Llama-3.1-8B with four adapters",
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Reports versions, devices and kernels: which implementation serves each op here, and where that default comes
    from.

    Example: lorafusion doctor, or lorafusion doctor jobs.yaml
    """
    numbers = diagnosis(jobs, overrides or ())
    if as_json:
        print(json.dumps(numbers))
        return
    console = out()
    for title, rows in numbers.items():
        console.print(title, style="bold")
        table = plain_table(("", ""), (), show_header=False, padding=(0, 2))
        for key, value in rows.items():
            table.add_row(f"  {key}", str(value))
        console.print(table, markup=False, highlight=False)
    next_command(console, "lorafusion demo")


def diagnosis(jobs: Path | None = None, overrides: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Returns versions, devices, kernels per device, defaults of a job, extras and disk space."""
    import jax

    from lorafusion_jax.checkpoint.weight_cache import weight_cache
    from lorafusion_jax.data.cache import token_cache
    from lorafusion_jax.report.record import versions

    devices = {
        f"{device.platform}:{device.id}": f"{device.device_kind}{_memory(device)}" for device in jax.local_devices()
    }
    extras = {
        name: "installed" if find_spec(package) else f"not installed: {install_line(name)}"
        for name, package in EXTRAS.items()
    }
    return {
        "versions": versions(),
        "devices": devices,
        "kernels": _kernels(),
        "defaults": _defaults(jobs, overrides),
        "extras": extras,
        "disk": {
            "free here": f"{count(shutil.disk_usage('.').free)}B",
            "compiled programs": _size(Path(jax.config.jax_compilation_cache_dir or program_cache())),
            "tokens": _size(token_cache()),
            "quantised bases": _size(weight_cache()),
        },
    }


def _defaults(jobs: Path | None, overrides: Sequence[str]) -> dict[str, str]:
    """Implementations of a job's ops, or of a typical layer's; a broken table of this machine is no default."""
    from lorafusion_jax.checkpoint.base_model import base_directory
    from lorafusion_jax.cli.job_calls import calls_of_job, typical_calls
    from lorafusion_jax.config import load_config
    from lorafusion_jax.families.model import ModelConfig

    config = load_config(jobs, overrides) if jobs else None
    if config is None:
        calls = typical_calls()
    else:
        *_, calls = calls_of_job(config, ModelConfig.from_hf(base_directory(config)))
    try:
        use_tables()
    except LoraFusionError as problem:
        return {"tuning table": str(problem)}
    return defaults(calls, config.train if config else None, command_to_measure(jobs))


def _kernels() -> dict[str, str]:
    """Implementations that support a typical layer here, and their compiler options; compiles nothing."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import Implementation, compiler_options, lora_linear
    from pallas_kernels.device import has_fp8_products

    x, w, a, b = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 4096), (4096, 4096), (4096, 16), (16, 4096))
    )
    features = {}
    for name in get_args(Implementation):
        try:
            jax.eval_shape(partial(lora_linear, scale=1.0, implementation=name), x, w, a, b)
            features[name] = "available"
        except NotImplementedError as problem:
            features[name] = f"not here: {str(problem).split(': ', 1)[-1]}"
    features["8-bit products"] = (
        "on matrix units" if has_fp8_products() else "in a wider type: base.quantize=fp8 saves memory, no time"
    )
    flags = " ".join(f"{name}={json.dumps(value)}" for name, value in compiler_options().items())
    features["compiler options"] = (
        f"{flags}, set by train; scripts: see pallas_kernels.compiler_options" if flags else "none"
    )
    return features


def _size(folder: Path) -> str:
    """Place and size of a cache."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return f"{folder}: {len(files)} files, {count(sum(file.stat().st_size for file in files))}B"


def _memory(device) -> str:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return f", {limit / 2**30:.0f} GiB for jax" if limit else ""


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
