"""The memory section of the plan screen."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from lorafusion_jax.cli.common import say
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.weights.table import NONE

GIB, MIB = 2**30, 2**20


def show_memory(console: Console, memory: dict[str, Any]) -> None:
    """Prints the memory of every stage, whether it fits, and what to change if it does not."""
    size, unit = _unit(max(row["total"] for row in memory["stages"]))
    each = "  ".join(f"s{stage} {row['total'] / size:.1f}" for stage, row in enumerate(memory["stages"]))
    of = "" if memory["device_bytes"] is None else _device_size(memory["device_bytes"], unit)
    verdict = {None: "", True: "   fits", False: "   does not fit"}[memory["fits"]]
    console.print(f"memory/stage  {each} {unit}{of}{verdict}", highlight=False, markup=False)
    if memory["advice"]:
        say(console, f"  to make it fit: {memory['advice']}", "bold red")
    layers = " + ".join(map(str, memory["layers"]))
    stored = "" if memory["quantize"] == NONE else f", projections stored as {memory['quantize']}"
    say(console, f"  layers {layers}, saved for backward: {memory['remat']}{stored}")
    if stored:
        say(console, "  what that does to the base model: lorafusion check JOBS --base-loss")
    say(console, f"  not modelled: {', '.join(memory['not_modelled'])}")


def _unit(size: int) -> tuple[int, str]:
    return (GIB, "GiB") if size >= GIB else (MIB, "MiB")


def _device_size(device_bytes: int, unit: str) -> str:
    """Size of a device, with its unit if it differs from that of the stages."""
    size, own = _unit(device_bytes)
    number = device_bytes / size
    return f" of {number:.{0 if number >= 10 else 1}f}" + f" {own}" * (own != unit)


def remedy(config: JobConfig, memory: dict[str, Any]) -> str:
    """The setting to try next if a plan does not fit, preferably at the same capacity."""
    if memory["advice"].startswith("more"):
        stages, fsdp = 2 * config.mesh.stages, 2 * config.mesh.fsdp
        return f"mesh.stages={stages}" if stages <= sum(memory["layers"]) else f"mesh.fsdp={fsdp}"
    return memory["advice"].split(" or ")[-1].replace(": ", "=")
