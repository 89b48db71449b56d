"""The product of rows with a weight and with the adapter of each row.

K in · N out · R padded rank · A adapters
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from lorafusion_jax.adapters.bank import Bank, make_bank
from lorafusion_jax.errors import RunError
from lorafusion_jax.modules.context import LoRAContext
from lorafusion_jax.modules.product import Result, Stored, unsupported_linear
from pallas_kernels import multi_lora_linear, multi_lora_linears
from pallas_kernels.frozen_weight import FrozenWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """The adapters of a layer, see `make_bank`."""

    names: Sequence[str]
    numbers: np.ndarray | None
    leaves: Mapping[str, Array]
    rank: int

    def at(self, number: tuple[int, ...]) -> Leaves:
        """Those of one expert."""
        return replace(self, leaves={name: leaf[number] for name, leaf in self.leaves.items()})


class Operands(NamedTuple):
    """A weight and its adapters, as the ops take them."""

    w_KN: FrozenWeight
    bank: Bank
    free: tuple[int, ...]  # sizes of the other axes of the weight


def operands_of(
    w: Array | Stored, adapters: Leaves, inside: tuple[int, ...], context: LoRAContext, dtype: Any, where: str
) -> Operands:
    """Flattens a weight to [K, N] and computes what its adapters need."""
    free = [axis for axis in range(w.ndim) if axis not in inside]
    shape = math.prod(w.shape[axis] for axis in inside), math.prod(w.shape[axis] for axis in free)
    _check_split(w, inside, free, where)
    w_KN = w.operand() if isinstance(w, Stored) else jnp.transpose(w, [*inside, *free]).reshape(shape)
    bank = make_bank(
        adapters.names,
        adapters.numbers,
        adapters.leaves,
        shape=shape,
        rank=adapters.rank,
        scale_A=context.scale,
        kernel=w_KN,
        dtype=dtype,
    )
    return Operands(w_KN, bank, tuple(w.shape[axis] for axis in free))


def lora_product(
    x: Array,
    w: Array | Stored,
    adapters: Leaves,
    inside: tuple[int, ...],
    result: Result,
    *,
    context: LoRAContext,
    site: Any,
    where: str,
) -> Array:
    """Multiplies x [rows, contracted axes] by a weight with each row's adapter → [rows, other axes of w]."""
    rows, part = x.shape[: x.ndim - len(inside)], operands_of(w, adapters, inside, context, x.dtype, where)
    if 0 in rows:
        return jnp.zeros((*rows, *part.free), result.dtype)
    if context.draw is not None and context.draw.examples is None and _is_mapped(x):
        raise RunError(
            "lora.vmap-dropout",
            "under jax.vmap every example would draw the same dropout.",
            fix="use_adapters(specs, …, step=step, examples=NUMBER), with the number of the example mapped, too",
        )
    table, chosen, options = _rows_of(context, rows, site)
    y = multi_lora_linear(
        x.reshape(*rows, part.w_KN.shape[0]),
        part.w_KN,
        part.bank.a_AKC[chosen],
        part.bank.b_ACN[chosen],
        **options,
        out_sharding=result.flat(len(rows)),
        preferred_element_type=None if result.dtype == x.dtype else result.dtype,
    )
    return result.place(part.bank.finish(y, table, None).reshape(*rows, *part.free))


def lora_products(x: Array, inside: int, parts: Sequence[Operands], context: LoRAContext) -> list[Array]:
    """`lora_product` of several weights, without dropout: x [rows, `inside` contracted axes] is read once."""
    rows = x.shape[: x.ndim - inside]
    if 0 in rows:
        return [jnp.zeros((*rows, *part.free), x.dtype) for part in parts]
    table, chosen, options = _rows_of(context, rows, 0)
    ys = multi_lora_linears(
        x.reshape(*rows, parts[0].w_KN.shape[0]),
        [part.w_KN for part in parts],
        [part.bank.a_AKC[chosen] for part in parts],
        [part.bank.b_ACN[chosen] for part in parts],
        **options | {"dropout": None},
    )
    return [part.bank.finish(y, table, None).reshape(*rows, *part.free) for part, y in zip(parts, ys, strict=True)]


def _rows_of(context: LoRAContext, rows: Sequence[int], site: Any) -> tuple[Array, slice, dict[str, Any]]:
    """The table of some rows, the adapters of which a product needs A and B, and what else the ops take of a context.

    An adapter of all rows is alone in its product, which needs no table.
    """
    table, dropout = context.at_rows(rows, site)
    options = {"tile_adapter": table, "scale": context.scale, "ranks": context.ranks, "dropout": dropout}
    options["implementation"] = context.implementation
    if context.only is None:
        return table, slice(None), options
    chosen = slice(context.only, context.only + 1)
    if dropout is not None:
        options["dropout"] = replace(dropout, rate=dropout.rate[chosen], key=dropout.key[chosen])
    ranks = None if context.ranks is None else context.ranks[chosen]
    return table, chosen, options | {"tile_adapter": None, "scale": context.scale[chosen], "ranks": ranks}


def expert_products(
    x: Array, w: Array, adapters: Leaves, inside: tuple[int, ...], result: Result, *, context: LoRAContext, site: Any,
    where: str,
) -> Array:  # fmt: skip
    """`lora_product` of each expert: x, w, tensors and sites begin with `result.experts` axes of experts."""
    sizes, single = w.shape[: result.experts], replace(result, experts=0)
    inside = tuple(axis - result.experts for axis in inside)
    ys = [
        lora_product(x[n], w[n], adapters.at(n), inside, single, context=context, site=site[n], where=where)
        for n in np.ndindex(*sizes)
    ]
    return jnp.stack(ys).reshape(*sizes, *ys[0].shape)


def _check_split(w: Array | Stored, inside: Sequence[int], free: Sequence[int], where: str) -> None:
    """Checks that explicit mesh axes split the first of the axes that become one, so that features stay neighbours."""
    if isinstance(w, Stored):
        return
    spec = jax.typeof(w).sharding.spec
    for axes, features in ((inside, "in"), (free, "out")):
        for axis in axes[1:]:
            if (names := spec[axis]) is not None:
                why = f"axis {axis} of its weight lies on {names}: no device has neighbouring {features} features"
                raise unsupported_linear(where, why, f"split axis {axes[0]} instead")


def _is_mapped(x: Array) -> bool:
    """Whether `jax.vmap` maps x over an axis that the layer does not see. jax has no public type for such arrays."""
    return isinstance(x, Tracer) and hasattr(x, "batch_dim")
