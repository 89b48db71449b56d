"""lorafusion doctor: versions, devices, and the kernels that will be used and why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, get_args

import typer

from lorafusion_jax.cli.common import Json, Overrides, next_command
from lorafusion_jax.errors import LoraFusionError, install_line, quoted
from lorafusion_jax.machine import program_cache
from lorafusion_jax.report.console import out, plain_table
from lorafusion_jax.report.format import count
from lorafusion_jax.tuning_table import use_tables

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
    from lorafusion_jax.cli.job_calls import calls_of_job, defaults, typical_calls
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
    return defaults(calls, config.train if config else None, f"lorafusion tune {quoted(jobs or 'jobs.yaml')}")


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
