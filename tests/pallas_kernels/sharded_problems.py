"""Calls on simulated meshes, and what a compiled program sends between devices."""

import re

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

KINDS = {"explicit": AxisType.Explicit, "automatic": AxisType.Auto}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def mesh_of(kind: str, **axes: int):
    """mesh_of("explicit", data=4, tensor=2)."""
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(KINDS[kind],) * len(axes))


def put(mesh, value, *spec):
    return jax.device_put(np.asarray(value), NamedSharding(mesh, P(*spec)))  # of a device, jax cuts it by programs


def collectives(compiled) -> list[tuple[str, tuple[int, ...]]]:
    """(kind, shape) of every array that the compiled program sends."""
    sends = []
    for line in compiled.as_text().splitlines():
        for kind in COLLECTIVES:
            head, call, _ = line.partition(f" {kind}(")
            if not call:
                head, call, _ = line.partition(f" {kind}-start(")
            if call:
                shapes = re.findall(r"\w+\[([\d,]*)\]", head.partition(" = ")[2])
                sends += [(kind, tuple(int(size) for size in shape.split(",") if size)) for shape in shapes]
    return sends


def gathered(sent) -> list[tuple[int, ...]]:
    return sorted(shape for kind, shape in sent if kind in ("all-gather", "all-to-all"))
