"""The gated delta rule in chunks, in plain jnp: products of matrices within a chunk, and one step per chunk.

Within a chunk the changes of the memory are v' = X (β v) - X (β e^c k) S, with S the memory before the chunk, c the
running sum of the log decays and X = (1 + L)⁻¹, L_ij = β_i e^(c_i - c_j) k_i·k_j for j < i (the WY form of Yang et al.,
"Gated Delta Networks", 2024). All but S is computed for all chunks at once.

N chunks · B rows of a chunk · K key heads · G value heads of a key head · C key width · V value width
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.delta_rule.inverse import inverse_of_unit_lower


def delta_rule_in_chunks(
    q_NBKC: Float[Array, "N B K C"],
    k_NBKC: Float[Array, "N B K C"],
    v_NBHV: Float[Array, "N B H V"],
    decay_NBH: Float[Array, "N B H"],
    beta_NBH: Float[Array, "N B H"],
    first_N: Bool[Array, " N"],
    *,
    precision: str | None = None,
) -> Float[Array, "N B H V"]:
    """Computes the rule on chunks in order; a chunk that is first of its segment starts from an empty memory.

    All arrays are float32. Rows without content have zeros everywhere.
    """

    def dot(equation: str, *operands: jax.Array) -> jax.Array:
        return jnp.einsum(equation, *operands, precision=precision)

    N, B, K, _ = k_NBKC.shape
    q, k = (x.transpose(0, 2, 1, 3) for x in (q_NBKC, k_NBKC))  # [N, K, B, C]
    v = v_NBHV.reshape(N, B, K, -1, v_NBHV.shape[-1]).transpose(0, 2, 3, 1, 4)  # [N, K, G, B, V]
    decay, beta = (x.reshape(N, B, K, -1).transpose(0, 2, 3, 1) for x in (decay_NBH, beta_NBH))  # [N, K, G, B]
    c = jnp.cumsum(decay, axis=-1)
    earlier = jnp.tril(jnp.ones((B, B), bool))
    between = jnp.exp(jnp.where(earlier, c[..., :, None] - c[..., None, :], -jnp.inf))  # e^(c_i - c_j), j ≤ i
    products = dot("nkic,nkjc->nkij", k, k)[:, :, None] * between * beta[..., None]
    x = inverse_of_unit_lower(jnp.where(jnp.tril(earlier, -1), products, 0.0))
    u = dot("nkgij,nkgjv->nkgiv", x, v * beta[..., None])
    w = dot("nkgij,nkgjc->nkgic", x, k[:, :, None] * (beta * jnp.exp(c))[..., None])
    late_k = k[:, :, None] * jnp.exp(c[..., -1:] - c)[..., None]

    def step(memory: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        u, w, late_k, chunk_decay, first = chunk
        memory = jnp.where(first, 0.0, memory)
        changes = u - dot("kgic,kgcv->kgiv", w, memory)
        after = memory * chunk_decay[..., None, None] + dot("kgic,kgiv->kgcv", late_k, changes)
        return after, (memory, changes)

    start = jnp.zeros((*u.shape[1:3], k.shape[-1], u.shape[-1]), u.dtype)
    _, (memory, changes) = lax.scan(step, start, (u, w, late_k, jnp.exp(c[..., -1]), first_N))
    inside = dot("nkic,nkjc->nkij", q, k)[:, :, None] * between
    o = dot("nkgic,nkgcv->nkgiv", q[:, :, None] * jnp.exp(c)[..., None], memory)
    o = o + dot("nkgij,nkgjv->nkgiv", inside, changes)
    return o.transpose(0, 3, 1, 2, 4).reshape(v_NBHV.shape)
