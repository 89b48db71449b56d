"""The gated delta rule row by row, in float32: what it means.

T rows · H value heads · K key heads · C key width · V value width
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def delta_rule_by_rows(
    q_TKC: Float[Array, "T K C"],
    k_TKC: Float[Array, "T K C"],
    v_THV: Float[Array, "T H V"],
    decay_TH: Float[Array, "T H"],
    beta_TH: Float[Array, "T H"],
    ids_T: Int[Array, " T"],
) -> Float[Array, "T H V"]:
    """Computes `gated_delta_rule` with one step per row.

    Args:
        ids_T: of the segment of each row.
    """
    share = v_THV.shape[1] // q_TKC.shape[1]
    q, k = (jnp.repeat(x.astype(jnp.float32), share, axis=1) for x in (q_TKC, k_TKC))
    first_T = jnp.concatenate([jnp.ones(1, bool), ids_T[1:] != ids_T[:-1]])

    def step(memory_HCV, row):
        q_HC, k_HC, v_HV, decay_H, beta_H, first = row
        memory = jnp.where(first, 0.0, memory_HCV) * jnp.exp(decay_H)[:, None, None]
        recall_HV = jnp.einsum("hcv,hc->hv", memory, k_HC, precision="highest")
        memory = memory + k_HC[:, :, None] * (beta_H[:, None] * (v_HV - recall_HV))[:, None]
        return memory, jnp.einsum("hcv,hc->hv", memory, q_HC, precision="highest")

    start = jnp.zeros((*k.shape[1:], v_THV.shape[-1]), jnp.float32)
    wide = (x.astype(jnp.float32) for x in (v_THV, decay_TH, beta_TH))
    return lax.scan(step, start, (q, k, *wide, first_T))[1].astype(v_THV.dtype)
