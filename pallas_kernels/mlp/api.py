"""A gated MLP plus the LoRA of each row's adapter on its three projections, as one op.

On its own each projection must read and write the wide arrays between them for its low-rank branch. Together, the pass
that gates does that work on the way: see `mlp.hopper.backend`.

T packed tokens · D model width · F MLP width · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from pallas_kernels import backend, policy
from pallas_kernels.batching import refuse_vmap
from pallas_kernels.device import is_hopper, num_sms
from pallas_kernels.dropout import Dropout
from pallas_kernels.frozen_weight import QuantisedWeight
from pallas_kernels.linear.api import multi_lora_linear, multi_lora_linears
from pallas_kernels.linear.describe import Arguments, describe
from pallas_kernels.linear.mesh import partition
from pallas_kernels.linear.vjp import gradients
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.mlp.xla import silu_gate
from pallas_kernels.policy import Implementation
from pallas_kernels.problem import Operands, Static, linear_shape

# Differentiation of the MLP as one op.
#
# T packed tokens · D model width · F MLP width · R padded rank · A adapters

if TYPE_CHECKING:
    from types import ModuleType


def passes() -> ModuleType:
    """Hopper's passes at the gate; imported only where they serve."""
    return importlib.import_module("pallas_kernels.mlp.hopper.backend")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply(static: Static, ops: Operands, down: Operands) -> jax.Array:
    """Evaluates the MLP; x of `down` is not read."""
    return _forward(static, ops, down)[0]


def _forward(static: Static, ops: Operands, down: Operands):
    inside, inside_down = vary_like(refuse_vmap((ops, down)), ops.x)
    y, saved = passes().forward(static, inside, inside_down)
    return y, (ops, down, saved)


def _backward(static: Static, residuals, dy: jax.Array):
    ops, down, saved = residuals
    inside, inside_down = vary_like((ops, down), ops.x)
    (dx, das, dbs), (down_das, down_dbs) = passes().backward(static, inside, inside_down, saved, dy)
    return gradients(ops, dx.astype(ops.x.dtype), das, dbs), gradients(down, None, down_das, down_dbs)


apply.defvjp(_forward, _backward)


