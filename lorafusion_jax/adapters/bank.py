"""Computes A and B of one projection from the stacked leaves of adapters of several kinds.

A adapters · P places for the adapters of a microbatch · K in · N out · R padded rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from lorafusion_jax.adapters.kind import adapter_kind


def low_rank_bank(
    kinds: Sequence[str], leaves: Mapping[str, Any]
) -> tuple[Float[Array, "A K R"], Float[Array, "A R N"]]:
    """Computes A and B of all adapters. Each kind gets only the tensors of its own adapters.

    So NaN in an adapter of one kind affects neither values nor gradients of another. For plain LoRA, A and B are the
    leaves themselves.

    Args:
        kinds: kinds of the A adapters.
        leaves: by name, [A, ...].
    """
    names = tuple(dict.fromkeys(kinds))
    if len(names) == 1:
        return adapter_kind(names[0]).low_rank(leaves)
    a_AKR, b_ARN = jnp.zeros_like(leaves["lora_a"]), jnp.zeros_like(leaves["lora_b"])
    for name in names:
        kind, members = adapter_kind(name), np.flatnonzero([other == name for other in kinds])
        a, b = kind.low_rank({key: leaves[key][members] for key in kind.names})
        a_AKR, b_ARN = a_AKR.at[members].set(a), b_ARN.at[members].set(b)
    return a_AKR, b_ARN


def low_rank_places(
    kinds: Sequence[str], kind_P: Integer[Array, " P"] | None, leaves: Mapping[str, Any]
) -> tuple[Float[Array, "P K R"], Float[Array, "P R N"]]:
    """Computes A and B if the kind of the adapter in a place is data. Kinds are isolated as in `low_rank_bank`.

    Args:
        kinds: all kinds, each once.
        kind_P: index of the kind in each place (None: there is only one kind).
        leaves: by name, [P, ...].
    """
    if kind_P is None:
        return adapter_kind(kinds[0]).low_rank(leaves)

    def chosen(number: int, own: Any, other: Any) -> Any:
        return jnp.where((kind_P == number).reshape(-1, *(1,) * (own.ndim - 1)), own, other)

    a_PKR, b_PRN = jnp.zeros_like(leaves["lora_a"]), jnp.zeros_like(leaves["lora_b"])
    for number, name in enumerate(kinds):
        kind = adapter_kind(name)
        # Select before and after, so that neither values nor gradients of other kinds pass through this one.
        a, b = kind.low_rank({key: chosen(number, leaves[key], 0.0) for key in kind.names})
        a_PKR, b_PRN = chosen(number, a, a_PKR), chosen(number, b, b_PRN)
    return a_PKR, b_PRN
