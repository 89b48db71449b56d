"""The gated delta rule over packed rows.

T rows · H value heads · K key heads · C key width · V value width · M segment slots
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule.chunks import chunk_rows, last_chunks, make_chunks, to_chunks, to_rows
from pallas_kernels.delta_rule.xla import Walk, delta_rule_in_chunks
from pallas_kernels.device import interprets, is_hopper
from pallas_kernels.exact import precision_of

DeltaRuleImplementation = Literal["xla", "pallas_triton"]
WIDEST = 128  # head width up to which the kernels are the default


def gated_delta_rule(
    q: Float[Array, "T K C"],
    k: Float[Array, "T K C"],
    v: Float[Array, "T H V"],
    decay: Float[Array, "T H"],
    beta: Float[Array, "T H"],
    *,
    ids: Int[Array, " T"],
    offsets: Int[Array, " M+1"],
    lengths: Int[Array, " M"],
    implementation: DeltaRuleImplementation | None = None,
) -> Float[Array, "T H V"]:
    """Reads a memory S [C, V] per head, which each row first lets decay and then corrects, from empty in each segment.

    S ← e^decay S,  S ← S + k ⊗ β (v - kᵀ S),  o = qᵀ S

    H / K value heads share a key head. Computed in float32, in chunks of 64 rows. NaN and infinity stay inside their
    own segment, in forward and backward. Backward keeps the arguments only, and computes the chunks again.

    Args:
        q, k: of unit length, or shorter; q with the scale of the scores.
        decay: ≤ 0, log of what is left of the memory.
        beta: 0 to 1, how much of the error is corrected.
        ids: number of the segment of each row.
        offsets, lengths: first row and number of rows of each segment, -1 in unused slots.
        implementation: of the steps from chunk to chunk. By default the kernels where they were measured, on Hopper
            GPUs below float32, and XLA elsewhere.

    Raises:
        NotImplementedError: the named kernels cannot serve these widths.

    Example:
        >>> one = jnp.ones((3, 1, 2)) * 0.5**0.5
        >>> kept, all_of_it = jnp.zeros((3, 1)), jnp.ones((3, 1))
        >>> segment = {"ids": jnp.array([0, 0, 1]), "offsets": jnp.array([0, 2, -1]), "lengths": jnp.array([2, 1])}
        >>> v = jnp.array([[[2.0]], [[4.0]], [[6.0]]])
        >>> gated_delta_rule(one, one, v, kept, all_of_it, **segment).ravel().round(4).tolist()
        [2.0, 4.0, 6.0]
    """
    return _rule(q, k, v, decay, beta, ids, offsets, lengths, implementation, with_states=False)[0]


def delta_rule_with_states(
    q: Float[Array, "T K C"],
    k: Float[Array, "T K C"],
    v: Float[Array, "T H V"],
    decay: Float[Array, "T H"],
    beta: Float[Array, "T H"],
    *,
    ids: Int[Array, " T"],
    offsets: Int[Array, " M+1"],
    lengths: Int[Array, " M"],
    implementation: DeltaRuleImplementation | None = None,
) -> tuple[Float[Array, "T H V"], Float[Array, "M H C V"]]:
    """Like `gated_delta_rule`, and returns the memory after each segment; that of an unused slot means nothing."""
    o_THV, states_MHCV = _rule(q, k, v, decay, beta, ids, offsets, lengths, implementation, with_states=True)
    assert states_MHCV is not None
    return o_THV, states_MHCV


def _rule(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, ids: jax.Array, offsets: jax.Array,
    lengths: jax.Array, implementation: DeltaRuleImplementation | None, *, with_states: bool,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    precision = precision_of(v.dtype)
    implementation = implementation or _preferred(q, v)
    walk = _kernel_walk(q, v, precision) if implementation == "pallas_triton" else None

    @jax.checkpoint
    def rule(*rows: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        chunks = make_chunks(ids, offsets, lengths)
        q, k, v, decay, beta = (to_chunks(x, chunks).astype(jnp.float32) for x in rows)
        last_M = last_chunks(lengths, len(ids)) if with_states else None
        o_NBHV, states_MHCV = delta_rule_in_chunks(
            q, k, v, decay, beta, chunks.first_N, precision=precision, walk=walk, last_M=last_M
        )
        return to_rows(o_NBHV, chunks).astype(rows[2].dtype), states_MHCV

    return rule(q, k, v, decay, beta)


def delta_rule_step(
    memory_BHCV: Float[Array, "B H C V"],
    q_BKC: Float[Array, "B K C"],
    k_BKC: Float[Array, "B K C"],
    v_BHV: Float[Array, "B H V"],
    decay_BH: Float[Array, "B H"],
    beta_BH: Float[Array, "B H"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H C V"]]:
    """Computes the rule for one row of each of some segments, from their memories. Returns o and the memories after.

    >>> memory, one = jnp.zeros((1, 1, 2, 1)), jnp.ones((1, 1, 2)) * 0.5**0.5
    >>> o, after = delta_rule_step(memory, one, one, jnp.full((1, 1, 1), 2.0), jnp.zeros((1, 1)), jnp.ones((1, 1)))
    >>> o.ravel().round(4).tolist()
    [2.0]
    """
    share = v_BHV.shape[1] // q_BKC.shape[1]
    q, k = (jnp.repeat(x.astype(jnp.float32), share, axis=1) for x in (q_BKC, k_BKC))
    memory = memory_BHCV * jnp.exp(decay_BH)[..., None, None]
    recall_BHV = jnp.einsum("bhcv,bhc->bhv", memory, k, precision="highest")
    change_BHV = beta_BH[..., None] * (v_BHV.astype(jnp.float32) - recall_BHV)
    memory = memory + k[..., None] * change_BHV[:, :, None]
    return jnp.einsum("bhcv,bhc->bhv", memory, q, precision="highest").astype(v_BHV.dtype), memory


def _preferred(q: jax.Array, v: jax.Array) -> DeltaRuleImplementation:
    """The fastest implementation. Wider heads would need more of the shared memory than was tried."""
    measured = is_hopper() and v.dtype != jnp.float32 and max(q.shape[-1], v.shape[-1]) <= WIDEST
    if not measured:
        return "xla"
    from pallas_kernels.delta_rule import triton  # loads Pallas

    reason = triton.unsupported_reason(chunk_rows(len(q)), q.shape[-1], v.shape[-1])
    return "xla" if reason else "pallas_triton"


def _kernel_walk(q: jax.Array, v: jax.Array, precision: str | None) -> Walk:
    from pallas_kernels.delta_rule import triton  # loads Pallas

    if reason := triton.unsupported_reason(chunk_rows(len(q)), q.shape[-1], v.shape[-1]):
        raise NotImplementedError(f"gated_delta_rule by pallas_triton: {reason}")
    return partial(_run_walk, precision, interprets())


def _run_walk(precision: str | None, interpret: bool, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.delta_rule import triton

    return triton.walk(*operands, precision, triton.WalkConfig(), interpret)
