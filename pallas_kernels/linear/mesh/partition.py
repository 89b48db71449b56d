"""Calls on a mesh: each device runs a backend on its own shard, and one sum per gradient joins them.

With explicit axes the shardings are part of the types: the call becomes a `shard_map`. With automatic axes they are
known only while XLA compiles: a kernel becomes a `custom_partitioning` with a rule that says which dimensions belong
together, and the XLA form is left to XLA, which partitions plain products itself. Inside somebody's own `shard_map`
there is nothing to split any more.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels import backend
from pallas_kernels.batching import refuse_vmap
from pallas_kernels.dropout import Dropout
from pallas_kernels.frozen_weight import read_with
from pallas_kernels.linear import vjp
from pallas_kernels.linear.mesh import shard
from pallas_kernels.linear.mesh.layout import Layout, axes_of_type, layout_of
from pallas_kernels.linear.mesh.shard import Call
from pallas_kernels.linear.mesh.split_weight import rule_names, weight_spec
from pallas_kernels.policy import XLA
from pallas_kernels.problem import Operands


def mesh_of(arrays: Iterable[Any], implementation: str | None, *, quantised: bool = False) -> Any:
    """The mesh over which a call on these arrays must split itself; None: it need not.

    On automatic axes XLA splits its own form, but it would gather quantised weights as wide as it computes with them.
    """
    meshes = (jax.typeof(a).sharding.mesh for a in arrays if hasattr(a, "ndim"))  # others are refused by name later
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    if mesh is None or AxisType.Explicit in mesh.axis_types:
        return mesh
    kernels = backend.kernels_are_preferred() if implementation is None else implementation != XLA
    return (
        mesh
        if (kernels or quantised) and axes_of_type(mesh, AxisType.Auto) and AxisType.Manual not in mesh.axis_types
        else None
    )


def apply(call: Call, mesh: Any, ops: Operands, y: PartitionSpec | None = None) -> tuple[jax.Array, ...]:
    """Evaluates every projection of a call whose x, [..., K], has its own leading dimensions still.

    Args:
        y: how every y is to be split, on explicit axes; the caller still has to place it.
    """
    if AxisType.Explicit not in mesh.axis_types:
        rows = jax.ShapeDtypeStruct((math.prod(ops.x.shape[:-1]), ops.x.shape[-1]), ops.x.dtype)
        backend.select(call.static, dataclasses.replace(ops, x=rows), call.implementation)  # refuses while tracing
        return _on_automatic_axes(call, ops)
    layout = layout_of(*_specs_of_types(ops), x_ndim=ops.x.ndim, y=y)
    if ops.quantised:  # x may be split in the middle of a block
        layout = layout.only_even(mesh.shape, ops.x.shape, ops.ws)
    return _on_explicit_axes(call, mesh, layout, ops)


def place(y: jax.Array, sharding: NamedSharding | PartitionSpec) -> jax.Array:
    """A result in the sharding that the caller wants."""
    explicit = AxisType.Explicit in jax.typeof(y).sharding.mesh.axis_types
    return (jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint)(y, sharding)


# --- explicit axes -----------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _on_explicit_axes(call: Call, mesh: Any, layout: Layout, ops: Operands) -> tuple[jax.Array, ...]:
    return _explicit_forward(call, mesh, layout, ops)[0]


def _explicit_forward(call: Call, mesh: Any, layout: Layout, ops: Operands):
    ys, saved = _run_forward(call, mesh, layout, ops)
    return ys, (ops, saved)


def _explicit_backward(call: Call, mesh: Any, layout: Layout, residuals: Any, dys: tuple[jax.Array, ...]):
    ops, saved = residuals
    return (vjp.gradients(ops, *_run_backward(call, mesh, layout, ops, saved, dys)),)


_on_explicit_axes.defvjp(_explicit_forward, _explicit_backward)


# Jitted, so that uncommitted arrays are moved to the devices of the mesh.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _run_forward(call: Call, mesh: Any, layout: Layout, ops: Operands):
    specs = layout.specs(ops, single=call.static.single)
    ys = tuple(layout.spec_of_result(i) for i in range(len(ops.ws)))
    run = functools.partial(shard.forward, call, layout)
    saved = PartitionSpec(layout.rows + layout.k)  # concatenated: backward gives every shard its part
    return _shard_map(run, mesh, (specs,), (ys, saved))(_place(ops, specs, mesh, call))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _run_backward(call: Call, mesh: Any, layout: Layout, ops: Operands, saved: Any, dys: tuple[jax.Array, ...]):
    specs = layout.specs(ops, single=call.static.single)
    in_specs = specs, PartitionSpec(layout.rows + layout.k), tuple(layout.spec_of_y(i) for i in range(len(ops.ws)))
    banks = tuple({i: banks[i] for i in ops.with_lora} for banks in (specs.as_, specs.bs))
    run = functools.partial(shard.backward, call, layout)
    dys = tuple(jax.sharding.reshard(dy, NamedSharding(mesh, spec)) for dy, spec in zip(dys, in_specs[2], strict=True))
    dys, ws = read_with(dys, ops.ws)  # else XLA keeps what forward gathered
    ops = dataclasses.replace(ops, ws=ws)
    dx, das, dbs = _shard_map(run, mesh, in_specs, (specs.x, *banks))(_place(ops, specs, mesh, call), saved, dys)
    return (
        _with_shardings_of((ops.x,), {0: dx}, mesh)[0],
        _with_shardings_of(ops.as_, das, mesh),
        _with_shardings_of(ops.bs, dbs, mesh),
    )


def _shard_map(function: Any, mesh: Any, in_specs: Any, out_specs: Any) -> Any:
    axes = axes_of_type(mesh, AxisType.Auto) | axes_of_type(mesh, AxisType.Manual)
    names = frozenset(mesh.axis_names) - axes
    # without the check of what varies: jax interprets no kernel under it, and differentiation is ours anyway
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False)


def _specs_of_types(ops: Operands) -> tuple[PartitionSpec, list[PartitionSpec]]:
    def spec(array: jax.Array) -> PartitionSpec:
        return jax.typeof(array).sharding.spec

    return spec(ops.x), [weight_spec(w, spec) for w in ops.ws]


def _place(ops: Operands, specs: Operands, mesh: Any, call: Call) -> Operands:
    """The operands in the layout of the call. W stays the caller's own until here: a gathered one is never kept."""
    ops = _with_row_tables(ops, call, NamedSharding(mesh, PartitionSpec(*specs.x[:-1])))
    return jax.tree.map(lambda v, spec: jax.sharding.reshard(v, NamedSharding(mesh, spec)), ops, specs)


