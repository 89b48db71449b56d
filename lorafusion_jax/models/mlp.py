"""The gated MLP of a layer as a module: executes `families.mlp.Mlp`.

Dims: `T` packed tokens · `D` model width · `F` MLP width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from lorafusion_jax.families.mlp import Mlp
from lorafusion_jax.models.build import Builder, times
from lorafusion_jax.modules import LoRAContext, lora_mlp, lora_siblings
from lorafusion_jax.modules.tensor_sums import added_up, copied
from pallas_kernels.mlp.xla import activate, gate_with


class MLP(nnx.Module):
    """down_proj(activation(gate_proj x) · up_proj x); see `families.mlp.Mlp`."""

    def __init__(self, build: Builder, spec: Mlp):
        self.spec, self.parted = spec, build.parted
        self.sites = build.layer.site_index(spec.linears[0].name), build.layer.site_index(spec.linears[-1].name)
        self.act_fn = Xielu(spec, build.dtype) if spec.activation == "xielu" else nnx.data(None)
        for linear in spec.linears:
            setattr(self, linear.name, build.linear(linear.name))

    def __call__(self, x_TD: jax.Array, lora: LoRAContext | None) -> jax.Array:
        return added_up(self._term(copied(x_TD), lora)) if self.parted else self._term(x_TD, lora)

    def _term(self, x_TD: jax.Array, lora: LoRAContext | None) -> jax.Array:
        *first, down = (getattr(self, linear.name) for linear in self.spec.linears)
        if self.spec.as_one_op:
            gate, up = first
            return lora_mlp(x_TD, gate, up, down, lora, sites=self.sites)
        x_site, down_site = self.sites
        if not self.spec.gated:
            (up_TF,) = lora_siblings(x_TD, first, lora, site=x_site)
            return down(self._activated(checkpoint_name(up_TF, "up")), lora, site=down_site)
        outputs = lora_siblings(x_TD, first, lora, site=x_site)
        gate_TF, up_TF = jnp.split(outputs[0], 2, axis=-1) if self.spec.fused else outputs
        gate_TF = times(checkpoint_name(gate_TF, "gate"), self.spec.gate_factor)
        gated_TF = gate_with(self.spec.activation, gate_TF, checkpoint_name(up_TF, "up"))
        return times(down(gated_TF, lora, site=down_site), self.spec.out_factor)

    def _activated(self, up_TF: jax.Array) -> jax.Array:
        return activate(self.spec.activation, up_TF) if self.act_fn is None else self.act_fn(up_TF)


class Xielu(nnx.Module):
    """p x² + b x for x > 0, else n (e^min(x, ε) - 1 - x) + b x;  p = softplus(alpha_p), n = b + softplus(alpha_n).

    The numbers are frozen, one of each for a layer (arXiv 2411.13010).
    """

    alpha_p: nnx.Param
    alpha_n: nnx.Param
    beta: nnx.Param
    eps: nnx.Param

    def __init__(self, spec: Mlp, dtype: Any):
        for array in spec.arrays:
            name = array.path.rpartition(".")[2]
            setattr(self, name, nnx.Param(jnp.full(array.shape, _XIELU[name], dtype)))

    def __call__(self, x: jax.Array) -> jax.Array:
        numbers = (leaf[...].astype(jnp.float32) for leaf in (self.alpha_p, self.alpha_n, self.beta, self.eps))
        return jax.checkpoint(_xielu, prevent_cse=False)(x, *numbers)  # backward keeps x only


_XIELU = {"alpha_p": 0.2, "alpha_n": -1.0, "beta": 0.5, "eps": -1e-6}


def _xielu(x: jax.Array, alpha_p: jax.Array, alpha_n: jax.Array, beta: jax.Array, eps: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    positive, negative = jax.nn.softplus(alpha_p), beta + jax.nn.softplus(alpha_n)
    below = (jnp.expm1(jnp.minimum(wide, eps)) - wide) * negative
    return (jnp.where(wide > 0, positive * wide * wide, below) + beta * wide).astype(x.dtype)
