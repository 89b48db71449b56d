"""A gated delta net as a module: executes `families.delta_net.DeltaNet`.

T packed tokens · D model width · K key heads · H value heads · C key width · V value width · N channels
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from lorafusion_jax.families.delta_net import IN, OUT, DeltaNet
from lorafusion_jax.models.build import Builder
from lorafusion_jax.models.cache import Cache
from lorafusion_jax.models.inputs import LayerInputs
from lorafusion_jax.models.norm import RMSNorm
from lorafusion_jax.models.segments import Segments
from lorafusion_jax.modules import lora_siblings
from pallas_kernels.delta_rule import delta_rule_step, delta_rule_with_states, gated_delta_rule
from pallas_kernels.mlp.xla import ACTIVATIONS

LEAST_SQUARE = 1e-6  # added to the squared length of q and of k


class Convolution(nnx.Module):
    """A causal convolution of each channel, over rows of the same sample."""

    def __init__(self, shape: tuple[int, int, int], *, dtype: Any, rngs: nnx.Rngs, bias: bool = False):
        self.bias = nnx.Param(jnp.zeros(shape[:1], dtype)) if bias else nnx.data(None)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype))

    def __call__(self, x_TN: Float[Array, "T N"], segments: Segments) -> Float[Array, "T N"]:
        """y[t] = Σ_j weight[j] x[t - j] in float32, j rows back in the same segment; the last weight is of row t."""
        ids_T, weight_NR = jnp.asarray(segments.ids), self._weight_NR
        x_TN = x_TN.astype(jnp.float32)
        y_TN = x_TN * weight_NR[:, -1]
        for back in range(1, weight_NR.shape[1]):
            same_T = jnp.pad(ids_T, (back, 0), constant_values=-1)[: len(ids_T)] == ids_T
            earlier_TN = jnp.pad(x_TN, ((back, 0), (0, 0)))[: len(x_TN)]
            y_TN = y_TN + jnp.where(same_T[:, None], earlier_TN, 0.0) * weight_NR[:, -1 - back]
        return y_TN if self.bias is None else y_TN + self.bias[...].astype(jnp.float32)

    def with_cache(
        self, x_TN: Float[Array, "T N"], last_rows: Float[Array, "B R N"], inputs: LayerInputs
    ) -> tuple[Float[Array, "T N"], Float[Array, "B R N"]]:
        """Like a call, and returns the last rows of all sequences after these rows."""
        rows, segments = inputs.cached, inputs.segments
        assert rows is not None
        if rows.decoding:
            window_BRN = jnp.concatenate([last_rows[: len(x_TN)], x_TN[:, None].astype(last_rows.dtype)], 1)
            return self._next_row(window_BRN), last_rows.at[: len(x_TN)].set(window_BRN[:, 1:])
        offsets_M = jnp.asarray(segments.offsets)[:-1]
        row_MR = (offsets_M + jnp.asarray(segments.lengths))[:, None] + jnp.arange(-last_rows.shape[1], 0)
        last_MRN = jnp.where((row_MR >= offsets_M[:, None])[..., None], x_TN[jnp.maximum(row_MR, 0)], 0)
        after = last_rows.at[jnp.asarray(rows.state_M)].set(last_MRN.astype(last_rows.dtype), mode="drop")
        return self(x_TN, segments), after

    def _next_row(self, x_BRN: Float[Array, "B R N"]) -> Float[Array, "B N"]:
        """The last row of each sequence, of whose last R rows x has."""
        weight_NR, x_BRN = self._weight_NR, x_BRN.astype(jnp.float32)
        y_BN = x_BRN[:, -1] * weight_NR[:, -1]
        for back in range(1, weight_NR.shape[1]):
            y_BN = y_BN + x_BRN[:, -1 - back] * weight_NR[:, -1 - back]
        return y_BN if self.bias is None else y_BN + self.bias[...].astype(jnp.float32)

    @property
    def _weight_NR(self) -> jax.Array:
        return self.weight[...][:, 0].astype(jnp.float32)


class JoinedConvolution(Convolution):
    """Those of q, k and v, side by side."""

    def __init__(self, spec: DeltaNet, *, dtype: Any, rngs: nnx.Rngs):
        self.bias = nnx.data(None)
        for name, size in (("q", spec.keys), ("k", spec.keys), ("v", spec.queries)):
            setattr(self, name, Convolution((size, 1, spec.kernel), dtype=dtype, rngs=rngs))

    @property
    def _weight_NR(self) -> jax.Array:
        return jnp.concatenate([getattr(self, name)._weight_NR for name in ("q", "k", "v")])


class GatedDeltaNet(nnx.Module):
    """out_proj(norm(rule(q, k, v, decay, β)) · silu(z)); see `families.delta_net.DeltaNet`."""

    def __init__(self, build: Builder, spec: DeltaNet):
        self.spec, self.act = spec, ACTIVATIONS[spec.activation]
        self.sites = build.layer.site_index(spec.linears[0].name), build.layer.site_index(spec.out)
        self.inputs = tuple(linear.name for linear in spec.linears if linear.site == IN)
        for linear in spec.linears:
            setattr(self, linear.name, build.linear(linear.name))
        options: dict[str, Any] = {"dtype": build.dtype, "rngs": build.rngs}
        shape = (spec.channels, 1, spec.kernel)
        self.conv1d = JoinedConvolution(spec, **options) if spec.separate else Convolution(shape, **options)
        rates = jnp.arange(1, spec.value_heads + 1, dtype=build.dtype) / spec.value_heads
        self.A_log, self.dt_bias = nnx.Param(jnp.log(rates)), nnx.Param(jnp.zeros_like(rates))
        eps = 1e-5 if spec.separate else build.layer.around.eps  # so in transformers, whatever config.json says
        self.norm = RMSNorm(spec.value_dim, eps=eps, dtype=build.dtype)

    def __call__(self, x_TD: Float[Array, "T D"], inputs: LayerInputs) -> Float[Array, "T D"]:
        mixed_TN, z_THV, b_TH, a_TH = self._inputs(x_TD, inputs)
        return self._out(gated_delta_rule(*self._rows(mixed_TN, b_TH, a_TH, inputs), **where(inputs)), z_THV, inputs)

    def with_cache(self, x_TD: jax.Array, inputs: LayerInputs, cache: Cache) -> tuple[jax.Array, Cache]:
        """Like a call, and returns the cache with the states of these rows' sequences after them."""
        rows = inputs.cached
        assert rows is not None
        mixed_TN, z_THV, b_TH, a_TH = self._inputs(x_TD, inputs)
        memory = cache["memory"]
        mixed, last_rows = self.conv1d.with_cache(mixed_TN, cache["last_rows"], inputs)
        of_rule = self._of_mixed(mixed, b_TH, a_TH, mixed_TN.dtype)
        if rows.decoding:
            o_THV, after = delta_rule_step(memory[: len(x_TD)], *of_rule)
            memory = memory.at[: len(x_TD)].set(after)
        else:
            o_THV, after = delta_rule_with_states(*of_rule, **where(inputs))
            memory = memory.at[jnp.asarray(rows.state_M)].set(after, mode="drop")
        return self._out(o_THV, z_THV, inputs), {"memory": memory, "last_rows": last_rows}

    def _inputs(self, x_TD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns q, k and v side by side, z by head, b and a."""
        projections = [getattr(self, name) for name in self.inputs]
        outputs = lora_siblings(x_TD, projections, inputs.lora, site=self.sites[0])
        return self._split([checkpoint_name(y, IN) for y in outputs])

    def _out(self, o_THV: jax.Array, z_THV: jax.Array, inputs: LayerInputs) -> jax.Array:
        gated_TD = jax.checkpoint(self._gated)(checkpoint_name(o_THV, OUT), z_THV)
        return getattr(self, self.spec.out)(gated_TD, inputs.lora, site=self.sites[1])

    def _rows(self, mixed_TN: jax.Array, b_TH: jax.Array, a_TH: jax.Array, inputs: LayerInputs):
        """Returns q, k, v, decay and β of each row. Backward computes what is elementwise again, in float32."""
        return jax.checkpoint(partial(self._rows_of_rule, segments=inputs.segments))(mixed_TN, b_TH, a_TH)

    def _rows_of_rule(self, mixed_TN: jax.Array, b_TH: jax.Array, a_TH: jax.Array, *, segments: Segments):
        return self._of_mixed(self.conv1d(mixed_TN, segments), b_TH, a_TH, mixed_TN.dtype)

    def _of_mixed(
        self, mixed_TN: jax.Array, b_TH: jax.Array, a_TH: jax.Array, dtype: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Like `_rows`, of what the convolution returns."""
        q, k, v = self._heads(self.act(mixed_TN))
        bias_H, rate_H = (x[...].astype(jnp.float32) for x in (self.dt_bias, self.A_log))
        decay_TH = -jnp.exp(rate_H) * jax.nn.softplus(a_TH.astype(jnp.float32) + bias_H)
        q, k = _unit(q, self.spec.key_dim**-0.5), _unit(k)
        beta_TH = jax.nn.sigmoid(b_TH.astype(jnp.float32)) * (2 if self.spec.doubled else 1)
        return q.astype(dtype), k.astype(dtype), v.astype(dtype), decay_TH, beta_TH

    def _gated(self, o_THV: jax.Array, z_THV: jax.Array) -> jax.Array:
        gated_THV = self.norm(o_THV).astype(jnp.float32) * jax.nn.silu(z_THV.astype(jnp.float32))
        return gated_THV.astype(o_THV.dtype).reshape(len(o_THV), -1)

    def _split(self, outputs: list[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns q, k and v side by side, z by head, b and a."""
        spec, rows = self.spec, len(outputs[0])
        if not spec.grouped:
            *mixed, z, b, a = outputs
            mixed = jnp.concatenate(mixed, axis=-1) if spec.separate else mixed[0]
            return mixed, z.reshape(rows, spec.value_heads, -1), b, a
        qkvz, ba = (y.reshape(rows, spec.key_heads, -1) for y in outputs)
        share, C = spec.value_heads // spec.key_heads, spec.key_dim
        q, k, v, z = jnp.split(qkvz, (C, 2 * C, 2 * C + share * spec.value_dim), axis=-1)
        mixed = jnp.concatenate([y.reshape(rows, -1) for y in (q, k, v)], axis=-1)
        b, a = (y.reshape(rows, -1) for y in jnp.split(ba, 2, axis=-1))
        return mixed, z.reshape(rows, spec.value_heads, -1), b, a

    def _heads(self, mixed_TN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        spec, rows = self.spec, len(mixed_TN)
        q, k, v = jnp.split(mixed_TN, (spec.keys, 2 * spec.keys), axis=-1)
        q, k = (y.reshape(rows, spec.key_heads, -1) for y in (q, k))
        return q, k, v.reshape(rows, spec.value_heads, -1)


def where(inputs: LayerInputs) -> dict[str, Any]:
    """Which rows belong together."""
    segments = inputs.segments
    return {name: jnp.asarray(getattr(segments, name)) for name in ("ids", "offsets", "lengths")}


def _unit(x: jax.Array, length: float = 1.0) -> jax.Array:
    """x / √(Σ x² + ε) · length"""
    return x * (length * jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + LEAST_SQUARE))
