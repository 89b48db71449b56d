"""What the ops mean, in plain jnp: no tiles, no fusion, no speed.  Tests compare every backend with this.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dropout import Dropout, inverse_keep, keep_mask
from pallas_kernels.tiles import row_adapter, rows_per_tile


def reference_multi_lora_linear(
    x: Float[Array, "*B K"],
    w: Float[Array, "K N"],
    a: Float[Array, "A K R"],
    b: Float[Array, "A R N"],
    *,
    tile_adapter: Int[Array, " tiles"],
    scale: Float[Array, " A"],
    dropout: Dropout | None = None,
    bias: Float[Array, " N"] | None = None,
) -> Float[Array, "*B N"]:
    """Evaluates the layer row by row in the dtype of its arguments.

    y[t] = x[t] W + scale[k] * (drop(x[t]) A[k]) B[k] (+ bias),  k = adapter of row t
    """
    x_TK = x.reshape(-1, x.shape[-1])
    rows = row_adapter(tile_adapter, rows_per_tile(x_TK.shape[0], tile_adapter))
    k_T = jnp.maximum(rows, 0)
    dropped_TK = x_TK
    if dropout is not None:
        keep_TK = keep_mask(dropout, rows, x_TK.shape[1])
        scaled_TK = x_TK * inverse_keep(dropout.rate)[k_T][:, None].astype(x.dtype)
        dropped_TK = jnp.where(keep_TK, scaled_TK, 0)
    s_TR = jnp.einsum("tk,tkr->tr", dropped_TK, a[k_T], precision="highest")
    low_TN = scale[k_T][:, None] * jnp.einsum("tr,trn->tn", s_TR, b[k_T], precision="highest")
    y_TN = jnp.einsum("tk,kn->tn", x_TK, w, precision="highest") + jnp.where((rows >= 0)[:, None], low_TN, 0)
    if bias is not None:
        y_TN = y_TN + bias
    return y_TN.astype(x.dtype).reshape((*x.shape[:-1], w.shape[1]))
