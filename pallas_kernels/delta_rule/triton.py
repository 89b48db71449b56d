"""The steps from chunk to chunk as one kernel each way: a program has some columns of a head's memory in registers.

XLA runs a few small kernels for each chunk, and the memory goes through device memory between them.

N chunks · B rows of a chunk · H value heads · C key width · V value width
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.triton_call import call

LEAST = 16  # rows and columns of an operand of Triton's products


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkConfig:
    """How the kernels are compiled. The defaults are the fastest of 23 on an H200, heads of 128.

    Attributes:
        columns: of the memory in a program, at most.
    """

    columns: int = 32
    num_warps: int = 4
    num_stages: int = 3


DEFAULT = WalkConfig()


def unsupported_reason(rows: int, key_width: int, value_width: int) -> str | None:
    """Why the kernels cannot serve chunks of so many rows; None if they can.

    >>> unsupported_reason(64, 128, 128), unsupported_reason(64, 96, 128)
    (None, 'rows, key and value width must be powers of two from 16 on, not 64, 96, 128')
    """
    sizes = rows, key_width, value_width
    if all(size >= LEAST and size & (size - 1) == 0 for size in sizes):
        return None
    return f"rows, key and value width must be powers of two from {LEAST} on, not {', '.join(map(str, sizes))}"


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def walk(
    u_NHBV: Float[Array, "N H B V"],
    w_NHBC: Float[Array, "N H B C"],
    late_NHBC: Float[Array, "N H B C"],
    decay_NH: Float[Array, "N H"],
    first_N: Bool[Array, " N"],
    precision: str | None = None,
    config: WalkConfig = DEFAULT,
    interpret: bool = False,
) -> tuple[Float[Array, "N H C V"], Float[Array, "N H B V"]]:
    """Returns the memory S before each chunk, and the changes d that the chunk makes to it; all in float32.

    d = u - w S,  S of the next chunk = decay · S + lateᵀ d;  S = 0 before a chunk that is first of its segment
    """
    N, H, B, V = u_NHBV.shape
    C, columns = w_NHBC.shape[-1], min(config.columns, V)

    def kernel(u_ref, w_ref, late_ref, decay_ref, first_ref, memory_ref, changes_ref):
        # d = u - w S acts on each column of S alone, so programs share a head's columns and exchange nothing.
        head, block = pl.program_id(0), pl.ds(pl.program_id(1) * columns, columns)

        def step(chunk, memory):
            memory = jnp.where(first_ref[chunk] != 0, 0.0, memory)  # selected: NaN of another segment ends there
            changes = u_ref[chunk, head, :, block] - _dot(w_ref[chunk, head, :, :], memory, precision)
            # The output of a chunk and its backward pass need the memory before it, so that is what is written.
            memory_ref[chunk, head, :, block] = memory
            changes_ref[chunk, head, :, block] = changes
            added = _dot(late_ref[chunk, head, :, :], changes, precision, trans_lhs=True)
            return memory * decay_ref[chunk, head] + added

        # A loop and no axis of the grid: a chunk needs the memory that the chunk before it leaves in registers.
        lax.fori_loop(0, N, step, jnp.zeros((C, columns), jnp.float32))

    shapes = [jax.ShapeDtypeStruct((N, H, rows, V), jnp.float32) for rows in (C, B)]
    operands = [u_NHBV, w_NHBC, late_NHBC, decay_NH, first_N.astype(jnp.int32)]
    memory, changes = call(
        kernel, operands, name="delta_rule_walk", grid=(H, V // columns), out_shape=shapes, flops=4 * N * H * B * C * V,
        num_warps=config.num_warps, num_stages=config.num_stages, interpret=interpret,
    )  # fmt: skip
    return memory, changes


def _forward(u, w, late, decay, first, precision, config, interpret):
    memory, changes = walk(u, w, late, decay, first, precision, config, interpret)
    return (memory, changes), (w, late, decay, first, memory, changes)


def _backward(precision, config, interpret, kept, slopes):
    """Walks back for the gradients of d, which are those of u, and of S after each chunk. The others are products of
    these and of what forward made, for all chunks at once."""
    w, late, decay, first, memory, changes = kept
    dmemory, dchanges = slopes
    du, after = _walk_back(dmemory, dchanges, w, late, decay, first, precision, config, interpret)
    by_chunk = partial(jnp.einsum, precision=precision)
    # No mask for first chunks: the memory before them is 0, and so are these gradients of w and decay.
    dw = -by_chunk("nhbv,nhcv->nhbc", du, memory)
    dlate = by_chunk("nhbv,nhcv->nhbc", changes, after)
    return du, dw, dlate, (memory * after).sum((-2, -1)), None


walk.defvjp(_forward, _backward)


def _walk_back(dmemory, dchanges, w, late, decay, first, precision, config, interpret) -> tuple[jax.Array, jax.Array]:
    N, H, C, V = dmemory.shape
    B, columns = w.shape[2], min(config.columns, V)

    def kernel(dmemory_ref, dchanges_ref, w_ref, late_ref, decay_ref, first_ref, du_ref, after_ref):
        head, block = pl.program_id(0), pl.ds(pl.program_id(1) * columns, columns)

        def step(index, after):
            chunk = N - 1 - index
            # `after` is the gradient of the memory after the chunk. Its product with late is what d has in the next
            # memory; the gradient of d then goes on to the memory before the chunk, by w.
            after_ref[chunk, head, :, block] = after
            du = dchanges_ref[chunk, head, :, block] + _dot(late_ref[chunk, head, :, :], after, precision)
            du_ref[chunk, head, :, block] = du
            before = dmemory_ref[chunk, head, :, block] + after * decay_ref[chunk, head]
            before = before - _dot(w_ref[chunk, head, :, :], du, precision, trans_lhs=True)
            return jnp.where(first_ref[chunk] != 0, 0.0, before)  # no gradient leaves a segment at its begin

        lax.fori_loop(0, N, step, jnp.zeros((C, columns), jnp.float32))

    shapes = [jax.ShapeDtypeStruct((N, H, rows, V), jnp.float32) for rows in (B, C)]
    operands = [dmemory, dchanges, w, late, decay, first.astype(jnp.int32)]
    du, after = call(
        kernel, operands, name="delta_rule_walk_back", grid=(H, V // columns), out_shape=shapes,
        flops=4 * N * H * B * C * V, num_warps=config.num_warps, num_stages=config.num_stages, interpret=interpret,
    )  # fmt: skip
    return du, after


def _dot(lhs: jax.Array, rhs: jax.Array, precision: str | None, *, trans_lhs: bool = False) -> jax.Array:
    return plt.dot(lhs, rhs, trans_a=trans_lhs, precision=precision)
