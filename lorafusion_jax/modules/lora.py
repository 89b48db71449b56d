"""LoRA linear layers with the weights of many adapters, over `pallas_kernels`.

T packed tokens · K in · N out · D model width · F MLP width · R padded rank · A adapters
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Array, Float

from lorafusion_jax.adapters.bank import Bank, kind_numbers, make_bank, start_bank
from lorafusion_jax.adapters.kind import Leaf
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import PLAIN, adapter_kind, leaves_of, prepared_by
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules.adapted import LoRAConstant
from lorafusion_jax.modules.context import LoRAContext
from lorafusion_jax.modules.tensor_sums import part_start
from pallas_kernels import multi_lora_linear, multi_lora_linears, multi_lora_mlp
from pallas_kernels.dropout import Dropout, inverse_keep, keep_mask
from pallas_kernels.frozen_weight import FrozenWeight, QuantisedWeight, frozen_product, is_quantised
from pallas_kernels.mlp.scaled_gate import scaled_silu_gate
from pallas_kernels.mlp.xla import silu_gate


class LoRAKinds(nnx.Variable):
    """Number of each adapter's kind, int32 [A]; -1 for an adapter that does not target the layer."""


class LoRALinear(nnx.Module):
    """A frozen linear layer and the tensors of `num_adapters` adapters.

    y[t] = f[k] · (x[t] W + scale[k] · (drop(x[t]) A[k]) B[k]) + bias,  k = adapter of row t

    An adapter's kind computes A, B and f (1 for LoRA) from its tensors, see `lorafusion_jax.adapters.kind`. Those of
    LoRA are `lora_a` [A, K, R] and `lora_b` [A, R, N]. Trainable tensors are float32 `nnx.LoRAParam`, others
    `LoRAConstant`; `kernel` [K, N] and `bias` are `nnx.Param`. Rank 0 makes a frozen layer without adapters. Tensors
    are drawn as their kinds say, so a new layer of the built-in kinds computes x W.

    Args:
        in_features: K.
        out_features: N.
        adapters: each is drawn at its own rank. Columns beyond it are zero and stay zero. R is the largest rank.
        num_adapters: A, instead of `adapters`, if all have one rank.
        rank: R, with `num_adapters`.
        kinds: kinds, with `num_adapters` (None: all "lora"). An adapter of kind None does not target the layer.
        use_bias: adds a frozen bias.
        dtype: dtype of the computation (None: that of the input).
        param_dtype: dtype of kernel and bias.
        prepared: has the tensors that kinds prepare, too (`AdapterKind.prepare`). The caller computes them again when
            an adapter changes; otherwise every call computes them.
        parted: whether x has only this device's part of the input features of the layer, see `tensor_sums`.
        rngs: draws kernel and adapters.

    In Linen, wrap it with `to_linen`. The adapters are in the collection `LoRAParam`:

    >>> from flax.nnx import bridge
    >>> layer = bridge.to_linen(LoRALinear, 8, 4, num_adapters=2, rank=2)
    >>> context = LoRAContext(tile_adapter=jnp.array([0, 1]), scale=jnp.array([2.0, 0.5]))
    >>> variables = layer.init(jax.random.key(0), jnp.ones((6, 8)), context)
    >>> sorted(variables), variables["LoRAParam"]["lora_a"].shape
    (['LoRAParam', 'params'], (2, 8, 2))
    >>> layer.apply(variables, jnp.ones((6, 8)), context).shape
    (6, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        adapters: Sequence[AdapterSpec] = (),
        num_adapters: int | None = None,
        rank: int | None = None,
        kinds: Sequence[str | None] | None = None,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        prepared: bool = False,
        parted: bool = False,
        rngs: nnx.Rngs,
    ):
        self.in_features, self.out_features = in_features, out_features
        ranks, rank, kinds = _sizes(adapters, num_adapters, rank, kinds)
        self.num_adapters, self.rank = len(ranks), rank
        self.dtype, self.param_dtype, self.parted = dtype, param_dtype, parted
        scale = in_features**-0.5
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (in_features, out_features), param_dtype) * scale)
        self.bias = nnx.Param(jnp.zeros((out_features,), param_dtype)) if use_bias else nnx.data(None)
        self.kinds = tuple(dict.fromkeys(kind for kind in kinds if kind is not None)) if rank else ()
        numbers = kind_numbers(self.kinds, kinds)
        self.numbers = nnx.data(None) if numbers is None else LoRAKinds(jnp.asarray(numbers))
        scales = [spec.scale for spec in adapters] or [1.0] * len(ranks)
        initial_leaves = {leaf.name: self._draw(leaf, ranks, rngs) for leaf in leaves_of(self.kinds)}
        started = start_bank(
            self.kinds, numbers, initial_leaves, self.kernel[...], shape=self._shape, ranks=ranks, scales=scales
        )
        for leaf in leaves_of(self.kinds):
            variable = nnx.LoRAParam if leaf.trainable else LoRAConstant
            setattr(self, leaf.name, variable(started[leaf.name]))
        self.prepared = tuple(leaf.name for leaf in prepared_by(self.kinds)) if prepared else ()
        for leaf in prepared_by(self.kinds) if prepared else ():
            setattr(self, leaf.name, LoRAConstant(jnp.ones((len(ranks), *leaf.shape(*self._shape, rank)))))

    def _draw(self, leaf: Leaf, ranks: Sequence[int], rngs: nnx.Rngs) -> Array:
        """Draws a leaf of all adapters on the host. Beyond an adapter's rank it is zero."""
        empty = np.zeros((len(ranks), *leaf.shape(*self._shape, self.rank)), np.float32)

        def draw(key_data: Any) -> np.ndarray:
            bits = np.random.default_rng(np.asarray(key_data))
            array = empty.copy()
            for index, rank in enumerate(ranks):
                values = leaf.init(lambda count: bits.random(count, np.float32), leaf.shape(*self._shape, rank))
                leaf.at_rank(array[index], rank)[...] = values
            return array

        key_data = jax.random.key_data(rngs.params())
        if isinstance(key_data, Tracer):
            shape = jax.ShapeDtypeStruct(empty.shape, empty.dtype)
            return jax.pure_callback(draw, shape, key_data, vmap_method="sequential")
        return jnp.asarray(draw(key_data))

    @property
    def _shape(self) -> tuple[int, int]:
        return self.in_features, self.out_features

    def __call__(
        self, x: Float[Array, "*B K"], ctx: LoRAContext | None = None, *, site: int = 0
    ) -> Float[Array, "*B N"]:
        """Applies the layer.

        Args:
            x: rows; their number is a multiple of the number of tiles in `ctx`.
            ctx: context of the microbatch (None: no adapters).
            site: dropout site of this input; equal for projections that share the input.
        """
        x, w_KN, bias = self._inputs(x)
        if ctx is None or not self.kinds:
            return _plain(x, w_KN, bias)
        bank = self._bank(ctx, w_KN, x.dtype)
        y = multi_lora_linear(
            x,
            w_KN,
            bank.a_AKC,
            bank.b_ACN,
            tile_adapter=ctx.tile_adapter,
            scale=ctx.scale,
            ranks=ctx.ranks,
            dropout=self._dropout(ctx, site),
            bias=bias if bank.f_AN is None else None,
            implementation=ctx.implementation,
        )
        return bank.finish(y, ctx.tile_adapter, bias, _dropped_product(bank, x, w_KN, ctx, site))

    def _inputs(self, x: Array) -> tuple[Array, FrozenWeight, Array | None]:
        dtype = x.dtype if self.dtype is None else self.dtype
        bias = None if self.bias is None else self.bias[...].astype(dtype)
        kernel = self.kernel.get_value()  # an array or a quantised weight
        return x.astype(dtype), kernel if is_quantised(kernel) else kernel[...].astype(dtype), bias

    def _dropout(self, ctx: LoRAContext, site: int) -> Dropout | None:
        dropout = ctx.at_site(site)
        if dropout is None or not self.parted:
            return dropout
        return replace(dropout, first_column=part_start(self.in_features))

    def _bank(self, ctx: LoRAContext, w_KN: FrozenWeight, dtype: Any) -> Bank:
        names = (*(leaf.name for leaf in leaves_of(self.kinds)), *self.prepared)
        leaves = {name: getattr(self, name)[...] for name in names}
        numbers = None if self.numbers is None else self.numbers[...]
        return make_bank(
            self.kinds, numbers, leaves, shape=self._shape, rank=self.rank, scale_A=ctx.scale, kernel=w_KN, dtype=dtype
        )

    def weight_and_bank(self, ctx: LoRAContext | None, dtype: Any) -> tuple[Array, Bank | None]:
        """The kernel as an array, and the adapters: for products in another order than that of a call."""
        _, w_KN, _ = self._inputs(jnp.zeros((), dtype))
        bank = None if ctx is None or not self.kinds else self._bank(ctx, w_KN, dtype)
        if is_quantised(w_KN):
            return frozen_product(jnp.eye(self.in_features, dtype=dtype), w_KN), bank
        return jnp.asarray(w_KN), bank

    @property
    def changes_columns(self) -> bool:
        """Whether a kind changes the columns of the output."""
        return any(adapter_kind(name).changes_columns for name in self.kinds)


