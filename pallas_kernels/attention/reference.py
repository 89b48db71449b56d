"""Reference implementation of packed causal attention, in float32 with a full score matrix, for tests of the kernels.

T packed rows · H query heads · K key heads · C head width
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def attention_reference(
    q_THC: Float[Array, "T H C"], k_TKC: Float[Array, "T K C"], v_TKC: Float[Array, "T K C"], first_T: Int[Array, " T"]
) -> Float[Array, "T H C"]:
    """o[t] = Σ_s softmax_s(q[t]·k[s] / √C) v[s] over first[t] ≤ s ≤ t, in float32."""
    T, H, C = q_THC.shape
    group = H // k_TKC.shape[1]
    q, k, v = (x.astype(jnp.float32) for x in (q_THC, k_TKC, v_TKC))
    k, v = jnp.repeat(k, group, 1), jnp.repeat(v, group, 1)
    row = jnp.arange(T)
    visible = (row <= row[:, None]) & (row >= first_T[:, None])
    s = jnp.einsum("thc,shc->hts", q, k, precision="highest") * C**-0.5
    p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf), -1)
    return jnp.einsum("hts,shc->thc", p, v, precision="highest")
