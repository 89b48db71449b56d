"""The small passes in plain jnp; `interpret` means nothing here."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised import rows


def round_rows(
    x: Float[Array, "T K"],
    factor: Float[Array, "*E K"] | None = None,
    owner: Int[Array, " blocks"] | None = None,
    *,
    dtype: Any = rows.E4M3,
    interpret: bool = False,
) -> tuple[Float[Array, "T K"], Float[Array, "T 1"]]:
    del interpret
    wide = x
    if owner is not None and factor is not None:
        wide = (x.astype(jnp.float32).reshape(len(owner), -1, x.shape[1]) * factor[owner][:, None]).reshape(x.shape)
    elif factor is not None:
        wide = x.astype(jnp.float32) * factor
    values, scales = rows.round_rows(wide)
    return values.astype(dtype), scales


def finish(
    sums: Float[Array, "T N"],
    row_scales: Float[Array, "T 1"],
    column_scales: Float[Array, " N"] | None,
    s: Float[Array, "T _"],
    bank: Float[Array, "A R N"],
    block_adapter: Int[Array, " blocks"],
    *,
    rank_offset: int = 0,
    interpret: bool = False,
) -> Float[Array, "T N"]:
    del interpret
    s_blocks = s[:, rank_offset : rank_offset + bank.shape[1]].reshape(len(block_adapter), -1, bank.shape[1])
    low = jnp.einsum("btr,brn->btn", s_blocks, bank[block_adapter], preferred_element_type=jnp.float32)
    y = sums.astype(jnp.float32) * row_scales
    y = y if column_scales is None else y * column_scales
    return (y + low.reshape(y.shape)).astype(s.dtype)
