"""Keys and values that a layer keeps for the next tokens of its sequences.

Dims: `T` rows of a pass · `B` sequences · `H` heads, `K` of keys · `R` rows × heads of a key head · `S` slots
`N` slots and new rows · `C` head width
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

type Cache = dict[str, jax.Array]  # of one layer, by name, [B, …]; shapes: `cache_shapes` of its mechanism
# What layers read of an earlier layer: of a decoding pass its cache "after", otherwise its "rows" and, where the prompt
# goes on, its cache "before" them.
type CachedKeys = dict[str, Cache]
_MASKED = float("-inf")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRows:
    """Where the rows of a pass lie in the caches.

    Attributes:
        sequence_T: int32, index of the row's sequence; B for a row that is not kept.
        position_T: int32, position in its sequence.
        length_T: int32, tokens that its sequence has after the pass.
        decoding: row t is the next token of sequence t. Otherwise the pass holds prompts.
        continued: the prompt goes on where a cache ends; all rows of the pass belong to the sequence of the first.
    """

    sequence_T: Int[Array, " T"] | np.ndarray
    position_T: Int[Array, " T"] | np.ndarray
    length_T: Int[Array, " T"] | np.ndarray
    decoding: bool = field(metadata={"static": True})
    continued: bool = field(default=False, metadata={"static": True})


def store(cache_BKSC: Float[Array, "B K S C"], rows_TKC: Float[Array, "T K C"], rows: CachedRows):
    """Returns the cache with rows in the slots position mod S; of a longer prompt the last S rows."""
    B, _, S, _ = cache_BKSC.shape
    last = rows.position_T >= rows.length_T - S
    sequence_T = jnp.where(last, rows.sequence_T, B)  # beyond the end: dropped
    return cache_BKSC.at[sequence_T, :, rows.position_T % S].set(rows_TKC.astype(cache_BKSC.dtype), mode="drop")


def cached_attention(
    q_BHC: Float[Array, "B H C"],
    k_BKSC: Float[Array, "B K S C"],
    v_BKSC: Float[Array, "B K S C"],
    position_B: Int[Array, " B"],
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "B H*C"]:
    """Attention of one row of each sequence to the rows in its cache; arguments as in `models.attention`.

    o[b] = Σ_s softmax_s(cap(scale · q[b]·k[s])) v[s] over the positions p - window < s ≤ p of sequence b

    Args:
        position_B: p, position of each row, already stored; its cache holds the S positions up to p.
    """
    B, H, C = q_BHC.shape
    K, S = k_BKSC.shape[1:3]
    back_BS = (position_B[:, None] - jnp.arange(S)) % S  # how far back a slot's row is
    seen_BS = (back_BS <= position_B[:, None]) & (back_BS < (S if window is None else window))
    sinks_KR = None if sinks is None else sinks.reshape(K, H // K)
    q_BKRC, options = q_BHC.reshape(B, K, H // K, C), {"scale": scale, "soft_cap": soft_cap}
    return _attend(q_BKRC, k_BKSC, v_BKSC, seen_BS[:, None, None], sinks_KR, **options).reshape(B, H * C)


def continued_attention(
    q_THC: Float[Array, "T H C"],
    k_TKC: Float[Array, "T K C"],
    v_TKC: Float[Array, "T K C"],
    cache: Cache,
    rows: CachedRows,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "T H*C"]:
    """Attention of the next rows of one sequence to those in its cache and to each other.

    Args:
        cache: without these rows: theirs may lie in slots that the first of them still reads.
    """
    sequence, position_T = jnp.asarray(rows.sequence_T)[0], jnp.asarray(rows.position_T)
    keys_KSC, values_KSC = cache["keys"][sequence], cache["values"][sequence]
    S, newest = keys_KSC.shape[1], position_T[0] - 1  # the last position in the cache
    position_S = newest - (newest - jnp.arange(S)) % S
    real_T = jnp.asarray(rows.sequence_T) == sequence
    position_N = jnp.concatenate([position_S, jnp.where(real_T, position_T, -1)])  # negative: nothing is there
    back_TN = position_T[:, None] - position_N
    seen_TN = (position_N >= 0) & (back_TN >= 0) & (back_TN < (window or jnp.iinfo(jnp.int32).max))
    keys_KNC, values_KNC = (
        jnp.concatenate([old, new.astype(old.dtype).swapaxes(0, 1)], 1)
        for old, new in ((keys_KSC, k_TKC), (values_KSC, v_TKC))
    )
    T, H, C = q_THC.shape
    K = len(keys_KNC)
    q_BKRC = q_THC.reshape(T, K, H // K, C).swapaxes(0, 1).reshape(1, K, -1, C)
    seen_RN = jnp.repeat(seen_TN, H // K, 0)
    sinks_KR = None if sinks is None else jnp.tile(sinks.reshape(K, H // K), (1, T))
    options = {"scale": scale, "soft_cap": soft_cap}
    o_BKRC = _attend(q_BKRC, keys_KNC[None], values_KNC[None], seen_RN[None, None], sinks_KR, **options)
    return o_BKRC.reshape(K, T, H // K, C).swapaxes(0, 1).reshape(T, H * C)


def _attend(
    q_BKRC: Float[Array, "B K R C"],
    k_BKSC: Float[Array, "B K S C"],
    v_BKSC: Float[Array, "B K S C"],
    seen: Bool[Array, "B 1 #R S"],
    sinks_KR: Float[Array, "K R"] | None,
    *,
    scale: float | None,
    soft_cap: float | None,
) -> Float[Array, "B K R C"]:
    """Attention of the R rows of each key head to the slots that they see."""
    precision = "highest" if q_BKRC.dtype == jnp.float32 else None
    scores = jnp.einsum("bkrc,bksc->bkrs", q_BKRC, k_BKSC, precision=precision, preferred_element_type=jnp.float32)
    scores = scores * (q_BKRC.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, _MASKED)
    most = scores.max(-1, keepdims=True)
    rest = 0.0
    if sinks_KR is not None:  # a key without a value
        sink_BKR1 = jnp.broadcast_to(sinks_KR.astype(jnp.float32)[None, :, :, None], most.shape)
        most = jnp.maximum(most, sink_BKR1)
        rest = jnp.exp(sink_BKR1 - most)
    weights = jnp.exp(scores - most)
    total = weights.sum(-1, keepdims=True) + rest
    o_BKRC = jnp.einsum(
        "bkrs,bksc->bkrc",
        weights.astype(v_BKSC.dtype),
        v_BKSC,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return (o_BKRC / total).astype(q_BKRC.dtype)
