"""lorafusion doctor: what is installed, what it runs on, and what will be used."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from typing import get_args

from lorafusion_jax.cli.common import Json, next_command, out
from lorafusion_jax.report.format import count
from lorafusion_jax.report.record import versions

NAME = "doctor"
EXTRAS = {"hf": "datasets", "tensorboard": "tensorboardX", "wandb": "wandb", "plots": "matplotlib"}


def command(as_json: Json = False) -> None:
    """Reports versions, devices and kernels. Example: lorafusion doctor"""
    numbers = diagnosis()
    if as_json:
        print(json.dumps(numbers))
        return
    console = out()
    for title, rows in numbers.items():
        console.print(title, style="bold")
        for key, value in rows.items():
            console.print(f"  {key:<22} {value}", highlight=False)
    next_command(console, "lorafusion demo")


def diagnosis() -> dict[str, dict]:
    """Versions, devices, kernels per device, extras and disk."""
    import jax

    from pallas_kernels.backends import Implementation, choose

    devices = {f"{device.platform}:{device.id}": f"{device.device_kind}{_memory(device)}" for device in jax.local_devices()}
    free = shutil.disk_usage(".").free
    return {"versions": versions(), "devices": devices, "kernels": {name: "default" if name == choose(None) else "on request" for name in get_args(Implementation)},
            "extras": {name: "installed" if find_spec(package) else f'pip install "lorafusion-jax[{name}]"'
                       for name, package in EXTRAS.items()},
            "disk": {"free here": f"{count(free)}B"}}


def _memory(device) -> str:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return f", {limit / 2**30:.0f} GiB for jax" if limit else ""
