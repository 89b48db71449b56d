"""Kernels of experts in checkpoints: several tensors make one leaf.

The leaf [E · K, N] is the transpose of [N, E · K], in which every expert has K columns, and gate and up their rows.
K in · N out · E experts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lorafusion_jax.families.experts import GATE_UP
from lorafusion_jax.families.table import Family
from lorafusion_jax.layout.layer import Linear
from lorafusion_jax.models.checkpoint import Stored, read_slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor of a checkpoint that is a rectangle of [N, E · K].

    Attributes:
        name: name in the checkpoint.
        row, column: first row and column of the rectangle.
        shape: rows and columns.
    """

    name: str
    row: int
    column: int
    shape: tuple[int, int]


def expert_parts(family: Family, linear: Linear, layer: int) -> tuple[Part, ...]:
    """The tensors of one projection of all experts of a layer."""
    gate, up, down = family.expert_names
    names = (gate, up) if linear.name == GATE_UP else (down,)
    num_in, num_out = linear.in_features, linear.out_features // len(names)
    return tuple(
        Part(
            name=family.tensor_name(f"model.layers.{layer}.{name.format(expert)}.weight"),
            row=number * num_out,
            column=expert * num_in,
            shape=(num_out, num_in),
        )
        for expert in range(linear.experts)
        for number, name in enumerate(names)
    )


def read_parts(parts: tuple[Part, ...], stored: Mapping[str, Stored], index: tuple[slice, ...]) -> np.ndarray:
    """Reads a rectangle of [N, E · K]; only the tensors that it touches are opened."""
    rows, columns = index
    whole: np.ndarray | None = None
    for part in parts:
        cut = _overlap(rows, part.row, part.shape[0]), _overlap(columns, part.column, part.shape[1])
        if any(axis_cut.start >= axis_cut.stop for axis_cut in cut):
            continue
        inside = (
            slice(cut[0].start - part.row, cut[0].stop - part.row),
            slice(cut[1].start - part.column, cut[1].stop - part.column),
        )
        values = read_slice(stored[part.name], part.name, inside)
        if whole is None:
            whole = np.empty((rows.stop - rows.start, columns.stop - columns.start), values.dtype)
        whole[cut[0].start - rows.start : cut[0].stop - rows.start,
              cut[1].start - columns.start : cut[1].stop - columns.start] = values  # fmt: skip
    assert whole is not None, index
    return whole


def _overlap(wanted: slice, first: int, size: int) -> slice:
    return slice(max(wanted.start, first), min(wanted.stop, first + size))