def _with_shardings_of(
    arrays: tuple[jax.Array | None, ...], gradients: dict[int, jax.Array], mesh: Any
) -> dict[int, jax.Array]:
    """Gradients by number in the shardings of what they belong to."""

    def spec(i: int) -> PartitionSpec:
        return jax.typeof(arrays[i]).sharding.spec

    return {i: jax.sharding.reshard(g, NamedSharding(mesh, spec(i))) for i, g in gradients.items()}


def _with_row_tables(ops: Operands, call: Call, sharding: NamedSharding | None = None) -> Operands:
    """Tables with one entry per row in x's leading dimensions, so that they split as the rows do."""
    leading, table, dropout = ops.x.shape[:-1], ops.tile_adapter, ops.dropout
    if not call.static.single:
        each_row = jnp.broadcast_to(table[:, None], (table.shape[0], call.static.tile))
        table = jnp.reshape(each_row, leading, out_sharding=sharding)
    if dropout is not None:
        row_key = jnp.reshape(dropout.row_key, leading, out_sharding=sharding)
        dropout = Dropout(rate=dropout.rate, key=dropout.key, row_key=row_key)
    return dataclasses.replace(ops, tile_adapter=table, dropout=dropout)


# --- automatic axes ----------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_automatic_axes(call: Call, ops: Operands) -> tuple[jax.Array, ...]:
    return _automatic_forward(call, ops)[0]


def _automatic_forward(call: Call, ops: Operands):
    leaves, tree = jax.tree.flatten(_with_row_tables(refuse_vmap(ops), call))
    return _partitioned_forward(call, tree, ops.x.ndim)(*leaves), ops


