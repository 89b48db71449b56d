"""Attention with low-rank latents as a module: executes `families.latent_attention.LatentAttention`.

T packed tokens · D model width · H heads · P plain channels · R rotary channels · V value width · C widest of both
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from lorafusion_jax.families.latent_attention import LATENTS, LatentAttention
from lorafusion_jax.models.attention import AttentionImplementation, attention
from lorafusion_jax.models.build import Builder
from lorafusion_jax.models.cache import Cache, paged_attention, store
from lorafusion_jax.models.inputs import LayerInputs
from lorafusion_jax.models.norm import RMSNorm
from lorafusion_jax.models.rope import apply_rope, halves_of_pairs
from lorafusion_jax.modules import LoRALinear, lora_siblings


class LatentSelfAttention(nnx.Module):
    """o_proj(attention(q, k, v)) with q, k and v from latents; see `families.latent_attention.LatentAttention`."""

    q_proj: LoRALinear  # where q has no latent
    q_a_proj: LoRALinear
    q_b_proj: LoRALinear
    kv_a_proj_with_mqa: LoRALinear
    kv_b_proj: LoRALinear
    o_proj: LoRALinear
    q_a_layernorm: RMSNorm
    kv_a_layernorm: RMSNorm

    def __init__(self, build: Builder, spec: LatentAttention):
        self.spec = spec
        self.rope = None if spec.rope is None else build.config.ropes.index(spec.rope)
        self.sites = {linear.name: build.layer.site_index(linear.name) for linear in spec.linears}
        for linear in spec.linears:
            setattr(self, linear.name, build.linear(linear.name))
        for norm in spec.norms:
            setattr(self, norm.path.rpartition(".")[2], RMSNorm(norm.width, eps=spec.eps, dtype=build.dtype))

    def __call__(
        self, x_TD: Float[Array, "T D"], inputs: LayerInputs, implementation: AttentionImplementation | None
    ) -> Float[Array, "T D"]:
        o_THC = attention(
            *self._heads(x_TD, inputs), inputs.segments, implementation=implementation, scale=self.spec.scale
        )
        return self._out(o_THC, inputs)

    def with_cache(
        self, x_TD: jax.Array, inputs: LayerInputs, cache: Cache, implementation: AttentionImplementation | None
    ) -> tuple[jax.Array, Cache]:
        """Like a call, and returns the cache with the keys and values of these rows, see `SelfAttention`."""
        rows = inputs.cached
        assert rows is not None
        q, k, v = self._heads(x_TD, inputs)
        cache = {"keys": store(cache["keys"], k, rows), "values": store(cache["values"], v, rows)}
        if rows.reads_blocks:
            o_THC = paged_attention(q, cache, rows, scale=self.spec.scale).reshape(q.shape)
        else:
            o_THC = attention(q, k, v, inputs.segments, implementation=implementation, scale=self.spec.scale)
        return self._out(o_THC, inputs), cache

    def _heads(self, x_TD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns q, k and v by head, all as wide as the widest."""
        spec, rows = self.spec, len(x_TD)
        q, kv, rotary_k = self._latents(x_TD, inputs)
        q_plain, q_rotary = jnp.split(q.reshape(rows, spec.heads, -1), (spec.plain_dim,), axis=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(kv), inputs.lora, site=self.sites["kv_b_proj"])
        k_plain, v = jnp.split(kv.reshape(rows, spec.heads, -1), (spec.plain_dim,), axis=-1)
        q_rotary, rotary_k = self._turn(q_rotary, inputs), self._turn(rotary_k[:, None], inputs)
        k_rotary = jnp.broadcast_to(rotary_k, q_rotary.shape)
        q, k = (jnp.concatenate(pair, axis=-1) for pair in ((q_plain, q_rotary), (k_plain, k_rotary)))
        if inputs.query_scales is not None and self.rope is not None:
            q = q * inputs.query_scales[self.rope].astype(q.dtype)
        q, k, v = (_widened(y, spec.head_dim) for y in (q, k, v))
        return q, k, v

    def _out(self, o_THC: jax.Array, inputs: LayerInputs) -> jax.Array:
        rows = len(o_THC)
        o_TD = o_THC.reshape(rows, self.spec.heads, -1)[..., : self.spec.value_dim].reshape(rows, -1)
        return self.o_proj(o_TD, inputs.lora, site=self.sites["o_proj"])

    def _latents(self, x_TD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns q, the latent of k and v, and the rotary channels of k."""
        first = "q_proj" if self.spec.q_rank is None else "q_a_proj"
        projections = [getattr(self, first), self.kv_a_proj_with_mqa]
        q, kv = lora_siblings(x_TD, projections, inputs.lora, site=self.sites[first])
        kv, rotary_k = jnp.split(kv, (self.spec.kv_rank,), axis=-1)
        kv = checkpoint_name(kv, LATENTS)  # a norm's gradient needs its input
        if self.spec.q_rank is None:
            return q, kv, rotary_k
        normed = self.q_a_layernorm(checkpoint_name(q, LATENTS))
        return self.q_b_proj(normed, inputs.lora, site=self.sites["q_b_proj"]), kv, rotary_k

    def _turn(self, x_THR: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Rotates; neighbours become halves first, in q and k alike, which no score sees."""
        if self.spec.interleaved:
            x_THR = halves_of_pairs(x_THR, x_THR.shape[-1])
        return x_THR if self.rope is None else apply_rope(x_THR, inputs.ropes[self.rope])


def _widened(x_THC: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x_THC, ((0, 0), (0, 0), (0, width - x_THC.shape[-1])))
