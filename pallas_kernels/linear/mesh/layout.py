"""Which mesh axes each dimension of a call lies on, read from the shardings of x and of the weights.

    rows   on the axes of x's leading dimensions
    K      on the axes of x's last dimension; where that is whole, on those of W's first one: the products of the shards
           are summed. Axes that rows use already are not free: W is gathered over them, as plain XLA does (fsdp)
    N      on the axes of W's second dimension that are still free

If the caller says how y is to be split, rows and N lie on its axes, except those on which x and W both have K: there
the products are summed, and each device keeps its part of the sum.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.dropout import Dropout
from pallas_kernels.linear.mesh.split_weight import Axes, array_specs, shard_step
from pallas_kernels.problem import Operands


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Mesh axes of every dimension that can be split."""

    leading: tuple[Axes, ...]  # of each leading dimension of x
    k: Axes
    ns: tuple[Axes, ...]  # of the out features of each projection
    scattered: int | None = None  # dimension of y whose parts the sum over K leaves on the devices of K

    @property
    def rows(self) -> Axes:
        return tuple(axis for axes in self.leading for axis in axes)

    def only_even(self, devices: Mapping[str, int], x_shape: tuple[int, ...], ws: Sequence[Any]) -> Layout:
        """The layout without axes whose devices would get shards of different sizes: XLA may choose such ones."""

        def fit(size: int, axes: Axes, step: int = 1) -> Axes:
            return () if size % (step * math.prod(devices[axis] for axis in axes)) else axes

        k = fit(x_shape[-1], self.k, shard_step(ws, "k"))
        return Layout(
            leading=tuple(fit(size, axes) for size, axes in zip(x_shape[:-1], self.leading, strict=True)),
            k=k,
            scattered=self.scattered if k else None,
            ns=tuple(fit(w.shape[1], axes, shard_step([w], "n")) for w, axes in zip(ws, self.ns, strict=True)),
        )

    def spec_of_x(self) -> PartitionSpec:
        return PartitionSpec(*self.leading, self.k)

    def spec_of_y(self, i: int) -> PartitionSpec:
        """Of the product of each shard."""
        return PartitionSpec(*self.leading, self.ns[i])

    def spec_of_result(self, i: int) -> PartitionSpec:
        """Of y after the sum over K."""
        axes = [*self.leading, self.ns[i]]
        if self.scattered is not None:
            axes[self.scattered] += self.k
        return PartitionSpec(*axes)

    def specs(self, ops: Operands, *, single: bool) -> Operands:
        """Partition specs of the operands of a call; its tables have one entry per row, in x's leading dimensions."""
        replicated, rows = PartitionSpec(), PartitionSpec(*self.leading)

        def specs_of(arrays: Sequence[Any], spec: Any) -> tuple[PartitionSpec | None, ...]:
            return tuple(None if v is None else spec(n) for v, n in zip(arrays, self.ns, strict=True))

        return Operands(
            x=self.spec_of_x(),
            ws=tuple(array_specs(w, self.k, n) for w, n in zip(ops.ws, self.ns, strict=True)),
            as_=specs_of(ops.as_, lambda n: PartitionSpec(None, self.k, None)),
            bs=specs_of(ops.bs, lambda n: PartitionSpec(None, None, n)),
            biases=tuple(
                None if bias is None else PartitionSpec(self.spec_of_result(i)[-1]) for i, bias in enumerate(ops.biases)
            ),
            tile_adapter=replicated if single else rows,
            scale=replicated,
            dropout=None if ops.dropout is None else Dropout(rate=replicated, key=replicated, row_key=rows),
            ranks=None if ops.ranks is None else replicated,
        )  # type: ignore[arg-type]

    def rows_of_tile(self, tile: int, leading_shape: tuple[int, ...]) -> int:
        """Rows of the largest tiles that no shard cuts; `leading_shape` is that of one shard."""
        split = [d for d, axes in enumerate(self.leading) if axes]
        return math.gcd(tile, math.prod(leading_shape[split[-1] :])) if split else tile


def layout_of(x: PartitionSpec, ws: Sequence[PartitionSpec], *, x_ndim: int, y: PartitionSpec | None = None) -> Layout:
    """Chooses the layout of a call from the partition specs of its x, its weights and the y that is wanted."""
    *leading, k = _by_dimension(x, x_ndim)
    w_specs = [_by_dimension(w, 2) for w in ws]
    if y is not None:
        return _layout_for(_by_dimension(y, x_ndim), leading, k, w_specs)
    rows = {axis for axes in leading for axis in axes}
    if not k:
        k = next((free for w in w_specs if (free := _without(w[0], rows))), ())
    split_axes = rows | set(k)
    return Layout(leading=tuple(leading), k=k, ns=tuple(_without(w[1], split_axes) for w in w_specs))


def _layout_for(y: list[Axes], leading: list[Axes], k: Axes, ws: list[list[Axes]]) -> Layout:
    """Splits rows and N as y, or, where y is whole, as x and W: it is gathered afterwards."""
    summed = {axis for axis in k if all(axis in w[0] for w in ws)}
    split_axes = {axis for axes in y for axis in axes} | summed
    rows = [
        _without(axes_of_y, summed) or _without(present, split_axes)
        for axes_of_y, present in zip(y[:-1], leading, strict=True)
    ]
    split_axes |= {axis for axes in rows for axis in axes}
    k = _without(k, split_axes - summed) or next((free for w in ws if (free := _without(w[0], split_axes))), ())
    n = _without(y[-1], set(k))
    ns = tuple(n or _without(w[1], split_axes | set(k)) for w in ws)
    dimensions = enumerate(zip(y, [*rows, ns[0]], strict=True)) if k and len(set(ns)) == 1 else ()
    scattered = next((dimension for dimension, (axes_of_y, axes) in dimensions if axes_of_y == axes + k), None)
    return Layout(leading=tuple(rows), k=k, ns=ns, scattered=scattered)


def axes_of_type(mesh: Any, kind: AxisType) -> frozenset[str]:
    """Axes of a mesh that have the type and more than one device."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, type_of_axis in types if type_of_axis == kind and mesh.shape[name] > 1)


def _by_dimension(spec: PartitionSpec, ndim: int) -> list[Axes]:
    entries = (*spec, *(None,) * (ndim - len(spec)))
    return [() if e is None else e if isinstance(e, tuple) else (e,) for e in entries]


def _without(axes: Axes, used: set[str]) -> Axes:
    return tuple(axis for axis in axes if axis not in used)
