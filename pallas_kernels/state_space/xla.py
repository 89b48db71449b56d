"""A selective state space in chunks, in plain jnp: products of matrices within a chunk, and one step per chunk.

T rows · N chunks · B rows of a chunk · H heads · G groups of heads · C width of a state · V width of a head · M slots
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule.chunks import last_chunks, make_chunks, to_chunks, to_rows


def state_space(
    x: Float[Array, "T H V"],
    b: Float[Array, "T G C"],
    c: Float[Array, "T G C"],
    decay: Float[Array, "T H"],
    *,
    ids: Int[Array, " T"],
    offsets: Int[Array, " M+1"],
    lengths: Int[Array, " M"],
) -> Float[Array, "T H V"]:
    """Reads a state S [C, V] per head, which each row first lets decay and then adds to, from empty in each segment.

    S ← e^decay S + b ⊗ x,  y = cᵀ S

    H / G heads share b and c. Computed in float32, in chunks that belong to one segment each (Dao and Gu, "Transformers
    are SSMs", 2024), so NaN and infinity stay inside their own segment. Backward keeps the arguments only.

    Args:
        decay: ≤ 0, log of what is left of the state.
        ids: number of the segment of each row.
        offsets, lengths: first row and number of rows of each segment, -1 in unused slots.

    Example:
        >>> one = jnp.ones((3, 1, 1))
        >>> segment = {"ids": jnp.array([0, 0, 1]), "offsets": jnp.array([0, 2, -1]), "lengths": jnp.array([2, 1])}
        >>> state_space(jnp.array([[[2.0]], [[4.0]], [[6.0]]]), one, one, jnp.zeros((3, 1)), **segment).ravel().tolist()
        [2.0, 6.0, 6.0]
    """
    return state_space_with_states(x, b, c, decay, ids=ids, offsets=offsets, lengths=lengths)[0]


def state_space_with_states(
    x: Float[Array, "T H V"],
    b: Float[Array, "T G C"],
    c: Float[Array, "T G C"],
    decay: Float[Array, "T H"],
    *,
    ids: Int[Array, " T"],
    offsets: Int[Array, " M+1"],
    lengths: Int[Array, " M"],
) -> tuple[Float[Array, "T H V"], Float[Array, "M H C V"]]:
    """Like `state_space`, and returns the state after each segment; that of an unused slot means nothing."""
    precision = "highest" if x.dtype == jnp.float32 else None

    @jax.checkpoint
    def run(*rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        chunks = make_chunks(ids, offsets, lengths)
        x_NBHV, b_NBGC, c_NBGC, decay_NBH = (to_chunks(row, chunks).astype(jnp.float32) for row in rows)
        y_NBHV, after_NHCV = _in_chunks(x_NBHV, b_NBGC, c_NBGC, decay_NBH, chunks.first_N, precision)
        return to_rows(y_NBHV, chunks).astype(x.dtype), after_NHCV[last_chunks(jnp.asarray(lengths), len(ids))]

    return run(x, b, c, decay)


def state_space_step(
    state_BHCV: Float[Array, "B H C V"],
    x_BHV: Float[Array, "B H V"],
    b_BGC: Float[Array, "B G C"],
    c_BGC: Float[Array, "B G C"],
    decay_BH: Float[Array, "B H"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H C V"]]:
    """Computes one row of each of some segments, from their states. Returns y and the states after.

    >>> one = jnp.ones((1, 1, 1))
    >>> y, after = state_space_step(jnp.full((1, 1, 1, 1), 2.0), 4 * one, one, one, jnp.zeros((1, 1)))
    >>> y.ravel().tolist()
    [6.0]
    """
    share = x_BHV.shape[1] // b_BGC.shape[1]
    b, c = (jnp.repeat(row.astype(jnp.float32), share, axis=1) for row in (b_BGC, c_BGC))
    after = state_BHCV * jnp.exp(decay_BH)[..., None, None] + b[..., None] * x_BHV.astype(jnp.float32)[:, :, None]
    return jnp.einsum("bhcv,bhc->bhv", after, c, precision="highest").astype(x_BHV.dtype), after


def _in_chunks(
    x_NBHV: jax.Array, b_NBGC: jax.Array, c_NBGC: jax.Array, decay_NBH: jax.Array, first_N: jax.Array,
    precision: str | None,
) -> tuple[Float[Array, "N B H V"], Float[Array, "N H C V"]]:  # fmt: skip
    """Returns y, and the state after each chunk."""

    def dot(equation: str, *operands: jax.Array) -> jax.Array:
        return jnp.einsum(equation, *operands, precision=precision)

    N, B, G, _ = b_NBGC.shape
    x = x_NBHV.reshape(N, B, G, -1, x_NBHV.shape[-1]).transpose(0, 2, 3, 1, 4)  # [N, G, heads of a group, B, V]
    total = jnp.cumsum(decay_NBH.reshape(N, B, G, -1).transpose(0, 2, 3, 1), axis=-1)
    earlier = jnp.tril(jnp.ones((B, B), bool))
    between = jnp.exp(jnp.where(earlier, total[..., :, None] - total[..., None, :], -jnp.inf))
    inside = dot("nigc,njgc->ngij", c_NBGC, b_NBGC)[:, :, None] * between
    late = jnp.exp(total[..., -1:] - total)
    added = dot("njgc,nghj,nghjv->nghcv", b_NBGC, late, x)

    def step(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        added, fade, first = chunk
        state = jnp.where(first, 0.0, state)
        return state * fade[..., None, None] + added, state

    fade = jnp.exp(total[..., -1])
    before = lax.scan(step, jnp.zeros_like(added[0]), (added, fade, first_N))[1]
    after = before * fade[..., None, None] + added
    y = dot("nghij,nghjv->nghiv", inside, x)
    y = y + dot("nigc,nghcv->nghiv", c_NBGC, before) * jnp.exp(total)[..., None]
    return y.transpose(0, 3, 1, 2, 4).reshape(x_NBHV.shape), after.reshape(N, -1, *after.shape[-2:])
