"""Kernels in checkpoints that are not one plain tensor: of experts, and packed ones, which reading widens.

Several tensors make one leaf, or one tensor has all experts.

The leaf [E · K, N] is the transpose of [N, E · K], in which every expert has K columns, and gate and up their rows.
K in · N out · E experts
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.families.experts import GATE_UP
from lorafusion_jax.families.family import Family
from lorafusion_jax.layout.layer import EXPERTS, Linear
from lorafusion_jax.models.checkpoint import READABLE, Stored, plain_index, read_slice
from lorafusion_jax.weights.checkpoint_formats import TensorSpec
from lorafusion_jax.weights.packed import Packed

# Values of the four bits of MXFP4 (OCP Microscaling Formats 1.0); 32 of them share a power of two.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_SHARED, _BIAS = 32, 127
_OF_EXPERT = re.compile(r"(.+\.experts)\.0\.(\w+)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor of a checkpoint that is a rectangle of [N, E · K], or all of it.

    Attributes:
        name: name in the checkpoint.
        shape: its shape there: [rows, columns], [columns] of one row, or [E, K, N] or [E, N, K] of all experts.
        row, column: first row and column of the rectangle.
        transposed: the tensor is [E, N, K].
        turned: the tensor is [K, N].
        mxfp4: the tensor is in MXFP4: NAME_blocks [E, N, K / 32, 16] and NAME_scales [E, N, K / 32].
        packed: how else its values are packed, in tensors whose names begin as that of a weight.
    """

    name: str
    shape: tuple[int, ...]
    row: int = 0
    column: int = 0
    mxfp4: bool = False
    packed: Packed | None = None
    transposed: bool = False
    turned: bool = False

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """Its tensors in the checkpoint."""
        if self.packed is not None:
            num_out, num_in = self.shape
            return {f"{self.stem}{ending}": spec for ending, spec in self.packed.tensors(num_in, num_out).items()}
        if not self.mxfp4:
            return {self.name: TensorSpec(dtypes=READABLE, shapes=(self.shape,))}
        experts, num_in, num_out = self.shape
        blocks = (experts, num_out, num_in // _SHARED)
        shapes = {"_blocks": (*blocks, _SHARED // 2), "_scales": blocks}
        return {f"{self.name}{end}": TensorSpec(dtypes=("U8",), shapes=(shape,)) for end, shape in shapes.items()}

    @property
    def stem(self) -> str:
        """What the names of its tensors begin with, if it is packed."""
        return self.name.removesuffix(".weight")

    @property
    def rectangle(self) -> tuple[int, int]:
        """Its rows and columns in [N, E · K]."""
        if self.turned:
            return self.shape[1], self.shape[0]
        if len(self.shape) <= 2:
            return (1, *self.shape)[-2], (1, *self.shape)[-1]
        experts, num_in, num_out = self.shape if not self.transposed else (self.shape[0], *self.shape[:0:-1])
        return num_out, experts * num_in


def expert_parts(family: Family, linear: Linear, layer: int) -> tuple[Part, ...]:
    """The tensors of one projection of all experts of a layer."""
    prefix = f"model.layers.{layer}."
    if "{}" not in family.expert_names[0]:
        name = family.expert_names[list(EXPERTS).index(linear.name)]
        transposed = family.experts_transposed
        shape = (linear.experts, *(linear.shape[::-1] if transposed else linear.shape))
        return (Part(name=family.tensor_name(prefix + name), shape=shape, transposed=transposed),)
    *inputs, down = family.expert_names
    names = inputs if linear.name == GATE_UP else [down]
    num_in, num_out = linear.in_features, linear.out_features // len(names)
    return tuple(
        Part(
            name=family.tensor_name(f"{prefix}{name.format(expert)}.weight"),
            shape=(num_out, num_in),
            row=number * num_out,
            column=expert * num_in,
        )
        for expert in range(linear.experts)
        for number, name in enumerate(names)
    )


def as_stored(parts: tuple[Part, ...], stored: Mapping[str, Stored], packed: Packed | None = None) -> tuple[Part, ...]:
    """The parts as a checkpoint has them: in MXFP4 where there are blocks of this name, all experts in one tensor where
    there is one, packed where the mark of packed ones is there.
    """
    if parts and (joined := _whole(parts)) is not None and joined.name in stored:
        return (joined,)
    return tuple(
        replace(part, packed=packed)
        if packed is not None and f"{part.stem}{packed.mark}" in stored
        else replace(part, mxfp4=True)
        if f"{part.name}_blocks" in stored
        else _turned(part, stored)
        for part in parts
    )


def _turned(part: Part, stored: Mapping[str, Stored]) -> Part:
    """The part in the order of its axes that fits the file; in its family's where both do."""
    if len(part.shape) < 3 or part.name not in stored:
        return part
    other = (part.shape[0], *part.shape[:0:-1])
    if stored[part.name].shape not in {other} - {part.shape}:
        return part
    return replace(part, shape=other, transposed=not part.transposed)


def _whole(parts: tuple[Part, ...]) -> Part | None:
    """The tensor that some checkpoints have in place of those of every expert."""
    match = _OF_EXPERT.fullmatch(parts[0].name)
    if match is None:
        return None
    experts = len({part.column for part in parts})
    num_out = max(part.row + part.rectangle[0] for part in parts)
    name = match[2] if num_out == parts[0].rectangle[0] else "gate_up_proj"
    return Part(name=f"{match[1]}.{name}", shape=(experts, num_out, parts[0].rectangle[1]), transposed=True)


def read_parts(parts: tuple[Part, ...], stored: Mapping[str, Stored], index: tuple[slice, ...]) -> np.ndarray:
    """Reads a rectangle of [N, E · K]; only the tensors that it touches are opened."""
    rows, columns = index
    rectangle: np.ndarray | None = None
    for part in parts:
        num_rows, num_columns = part.rectangle
        row, column = _overlap(rows, part.row, num_rows), _overlap(columns, part.column, num_columns)
        if row.start >= row.stop or column.start >= column.stop:
            continue
        values = _read(part, stored, _moved(row, part.row), _moved(column, part.column))
        if rectangle is None:
            rectangle = np.empty((rows.stop - rows.start, columns.stop - columns.start), values.dtype)
        rectangle[_moved(row, rows.start), _moved(column, columns.start)] = values
    assert rectangle is not None, index
    return rectangle


def _read(part: Part, stored: Mapping[str, Stored], rows: slice, columns: slice) -> np.ndarray:
    if part.packed is not None:
        return _read_packed(part, part.packed, stored, rows, columns)
    if part.turned:
        return read_slice(stored[part.name], part.name, (columns, rows)).T
    if len(part.shape) <= 2:
        index = (rows, columns)[-len(part.shape) :]
        return read_slice(stored[part.name], part.name, index).reshape(rows.stop - rows.start, -1)
    num_in = part.rectangle[1] // part.shape[0]
    experts = range(columns.start // num_in, -(-columns.stop // num_in))
    kernels = [_read_expert(part, stored, expert, rows) for expert in experts]
    return np.concatenate(kernels, axis=1)[:, _moved(columns, experts.start * num_in)]


def _read_packed(part: Part, packed: Packed, stored: Mapping[str, Stored], rows: slice, columns: slice) -> np.ndarray:
    def fetch(ending: str, index: tuple[slice, ...]) -> np.ndarray:
        entry = stored[f"{part.stem}{ending}"]
        return read_slice(entry, f"{part.stem}{ending}", plain_index(index or None, entry.shape))

    try:
        return packed.read(fetch, part.shape[1], rows, columns, by_index=f"{part.stem}{packed.index}" in stored)
    except ValueError as problem:
        message, where = f"{part.stem} is packed in a way that is not supported.", stored[f"{part.stem}{packed.mark}"]
        raise CheckpointError(
            "model.quantised-otherwise", message, where=str(where.file), why=str(problem), fix="download it again"
        ) from None


def _read_expert(part: Part, stored: Mapping[str, Stored], expert: int, rows: slice) -> np.ndarray:
    """Some rows of an expert's kernel, [rows, K]."""
    only = slice(expert, expert + 1)
    if part.transposed:
        return read_slice(stored[part.name], part.name, (only, rows, slice(0, part.shape[2])))[0]
    if not part.mxfp4:
        return read_slice(stored[part.name], part.name, (only, slice(0, part.shape[1]), rows))[0].T
    blocks, scales = (
        read_slice(stored[name], name, (only, rows, *(slice(0, size) for size in stored[name].shape[2:])))[0]
        for name in part.tensors
    )
    pairs = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], axis=-1).reshape(*blocks.shape[:2], _SHARED)
    return np.ldexp(pairs, scales.astype(np.int32)[..., None] - _BIAS).reshape(len(blocks), -1)


def _overlap(rows: slice, first: int, size: int) -> slice:
    return slice(max(rows.start, first), min(rows.stop, first + size))


def _moved(cut: slice, origin: int) -> slice:
    return slice(cut.start - origin, cut.stop - origin)