def lora_siblings(
    x: Float[Array, "*B K"], linears: Sequence[LoRALinear], ctx: LoRAContext | None, *, site: int = 0
) -> tuple[Float[Array, "*B N"], ...]:
    """Applies projections that share their input (q, k, v; gate, up) as one operation.

    Equal to `tuple(linear(x, ctx, site=site) for linear in linears)`, with one pass over x for all of them.

    Args:
        x: rows.
        linears: layers of one compute dtype.
        ctx: context of the microbatch (None: no adapters).
        site: as in `LoRALinear`.

    >>> q, k = (LoRALinear(8, width, num_adapters=1, rank=2, rngs=nnx.Rngs(0)) for width in (8, 4))
    >>> [y.shape for y in lora_siblings(jnp.ones((6, 8)), (q, k), None)]
    [(6, 8), (6, 4)]
    """
    products = _sibling_products(x, linears, ctx, site)
    return tuple(product.finished(ctx) for product in products)


class _Product(NamedTuple):
    """The output of a projection before its adapters change columns.

    Attributes:
        bank: its adapters (None: there are none, or they are left out).
        late_bias: the bias that comes after factors.
        dropped: see `Bank.finish`.
    """

    y: Array
    bank: Bank | None = None
    late_bias: Array | None = None
    dropped: Array | None = None

    @property
    def only_scaled(self) -> bool:
        """Whether nothing but factors of columns is missing."""
        bank = self.bank
        return (bank is None or bank.g_AN is None) and self.late_bias is None and self.dropped is None

    def finished(self, ctx: LoRAContext | None) -> Array:
        if self.bank is None or ctx is None:
            return self.y
        return self.bank.finish(self.y, ctx.tile_adapter, self.late_bias, self.dropped)