def _automatic_backward(call: Call, ops: Operands, dys: tuple[jax.Array, ...]):
    # Recomputes S. Its sharding, and so its shape, is unknown when forward would save it.
    dys, ws = read_with(dys, ops.ws)  # as on explicit axes
    ops = dataclasses.replace(ops, ws=ws)
    leaves, tree = jax.tree.flatten(_with_row_tables(ops, call))
    dx, *banks = _partitioned_backward(call, tree, ops.x.ndim)(*leaves, *dys)
    das, dbs = banks[: len(banks) // 2], banks[len(banks) // 2 :]
    by_number = (dict(zip(ops.with_lora, sums, strict=True)) for sums in (das, dbs))
    return (vjp.gradients(ops, dx, *by_number),)


_on_automatic_axes.defvjp(_automatic_forward, _automatic_backward)


@functools.lru_cache(maxsize=256)
def _partitioned_forward(call: Call, tree: Any, x_ndim: int) -> Any:
    """Takes the leaves of the operands, returns every y; XLA asks for the program of a shard when it has chosen."""

    def local(call: Call, layout: Layout, leaves: Any, once: bool = False):
        return shard.forward(call, layout, jax.tree.unflatten(tree, leaves), once=once)[0]

    def partition(mesh, arguments, results):
        del results
        layout, ops, specs = _layout_chosen_by_xla(call, tree, mesh, arguments)
        outputs = tuple(layout.spec_of_y(i) for i in range(len(ops.ws)))
        return (
            mesh,
            lambda *leaves: local(call, layout, leaves, once=True),
            _shardings(mesh, outputs),
            _shardings(mesh, jax.tree.leaves(specs)),
        )

    rule = _Rule.of(tree, x_ndim, single=call.static.single)
    function = custom_partitioning(lambda *leaves: local(_by_xla(call), _unsharded_layout(tree, x_ndim), leaves))
    function.def_partition(partition=partition, sharding_rule=f"{rule.operands} -> {rule.ys}", reduction_factors=("k",))
    return function


@functools.lru_cache(maxsize=256)
def _partitioned_backward(call: Call, tree: Any, x_ndim: int) -> Any:
    """Takes the leaves of the operands and every dy, returns dx, then every dA, then every dB."""

    def local(call: Call, layout: Layout, arguments: Any, once: bool = False):
        leaves, dys = arguments[: tree.num_leaves], arguments[tree.num_leaves :]
        dx, das, dbs = shard.backward(call, layout, jax.tree.unflatten(tree, leaves), None, tuple(dys), once=once)
        return dx, *(das[i] for i in sorted(das)), *(dbs[i] for i in sorted(dbs))

    def partition(mesh, arguments, results):
        del results
        layout, ops, specs = _layout_chosen_by_xla(call, tree, mesh, arguments[: tree.num_leaves])
        banks = (*(specs.as_[i] for i in ops.with_lora), *(specs.bs[i] for i in ops.with_lora))
        inputs = [*jax.tree.leaves(specs), *(layout.spec_of_y(i) for i in range(len(ops.ws)))]
        return (
            mesh,
            lambda *values: local(call, layout, values, once=True),
            _shardings(mesh, (specs.x, *banks)),
            _shardings(mesh, inputs),
        )

    rule = _Rule.of(tree, x_ndim, single=call.static.single)
    function = custom_partitioning(lambda *values: local(_by_xla(call), _unsharded_layout(tree, x_ndim), values))
    function.def_partition(
        partition=partition,
        sharding_rule=f"{rule.operands}, {rule.ys} -> {rule.gradients}",
        reduction_factors=rule.summed_in_backward,
    )
    return function


def _layout_chosen_by_xla(call: Call, tree: Any, mesh: Any, arguments: Any) -> tuple[Layout, Operands, Operands]:
    """The layout that follows from XLA's choice, the shapes of the operands, and their specs in this layout."""
    ops = jax.tree.unflatten(tree, arguments)
    ws = [weight_spec(w, lambda array: array.sharding.spec) for w in ops.ws]
    layout = layout_of(ops.x.sharding.spec, ws, x_ndim=len(ops.x.shape))
    layout = layout.only_even(mesh.shape, ops.x.shape, ops.ws)
    return layout, ops, layout.specs(ops, single=call.static.single)


def _unsharded_layout(tree: Any, x_ndim: int) -> Layout:
    ops = jax.tree.unflatten(tree, range(tree.num_leaves))
    return Layout(leading=((),) * (x_ndim - 1), k=(), ns=((),) * len(ops.ws))


def _by_xla(call: Call) -> Call:
    """What stands for the call until it is split: only its shapes count, and it may hold no constants."""
    return dataclasses.replace(call, implementation=XLA)


def _shardings(mesh: Any, specs: Any) -> tuple[NamedSharding, ...]:
    return tuple(NamedSharding(mesh, spec) for spec in specs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """Names of the dimensions of every array of a call, in the language of sharding rules."""

    operands: str
    ys: str
    gradients: str
    summed_in_backward: tuple[str, ...]  # what no gradient has any more

    @classmethod
    def of(cls, tree: Any, x_ndim: int, *, single: bool) -> _Rule:
        ops = jax.tree.unflatten(tree, range(tree.num_leaves))
        leading = [f"t{d}" for d in range(x_ndim - 1)]
        rows = " ".join(leading)

        def dimensions(arrays: Any, text: str) -> tuple[str | None, ...]:
            return tuple(None if v is None else text.format(i) for i, v in enumerate(arrays))

        specs = dataclasses.replace(
            ops,
            x=f"{rows} k",
            ws=tuple(rule_names(w, i) for i, w in enumerate(ops.ws)),
            as_=dimensions(ops.as_, "a k r{}"),
            bs=dimensions(ops.bs, "a r{0} n{0}"),
            biases=dimensions(ops.biases, "n{}"),
            tile_adapter="one" if single else rows,
            scale="a",
            dropout=None if ops.dropout is None else Dropout(rate="a", key="a", row_key=rows),  # type: ignore[arg-type]
            ranks=None if ops.ranks is None else "a",  # type: ignore[arg-type]
        )
        banks = [specs.as_[i] for i in ops.with_lora] + [specs.bs[i] for i in ops.with_lora]
        return cls(
            operands=", ".join(jax.tree.leaves(specs)),
            ys=", ".join(f"{rows} n{i}" for i in range(len(ops.ws))),
            gradients=", ".join([specs.x, *banks]),
            summed_in_backward=tuple(f"n{i}" for i in range(len(ops.ws)) if i not in ops.with_lora),
        )
