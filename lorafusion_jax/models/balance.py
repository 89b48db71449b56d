"""The load-balancing loss of routers, for each sequence of packed rows.

Dims: `T` packed tokens · `M` sequences · `E` experts · `k` experts of a row
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def rows_inside(offset_M: Int[Array, " M"], length_M: Int[Array, " M"], rows: int) -> Bool[Array, "M T"]:
    """Whether a row is one of a sequence's.

    >>> rows_inside(jnp.array([0, 2]), jnp.array([1, 2]), 4).astype(int).tolist()
    [[1, 0, 0, 0], [0, 0, 1, 1]]
    """
    row_T = jnp.arange(rows)
    return (row_T >= offset_M[:, None]) & (row_T < (offset_M + length_M)[:, None])


def count_choices(
    logits_TE: Float[Array, "T E"], expert_Tk: Int[Array, "T k"], inside_MT: Bool[Array, "M T"]
) -> Float[Array, "2 M E"]:
    """Sums over the rows of each sequence: how often a router chooses each expert, and softmax(logits).

    Rows are selected, so that NaN of a sequence does not reach others, and their sum has a fixed order.
    """
    choices_TE = (expert_Tk[:, :, None] == jnp.arange(logits_TE.shape[1])).sum(1).astype(jnp.float32)
    values = choices_TE, jax.nn.softmax(logits_TE.astype(jnp.float32), axis=-1)
    return jnp.stack([jnp.where(inside_MT[:, :, None], value_TE, 0.0).sum(1) for value_TE in values])


def balance_losses(sums_2ME: Float[Array, "2 M E"], length_M: Int[Array, " M"], routers: int) -> Float[Array, " M"]:
    """E · Σ_e f_e P_e of each sequence; f_e is how often a row chooses expert e, P_e its mean probability.

    Both are means over the sequence's rows in all layers with a router. k where all experts are chosen alike. The
    formula is that of Fedus et al., "Switch Transformers", 2021, as transformers has it.

    Args:
        sums_2ME: of all layers, from `count_choices`.
        routers: number of layers with a router.

    >>> balance_losses(jnp.array([[[2.0, 0.0]], [[1.5, 0.5]]]), jnp.array([2]), 1).tolist()
    [1.5]
    """
    counted_M1 = jnp.maximum(length_M * routers, 1).astype(jnp.float32)[:, None]
    choices_ME, share_ME = sums_2ME / counted_M1
    return choices_ME.shape[1] * (choices_ME * share_ME).sum(-1)