def _sibling_products(x: Array, linears: Sequence[LoRALinear], ctx: LoRAContext | None, site: int) -> list[_Product]:
    inputs = [linear._inputs(x) for linear in linears]
    if ctx is None or not any(linear.kinds for linear in linears):
        return [_Product(_plain(*arguments)) for arguments in inputs]
    banks = [
        linear._bank(ctx, w_KN, x.dtype) if linear.kinds else None
        for linear, (x, w_KN, _) in zip(linears, inputs, strict=True)
    ]
    scaled = [bank is not None and bank.f_AN is not None for bank in banks]
    biases = [None if late else bias for late, (_, _, bias) in zip(scaled, inputs, strict=True)]
    ys = multi_lora_linears(
        inputs[0][0],
        [w_KN for _, w_KN, _ in inputs],
        [bank and bank.a_AKC for bank in banks],
        [bank and bank.b_ACN for bank in banks],
        tile_adapter=ctx.tile_adapter,
        scale=ctx.scale,
        ranks=ctx.ranks,
        dropout=ctx.at_site(site),
        biases=None if all(bias is None for bias in biases) else biases,
        implementation=ctx.implementation,
    )
    return [
        _Product(y, bank, bias if late else None, None if bank is None else _dropped_product(bank, x, w_KN, ctx, site))
        for y, bank, late, (x, w_KN, bias) in zip(ys, banks, scaled, inputs, strict=True)
    ]