def multi_lora_mlp(
    x: Float[Array, "*B D"],
    ws: Sequence[Float[Array, "_ _"] | QuantisedWeight],
    as_: Sequence[Float[Array, "A _ _"] | None],
    bs: Sequence[Float[Array, "A _ _"] | None],
    *,
    tile_adapter: Int[ArrayLike, " tiles"] | Sequence[int] | None,
    scale: Float[ArrayLike, " A"] | Sequence[float],
    dropout: Dropout | None = None,
    down_dropout: Dropout | None = None,
    biases: Sequence[Float[Array, " _"] | None] | None = None,
    ranks: Int[ArrayLike, " A"] | Sequence[int] | None = None,
    implementation: Implementation | str | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Float[Array, "*B D"]:
    """Applies down(silu(gate(x)) · up(x)) with LoRA on every projection that has it.

    lin_i(z)[t] = z[t] W_i + scale[k] * (drop(z[t]) A_i[k]) B_i[k] (+ bias_i),  k = adapter of row t's tile
    y = lin_down(silu(lin_gate(x)) · lin_up(x))

    The products before the gate carry the names "gate" and "up" for rematerialisation policies (on Hopper without their
    low-rank parts: a policy that keeps them keeps "lora_s" and "lora_bits", too).

    Args:
        x: [..., D].
        ws, as_, bs, biases: of gate [D, F], up [D, F] and down [F, D], in this order; otherwise as in
            `multi_lora_linears`.
        dropout: of the LoRA branches that read x; down_dropout: of the one that reads the gated array.
        tile_adapter, scale, ranks, implementation: as in `multi_lora_linear`. What the passes at the gate of Hopper's
            backend cannot serve runs as three ops of the backend, and so does every call on a mesh.
        out_sharding: of y, on a mesh; as in `multi_lora_linear`.
    Raises:
        ValueError: shapes do not fit, or the implementation is unknown.
        NotImplementedError: the named implementation cannot serve this call; the message says why.

    Example:
        >>> import jax.numpy as jnp
        >>> ws = [jnp.ones((8, 6)), jnp.ones((8, 6)), jnp.ones((6, 8))]
        >>> as_ = [jnp.ones((1, w.shape[0], 4)) for w in ws]
        >>> bs = [jnp.zeros((1, 4, w.shape[1])) for w in ws]
        >>> table, scale = jnp.array([0, 0]), jnp.array([2.0])
        >>> multi_lora_mlp(jnp.ones((4, 8)), ws, as_, bs, tile_adapter=table, scale=scale).shape
        (4, 8)
    """
    ws, as_, bs = tuple(ws), tuple(as_), tuple(bs)
    biases = (None,) * len(ws) if biases is None else tuple(biases)
    arguments = Arguments(
        x=x,
        ws=ws,
        as_=as_,
        bs=bs,
        biases=biases,
        tile_adapter=tile_adapter,
        scale=scale,
        dropout=dropout,
        ranks=ranks,
    )
    _check(arguments)
    shared = {"tile_adapter": tile_adapter, "scale": scale, "ranks": ranks, "implementation": implementation}
    call = _fused_call(arguments, down_dropout, implementation)
    if call is not None:
        static, gate_up, down = call
        ops, down = _vary_banks_like(gate_up, gate_up.x), _vary_banks_like(down, gate_up.x)
        y = apply(static, ops, down).reshape(*x.shape[:-1], -1)
        return y if out_sharding is None else partition.place(y, out_sharding)
    gate, up = multi_lora_linears(x, ws[:2], as_[:2], bs[:2], biases=biases[:2], dropout=dropout, **shared)
    gated = silu_gate(checkpoint_name(gate, "gate"), checkpoint_name(up, "up"))
    shared["out_sharding"] = out_sharding
    if as_[2] is None or bs[2] is None:
        (y,) = multi_lora_linears(gated, ws[2:], as_[2:], bs[2:], biases=biases[2:], **shared)
        return y
    return multi_lora_linear(gated, ws[2], as_[2], bs[2], bias=biases[2], dropout=down_dropout, **shared)


def _check(arguments: Arguments) -> None:
    """Raises ValueError where the three projections do not fit each other; each alone is checked where it is called."""
    ws, as_, bs, biases = arguments.ws, arguments.as_, arguments.bs, arguments.biases
    if not len(ws) == len(as_) == len(bs) == len(biases) == 3:
        raise ValueError(
            f"{len(ws)} ws, {len(as_)} as_, {len(bs)} bs, {len(biases)} biases: expected gate, up and down"
        )
    gate, up, down = (w.shape for w in ws)
    if not len(gate) == len(up) == len(down) == 2 or not gate[1] == up[1] == down[0]:
        raise ValueError(f"gate {gate}, up {up}, down {down}: expected [D, F], [D, F] and [F, D] with one F")


def _fused_call(
    arguments: Arguments, down_dropout: Dropout | None, implementation: str | None
) -> tuple[Static, Operands, Operands] | None:
    """What the fused passes need, where they serve: on Hopper, if that backend serves every projection on its own.

    On a mesh the three ops split themselves. The fused passes count the columns of dropout from 0.
    """
    if down_dropout is not None and down_dropout.first_column is not None:
        return None
    arrays = jax.tree.leaves((arguments.x, arguments.ws, arguments.as_, arguments.bs))
    if partition.mesh_of(arrays, implementation) is not None or 0 in arguments.x.shape[:-1]:
        return None
    static, ops = describe(_of_projections(arguments, slice(0, 2)))
    hidden = jax.ShapeDtypeStruct((ops.x.shape[0], arguments.ws[2].shape[0]), ops.x.dtype)
    down_arguments = dataclasses.replace(_of_projections(arguments, slice(2, 3)), x=hidden, dropout=down_dropout)
    try:
        _, down = describe(down_arguments)
    except ValueError as problem:
        raise ValueError(f"the projection after the gate: {problem}") from None
    gate_up_shape, down_shape = linear_shape(static, ops), linear_shape(static, down)
    quantised = ops.quantised or down.quantised
    measured = policy.nothing_measured if quantised else backend.measured_backend
    device = {"hopper": is_hopper(), "num_sms": num_sms(), "measured": measured}
    if not policy.mlp_is_fused(gate_up_shape, down_shape, implementation, **device):
        return None
    if passes().unsupported_reason(static, ops, down) is not None:
        return None
    return static, ops, dataclasses.replace(down, x=None)


def _of_projections(arguments: Arguments, which: slice) -> Arguments:
    lists = {name: getattr(arguments, name)[which] for name in ("ws", "as_", "bs", "biases")}
    return dataclasses.replace(arguments, **lists)


def _vary_banks_like(ops: Operands, x: jax.Array) -> Operands:
    """Outside of the rule, so that dA and dB are summed over the mesh."""
    as_, bs = vary_like((ops.as_, ops.bs), x)
    return dataclasses.replace(ops, as_=as_, bs=bs)
