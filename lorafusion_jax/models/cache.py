"""What layers keep for the next tokens of sequences: keys and values in blocks, and states.

A block has the keys and values of `BLOCK` positions of one sequence, or of several that begin alike. The table of a
sequence lists its blocks in order.

Dims: `T` rows of a pass · `G` groups of `J` rows, each of one sequence · `M` blocks of a table · `N` blocks of the pool
`S` positions of a block · `H` heads, `K` of keys · `R` rows × heads of a key head · `C` head width
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.device import target_platform
from pallas_kernels.exact import contract

ROWS = ("keys", "values", "latents")  # what is kept of each position; the rest are states
BLOCK = 32  # positions of a block: fewer share more, more are read in longer runs

# Of one layer, by name: "keys" and "values" [N, S, K, C], or "latents" with one K for both; or states [rows of the
# engine, …]. See `Layer.row_shapes`.
type Cache = dict[str, jax.Array]
# What layers read of an earlier layer: the rows of prompts, or its cache.
type CachedKeys = dict[str, Cache]
_MASKED = float("-inf")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRows:
    """Where the rows of a pass lie in the caches.

    Attributes:
        position_T: int32, position in its sequence; -1 for a row that is not in use.
        cell_T: int32, cell of the pool, block · S + offset; beyond it for a row that is not kept.
        tables_GM: int32, blocks of each group's sequence (None: rows attend to each other only).
        state_M: int32, row of the engine that keeps the state of each segment; beyond them for none.
        decoding: each row is the next token of the sequence in this row of the engine.
    """

    position_T: Int[Array, " T"] | np.ndarray
    cell_T: Int[Array, " T"] | np.ndarray
    tables_GM: Int[Array, "G M"] | np.ndarray | None = None
    state_M: Int[Array, " M"] | np.ndarray | None = None
    decoding: bool = field(default=False, metadata={"static": True})

    @property
    def reads_blocks(self) -> bool:
        """Whether rows attend to the blocks of their sequences."""
        return self.tables_GM is not None


def store(pool_NSKC: Float[Array, "N S K C"], rows_TKC: Float[Array, "T K C"], rows: CachedRows):
    """Returns the pool with rows in their cells.

    What is not finite is stored as 0: a block that another sequence gets later must not spread it. The sequence has
    logits that are not finite, and ends.
    """
    flat = pool_NSKC.reshape(-1, *pool_NSKC.shape[2:])
    finite = jnp.where(jnp.isfinite(rows_TKC), rows_TKC, 0).astype(flat.dtype)
    return flat.at[jnp.asarray(rows.cell_T)].set(finite, mode="drop").reshape(pool_NSKC.shape)


def paged_attention(
    q_THC: Float[Array, "T H C"],
    cache: Cache,
    rows: CachedRows,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    chunk: int | None = None,
) -> Float[Array, "T H*C"]:
    """Attention of rows to the blocks of their sequences, in which they are stored already.

    o[t] = Σ_s softmax_s(cap(scale · q[t]·k[s])) v[s] over the positions p - window < s ≤ p of the row's sequence,
    in the row's chunk
    """
    keys_NSKC, values_NSKC, tables_GM = cache["keys"], cache["values"], jnp.asarray(rows.tables_GM)
    T, H, C = q_THC.shape
    S, K = keys_NSKC.shape[1:3]
    G, M = tables_GM.shape
    J = T // G
    position_GJ = jnp.asarray(rows.position_T).reshape(G, J)
    options = {"scale": C**-0.5 if scale is None else scale, "window": window, "soft_cap": soft_cap}
    if J == 1 and chunk is None and target_platform() in ("gpu", "cuda"):
        from pallas_kernels.attention.triton.paged import paged_attention_kernel, paged_unsupported_reason

        if paged_unsupported_reason(q_THC, keys_NSKC) is None:
            o_THC = paged_attention_kernel(
                q_THC, keys_NSKC, values_NSKC, tables_GM, position_GJ[:, 0], sinks=sinks, **options
            )
            return o_THC.reshape(T, H * C)
    first_G, blocks = jnp.zeros(G, jnp.int32), M
    if window is not None and (visible_blocks := -(-(window + J - 1) // S) + 1) < M:  # blocks that rows can see
        oldest_G = jnp.min(jnp.maximum(position_GJ, 0), 1) - window + 1
        first_G, blocks = jnp.maximum(oldest_G, 0) // S, visible_blocks
    number_GM = first_G[:, None] + jnp.arange(blocks)
    blocks_GM = jnp.take_along_axis(tables_GM, jnp.minimum(number_GM, M - 1), 1)
    at_GS = (number_GM[:, :, None] * S + jnp.arange(S)).reshape(G, -1)  # positions of the keys
    back_GJS = position_GJ[:, :, None] - at_GS[:, None]
    visible_GJS = (back_GJS >= 0) & (back_GJS < (jnp.iinfo(jnp.int32).max if window is None else window))
    if chunk is not None:
        visible_GJS &= (at_GS // chunk)[:, None] == (position_GJ // chunk)[:, :, None]

    def gathered(pool_NSKC: jax.Array) -> jax.Array:
        return pool_NSKC[blocks_GM].reshape(G, -1, K, C).swapaxes(1, 2)

    q_GKRC = q_THC.reshape(G, J, K, H // K, C).swapaxes(1, 2).reshape(G, K, -1, C)
    sinks_KR = None if sinks is None else jnp.tile(sinks.reshape(K, H // K), (1, J))
    visible_GRS = jnp.repeat(visible_GJS, H // K, 1)[:, None]
    o_GKRC = attend(
        q_GKRC, gathered(keys_NSKC), gathered(values_NSKC), visible_GRS, sinks_KR,
        scale=options["scale"], soft_cap=soft_cap,
    )  # fmt: skip
    return o_GKRC.reshape(G, K, J, H // K, C).swapaxes(1, 2).reshape(T, H * C)


def attend(
    q_GKRC: Float[Array, "G K R C"],
    k_GKSC: Float[Array, "G K S C"],
    v_GKSC: Float[Array, "G K S C"],
    seen: Bool[Array, "G 1 #R S"],
    sinks_KR: Float[Array, "K R"] | None,
    *,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "G K R C"]:
    """Attention of the R rows of each key head to the S keys that they see."""
    scores = contract("ikrc,iksc->ikrs", q_GKRC, k_GKSC) * scale
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, _MASKED)
    most = jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(jnp.float32).min)  # rows that see nothing
    sink_weight = 0.0
    if sinks_KR is not None:  # a key without a value
        sink_GKR1 = jnp.broadcast_to(sinks_KR.astype(jnp.float32)[None, :, :, None], most.shape)
        most = jnp.maximum(most, sink_GKR1)
        sink_weight = jnp.exp(sink_GKR1 - most)
    weights = jnp.exp(scores - most)
    total = weights.sum(-1, keepdims=True) + sink_weight
    o_GKRC = contract("ikrs,iksc->ikrc", weights.astype(v_GKSC.dtype), v_GKSC)
    return (o_GKRC / jnp.where(total == 0, 1.0, total)).astype(q_GKRC.dtype)