def lora_mlp(
    x: Float[Array, "*B D"],
    gate: LoRALinear,
    up: LoRALinear,
    down: LoRALinear,
    ctx: LoRAContext | None,
    *,
    sites: tuple[int, int],
) -> Float[Array, "*B D"]:
    """Applies a gated MLP, down(silu(gate(x)) · up(x)), as one operation if all three projections have LoRA.

    A kind that changes columns needs the outputs of gate and up before silu, so its projections are separate. Factors
    of both are applied with the gate.

    Equal to the separate projections. The outputs of gate and up have the checkpoint names "gate" and "up" for
    rematerialisation policies.

    Args:
        x: rows.
        gate: a layer; all three have one compute dtype.
        up: a layer.
        down: a layer.
        ctx: context of the microbatch (None: no adapters).
        sites: dropout sites of x and of the input of `down`, as in `LoRALinear`.

    >>> shapes = {"gate": (8, 6), "up": (8, 6), "down": (6, 8)}
    >>> layers = {name: LoRALinear(*shape, num_adapters=1, rank=2, rngs=nnx.Rngs(0)) for name, shape in shapes.items()}
    >>> lora_mlp(jnp.ones((4, 8)), **layers, ctx=None, sites=(0, 1)).shape
    (4, 8)
    """
    linears = (gate, up, down)
    x_site, down_site = sites
    if ctx is None or any(not linear.kinds or linear.changes_columns for linear in linears):
        return down(_gated(_sibling_products(x, (gate, up), ctx, x_site), ctx), ctx, site=down_site)
    inputs = [linear._inputs(x) for linear in linears]
    banks = [linear._bank(ctx, w_KN, x.dtype) for linear, (x, w_KN, _) in zip(linears, inputs, strict=True)]
    return multi_lora_mlp(
        inputs[0][0],
        [w_KN for _, w_KN, _ in inputs],
        [bank.a_AKC for bank in banks],
        [bank.b_ACN for bank in banks],
        tile_adapter=ctx.tile_adapter,
        scale=ctx.scale,
        ranks=ctx.ranks,
        dropout=ctx.at_site(x_site),
        down_dropout=down._dropout(ctx, down_site),
        biases=[bias for _, _, bias in inputs],
        implementation=ctx.implementation,
    )


def _gated(products: Sequence[_Product], ctx: LoRAContext | None) -> Array:
    """Returns silu(gate) · up of two finished products, with one pass over both if only factors are missing."""
    changes = any(product.bank is not None and product.bank.f_AN is not None for product in products)
    if ctx is None or not changes or not all(product.only_scaled for product in products):
        gate_TF, up_TF = (product.finished(ctx) for product in products)
        return silu_gate(checkpoint_name(gate_TF, "gate"), checkpoint_name(up_TF, "up"))
    (gate_TF, up_TF), table = (product.y for product in products), ctx.tile_adapter
    factors = [
        jnp.ones((len(table), product.y.shape[-1])) if product.bank is None else product.bank.tile_factors(table)
        for product in products
    ]
    return scaled_silu_gate(
        checkpoint_name(gate_TF, "gate"), checkpoint_name(up_TF, "up"), *factors, implementation=_of_gate(ctx)
    )


def _of_gate(ctx: LoRAContext) -> str | None:
    """The implementation of the gate where that of the products is named: its kernel is no other backend's."""
    return None if ctx.implementation is None else "xla"


def _sizes(
    adapters: Sequence[AdapterSpec],
    num_adapters: int | None,
    rank: int | None,
    kinds: Sequence[str | None] | None,
) -> tuple[list[int], int, tuple[str | None, ...]]:
    """Returns ranks of the adapters, largest rank and kinds, from the adapters or from the separate arguments."""
    if adapters and (num_adapters, rank, kinds) == (None, None, None):
        ranks = [spec.rank for spec in adapters]
        return ranks, max(ranks), tuple(spec.kind for spec in adapters)
    if adapters or num_adapters is None or rank is None:
        raise ConfigError("lora.adapters", "LoRALinear needs adapters=…, or num_adapters=… and rank=…, not both.")
    return [rank] * num_adapters, rank, (PLAIN,) * num_adapters if kinds is None else tuple(kinds)


def _dropped_product(bank: Bank, x: Array, w_KN: FrozenWeight, ctx: LoRAContext, site: int) -> Array | None:
    """Returns (drop(x) - x) W, if an adapter scales columns and has dropout."""
    dropout = ctx.at_site(site)
    if bank.f_AN is None or dropout is None or not ctx.drops_columns:
        return None
    rows = x.reshape(-1, x.shape[-1])
    row_adapter = jnp.repeat(ctx.tile_adapter, len(rows) // len(ctx.tile_adapter), total_repeat_length=len(rows))
    dropped_rows = inverse_keep(dropout.rate)[jnp.maximum(row_adapter, 0)][:, None] * rows.astype(jnp.float32)
    dropped_rows = jnp.where(keep_mask(dropout, row_adapter, rows.shape[1]), dropped_rows, 0.0)
    return _plain((dropped_rows - rows).astype(x.dtype).reshape(x.shape), w_KN, None)


def _plain(x: Array, w_KN: FrozenWeight, bias: Array | None) -> Array:
    y = frozen_product(x, w_KN) if isinstance(w_KN, QuantisedWeight) else x @ w_KN
    return y if bias is None else y + bias
