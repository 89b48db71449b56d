"""Mamba-2 as a module: executes `families.mamba.Mamba`.

T packed tokens · D model width · H heads · P head width · G groups of heads · N state width · K channels
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from lorafusion_jax.families.mamba import IN, OUT, Mamba
from lorafusion_jax.models.build import Builder, times
from lorafusion_jax.models.cache import Cache
from lorafusion_jax.models.delta_net import Convolution, where
from lorafusion_jax.models.inputs import LayerInputs
from lorafusion_jax.models.norm import RMSNorm
from lorafusion_jax.models.segments import Segments
from lorafusion_jax.modules import LoRALinear
from pallas_kernels.mlp.xla import ACTIVATIONS
from pallas_kernels.norm import rms_norm
from pallas_kernels.state_space import state_space, state_space_step, state_space_with_states


class MambaMixer(nnx.Module):
    """out_proj(norm((space(x·Δ, B, C, Δ·A) + D·x) · silu(z))); see `families.mamba.Mamba`."""

    in_proj: LoRALinear
    out_proj: LoRALinear

    def __init__(self, build: Builder, spec: Mamba):
        self.spec, self.act, self.eps = spec, ACTIVATIONS[spec.activation], build.layer.around.eps
        self.sites = build.layer.site_index("in_proj"), build.layer.site_index("out_proj")
        for linear in spec.linears:
            setattr(self, linear.name, build.linear(linear.name))
        shape = (spec.channels, 1, spec.kernel)
        self.conv1d = Convolution(shape, bias=spec.conv_bias, dtype=build.dtype, rngs=build.rngs)
        rates = jnp.arange(1, spec.heads + 1, dtype=build.dtype) / spec.heads
        self.A_log, self.dt_bias = nnx.Param(jnp.log(rates)), nnx.Param(jnp.zeros_like(rates))
        self.D = nnx.Param(jnp.ones_like(rates))
        normed = spec.norm != "none"
        self.norm = RMSNorm(spec.queries, eps=self.eps, dtype=build.dtype) if normed else nnx.data(None)

    def __call__(self, x_TD: Float[Array, "T D"], inputs: LayerInputs) -> Float[Array, "T D"]:
        z, channels_TK, step_TH = self._split(x_TD, inputs)
        # Backward computes what is elementwise again, and so keeps nothing in float32.
        x_THP, *rows = jax.checkpoint(partial(self._rows, segments=inputs.segments))(channels_TK, step_TH)
        return self._out(state_space(*rows, **where(inputs)), x_THP, z, inputs)

    def with_cache(self, x_TD: jax.Array, inputs: LayerInputs, cache: Cache) -> tuple[jax.Array, Cache]:
        """Like a call, and returns the cache with the states of these rows' sequences after them."""
        assert inputs.cached is not None
        memory = cache["memory"]
        z, channels_TK, step_TH = self._split(x_TD, inputs)
        channels, last_rows = self.conv1d.with_cache(channels_TK, cache["last_rows"], inputs)
        x_THP, *rows = self._of_channels(channels, step_TH, channels_TK.dtype)
        if inputs.cached.decoding:
            y_THP, after = state_space_step(memory[: len(x_TD)], *rows)
            memory = memory.at[: len(x_TD)].set(after)
        else:
            y_THP, after = state_space_with_states(*rows, **where(inputs))
            memory = memory.at[jnp.asarray(inputs.cached.state_M)].set(after, mode="drop")
        return self._out(y_THP, x_THP, z, inputs), {"memory": memory, "last_rows": last_rows}

    def _split(self, x_TD: jax.Array, inputs: LayerInputs) -> list[jax.Array]:
        """Returns z, the channels of the convolution, and Δ."""
        spec = self.spec
        mixed = self.in_proj(times(x_TD, spec.in_factor), inputs.lora, site=self.sites[0])
        mixed = checkpoint_name(mixed, IN)
        if spec.factors:
            widths = (spec.queries, spec.queries, spec.keys, spec.keys, spec.heads)
            mixed = mixed * np.repeat(spec.factors, widths).astype(mixed.dtype)
        return jnp.split(mixed, (spec.queries, spec.queries + spec.channels), axis=-1)

    def _out(self, y_THP: jax.Array, x_THP: jax.Array, z: jax.Array, inputs: LayerInputs) -> jax.Array:
        gated = jax.checkpoint(self._gated)(checkpoint_name(y_THP, OUT), x_THP, z)
        return times(self.out_proj(gated, inputs.lora, site=self.sites[1]), self.spec.out_factor)

    def _rows(self, channels_TK: jax.Array, step_TH: jax.Array, *, segments: Segments) -> tuple[jax.Array, ...]:
        return self._of_channels(self.conv1d(channels_TK, segments), step_TH, channels_TK.dtype)

    def _of_channels(self, channels_TK: jax.Array, step_TH: jax.Array, dtype: Any) -> tuple[jax.Array, ...]:
        """Returns x, and x·Δ, B, C and Δ·A of each row."""
        spec, rows = self.spec, len(channels_TK)
        channels = self.act(channels_TK)
        x, b, c = jnp.split(channels, (spec.queries, spec.queries + spec.keys), axis=-1)
        x = x.reshape(rows, spec.heads, -1)
        b, c = (y.reshape(rows, spec.groups, -1) for y in (b, c))
        bias_H, rate_H = (leaf[...].astype(jnp.float32) for leaf in (self.dt_bias, self.A_log))
        step_TH = jax.nn.softplus(step_TH.astype(jnp.float32) + bias_H)
        step_TH = jnp.clip(step_TH, spec.least, spec.most)
        scaled = (y.astype(dtype) for y in (x, x * step_TH[..., None], b, c))
        return (*scaled, -jnp.exp(rate_H) * step_TH)

    def _gated(self, y_THP: jax.Array, x_THP: jax.Array, z: jax.Array) -> jax.Array:
        y = y_THP.astype(jnp.float32) + x_THP.astype(jnp.float32) * self.D[...].astype(jnp.float32)[:, None]
        y, gate = y.reshape(z.shape), jax.nn.silu(z.astype(jnp.float32))
        if self.norm is None:
            return (y * gate).astype(z.dtype)
        gates_first = self.spec.norm == "gated"
        y = y * gate if gates_first else y
        groups = y.reshape(len(z), self.spec.groups, -1)
        ones = jnp.ones((groups.shape[-1],), jnp.float32)
        normed = rms_norm(groups, ones, eps=self.eps).reshape(z.shape)
        normed = normed * self.norm.weight[...].astype(jnp.float32)
        return (normed if gates_first else normed * gate).astype(z.dtype)
