"""Keys and values that a layer keeps for the next tokens of its sequences.

Dims: `T` rows of a pass · `B` sequences · `H` heads = `K` key heads × `G` · `S` slots · `C` head width
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

type Cache = dict[str, jax.Array]  # of one layer, by name, [B, …]; shapes: `cache_shapes` of its mechanism
_MASKED = float("-inf")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRows:
    """Where the rows of a pass lie in the caches.

    Attributes:
        sequence_T: int32, index of the row's sequence; B for a row that is not kept.
        position_T: int32, position in its sequence.
        length_T: int32, tokens that its sequence has after the pass.
        decoding: row t is the next token of sequence t. Otherwise the pass holds whole prompts.
    """

    sequence_T: Int[Array, " T"] | np.ndarray
    position_T: Int[Array, " T"] | np.ndarray
    length_T: Int[Array, " T"] | np.ndarray
    decoding: bool = field(metadata={"static": True})


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
    precision = "highest" if q_BHC.dtype == jnp.float32 else None
    q_BKGC = q_BHC.reshape(B, K, H // K, C)
    scores = jnp.einsum("bkgc,bksc->bkgs", q_BKGC, k_BKSC, precision=precision, preferred_element_type=jnp.float32)
    scores = scores * (C**-0.5 if scale is None else scale)
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    back_BS = (position_B[:, None] - jnp.arange(S)) % S  # how far back a slot's row is
    seen_BS = (back_BS <= position_B[:, None]) & (back_BS < (S if window is None else window))
    scores = jnp.where(seen_BS[:, None, None], scores, _MASKED)
    most = scores.max(-1, keepdims=True)
    rest = 0.0
    if sinks is not None:  # a key without a value
        sink_BKG1 = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, K, H // K, 1), most.shape)
        most = jnp.maximum(most, sink_BKG1)
        rest = jnp.exp(sink_BKG1 - most)
    weights = jnp.exp(scores - most)
    total = weights.sum(-1, keepdims=True) + rest
    o_BKGC = jnp.einsum(
        "bkgs,bksc->bkgc",
        weights.astype(v_BKSC.dtype),
        v_BKSC,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return (o_BKGC / total).astype(q_BHC.dtype).reshape(B, H * C)
