"""What a plan will take: the simulator on default rates of a device and the size of the base model."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from pathlib import Path

from lorafusion_jax.report.format import count
from scheduling import CostModel, default_cost_model

DEVICES = ("h200", "h100", "cpu")


def this_device() -> str:
    """The rates to predict with when nobody says: looks for a driver, starts no backend."""
    return "h200" if Path("/dev/nvidia0").exists() else "cpu"


def predicted_costs(base: Path, device: str, num_stages: int) -> CostModel | None:
    """Default costs of a base model on a device; None if its folder does not tell its size."""
    try:
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
        parameters = sum(_parameters(file) for file in base.glob("*.safetensors"))
        layers, width = int(config["num_hidden_layers"]), int(config["hidden_size"])
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    if not parameters:
        return None
    costs = default_cost_model(
        device, num_stages=num_stages, parameters=parameters, num_layers=layers, hidden_size=width
    )
    return dataclasses.replace(
        costs, source=f"default rates of one {device} per stage, {count(parameters)} parameters, nothing measured"
    )


def _parameters(file: Path) -> int:
    """Sums the sizes in a safetensors header; the weights are not read."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > file.stat().st_size:
            raise ValueError("no safetensors file")
        header = json.loads(stream.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
