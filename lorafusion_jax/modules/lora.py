"""LoRA linear layers with the weights of many adapters, over `pallas_kernels`.

T packed tokens · K in · N out · D model width · F MLP width · R padded rank · A adapters
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from lorafusion_jax.adapters.bank import low_rank_bank
from lorafusion_jax.adapters.kind import leaves_of
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules.context import LoRAContext
from pallas_kernels import multi_lora_linear, multi_lora_linears, multi_lora_mlp
from pallas_kernels.frozen_weight import FrozenWeight, QuantisedWeight, frozen_product, is_quantised
from pallas_kernels.mlp.xla import silu_gate


class LoRALinear(nnx.Module):
    """A frozen linear layer and the LoRA weights of `num_adapters` adapters.

    y[t] = x[t] W + bias + scale[k] · (drop(x[t]) A[k]) B[k],  k = adapter of row t

    Trainable leaves `lora_a` [A, K, R] and `lora_b` [A, R, N] are float32 `nnx.LoRAParam`; `kernel` [K, N] and `bias`
    are `nnx.Param`. Rank 0 makes a frozen layer without LoRA leaves. A is drawn as in PEFT and B is zero, so a new
    layer computes x W. Leaves of other kinds start at zero; `init_bank` draws them.

    Args:
        in_features: K.
        out_features: N.
        adapters: each is drawn at its own rank. Columns beyond it are zero and stay zero. R is the largest rank.
        num_adapters: A, instead of `adapters`, if all have one rank.
        rank: R, with `num_adapters`.
        kinds: kinds, with `num_adapters`, see `lorafusion_jax.adapters.kind` (None: all "lora").
        use_bias: adds a frozen bias.
        dtype: dtype of the computation (None: that of the input).
        param_dtype: dtype of kernel and bias.
        rngs: draws kernel and A.

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
        kinds: Sequence[str] | None = None,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.in_features, self.out_features = in_features, out_features
        num_adapters, rank, kinds = _sizes(adapters, num_adapters, rank, kinds)
        self.num_adapters, self.rank = num_adapters, rank
        self.dtype, self.param_dtype = dtype, param_dtype
        scale = 1 / math.sqrt(in_features)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (in_features, out_features), param_dtype) * scale)
        self.bias = nnx.Param(jnp.zeros((out_features,), param_dtype)) if use_bias else nnx.data(None)
        self.kinds = kinds
        self.lora_a = self.lora_b = nnx.data(None)
        if rank:
            a_AKR = jax.random.uniform(rngs.params(), (num_adapters, in_features, rank), jnp.float32, -scale, scale)
            own_A1R = np.array([[np.arange(rank) < spec.rank] for spec in adapters]) if adapters else True
            drawn = {"lora_a": jnp.where(own_A1R, a_AKR, 0)}
            for leaf in leaves_of(self.kinds):
                zeros = jnp.zeros((num_adapters, *leaf.shape(in_features, out_features, rank)), jnp.float32)
                setattr(self, leaf.name, nnx.LoRAParam(drawn.get(leaf.name, zeros)))

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
        a_AKR, b_ARN = self._bank()
        if ctx is None or a_AKR is None or b_ARN is None:
            return _plain(x, w_KN, bias)
        return multi_lora_linear(
            x,
            w_KN,
            a_AKR,
            b_ARN,
            tile_adapter=ctx.tile_adapter,
            scale=ctx.scale,
            ranks=ctx.ranks,
            dropout=ctx.at_site(site),
            bias=bias,
            implementation=ctx.implementation,
        )

    def _inputs(self, x: Array) -> tuple[Array, FrozenWeight, Array | None]:
        dtype = x.dtype if self.dtype is None else self.dtype
        bias = None if self.bias is None else self.bias[...].astype(dtype)
        kernel = self.kernel.get_value()  # an array or a quantised weight
        return x.astype(dtype), kernel if is_quantised(kernel) else kernel[...].astype(dtype), bias

    def _bank(self) -> tuple[Array | None, Array | None]:
        if self.lora_a is None:
            return None, None
        return low_rank_bank(self.kinds, {leaf.name: getattr(self, leaf.name)[...] for leaf in leaves_of(self.kinds)})


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
    inputs = [linear._inputs(x) for linear in linears]
    if ctx is None or all(linear.lora_a is None for linear in linears):
        return tuple(_plain(*each) for each in inputs)
    biases = [bias for _, _, bias in inputs]
    as_, bs = zip(*(linear._bank() for linear in linears), strict=True)
    return multi_lora_linears(
        inputs[0][0],
        [w_KN for _, w_KN, _ in inputs],
        as_,
        bs,
        tile_adapter=ctx.tile_adapter,
        scale=ctx.scale,
        ranks=ctx.ranks,
        dropout=ctx.at_site(site),
        biases=None if all(bias is None for bias in biases) else biases,
        implementation=ctx.implementation,
    )


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
    if ctx is None or any(linear.lora_a is None for linear in linears):
        gate_TF, up_TF = lora_siblings(x, (gate, up), ctx, site=x_site)
        gated_TF = silu_gate(checkpoint_name(gate_TF, "gate"), checkpoint_name(up_TF, "up"))
        return down(gated_TF, ctx, site=down_site)
    inputs = [linear._inputs(x) for linear in linears]
    as_, bs = zip(*(linear._bank() for linear in linears), strict=True)
    return multi_lora_mlp(
        inputs[0][0],
        [w_KN for _, w_KN, _ in inputs],
        as_,
        bs,
        tile_adapter=ctx.tile_adapter,
        scale=ctx.scale,
        ranks=ctx.ranks,
        dropout=ctx.at_site(x_site),
        down_dropout=ctx.at_site(down_site),
        biases=[bias for _, _, bias in inputs],
        implementation=ctx.implementation,
    )


def _sizes(
    adapters: Sequence[AdapterSpec], num_adapters: int | None, rank: int | None, kinds: Sequence[str] | None
) -> tuple[int, int, tuple[str, ...]]:
    """Returns number of adapters, largest rank and kinds, from the adapters or from the separate arguments."""
    if adapters and (num_adapters, rank, kinds) == (None, None, None):
        return len(adapters), max(spec.rank for spec in adapters), tuple(spec.kind for spec in adapters)
    if adapters or num_adapters is None or rank is None:
        raise ConfigError("lora.adapters", "LoRALinear needs adapters=…, or num_adapters=… and rank=…, not both.")
    return num_adapters, rank, ("lora",) * num_adapters if kinds is None else tuple(kinds)


def _plain(x: Array, w_KN: FrozenWeight, bias: Array | None) -> Array:
    y = frozen_product(x, w_KN) if isinstance(w_KN, QuantisedWeight) else x @ w_KN
    return y if bias is None else y + bias
