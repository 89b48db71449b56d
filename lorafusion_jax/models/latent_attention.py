"""Attention with low-rank latents as a module: executes `families.latent_attention.LatentAttention`.

T packed tokens · D model width · H heads · P plain channels · R rotary channels · V value width · C widest of both
"""

from __future__ import annotations

from typing import NamedTuple

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
from lorafusion_jax.modules import LoRAContext, LoRALinear, lora_siblings
from pallas_kernels.exact import contract


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
        if "latents" in cache:
            return self._with_latents(x_TD, inputs, cache["latents"], implementation)
        q, k, v = self._heads(x_TD, inputs)
        cache = {"keys": store(cache["keys"], k, rows), "values": store(cache["values"], v, rows)}
        if rows.reads_blocks:
            o_THC = paged_attention(q, cache, rows, scale=self.spec.scale).reshape(q.shape)
        else:
            o_THC = attention(q, k, v, inputs.segments, implementation=implementation, scale=self.spec.scale)
        return self._out(o_THC, inputs), cache

    def _with_latents(
        self, x_TD: jax.Array, inputs: LayerInputs, pool: jax.Array, implementation: AttentionImplementation | None
    ) -> tuple[jax.Array, Cache]:
        """Keeps latents instead of keys and values. Where blocks are read, kv_b multiplies q and the output instead:

        qᵀ (K c) = (Kᵀ q)ᵀ c,  Σ p V c = V (Σ p c)
        """
        rows, spec = inputs.cached, self.spec
        assert rows is not None
        q_plain, q_rotary, latent, k_rotary = self._parts(x_TD, inputs)
        pool = store(pool, jnp.concatenate([latent[:, None], k_rotary], axis=-1), rows)
        if not rows.reads_blocks:
            heads = self._of_parts(q_plain, q_rotary, latent, k_rotary, inputs)
            o_THC = attention(*heads, inputs.segments, implementation=implementation, scale=spec.scale)
            return self._out(o_THC, inputs), {"latents": pool}
        product = PairByHead.of(self.kv_b_proj, inputs.lora, q_plain, spec.heads)
        q = self._scaled(jnp.concatenate([product.transposed(q_plain, spec.plain_dim), q_rotary], -1), inputs)
        o = paged_attention(q, {"keys": pool, "values": pool}, rows, scale=spec.scale).reshape(q.shape)
        return self._out(product(o[..., : spec.kv_rank], spec.plain_dim), inputs), {"latents": pool}

    def _heads(self, x_TD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self._of_parts(*self._parts(x_TD, inputs), inputs)

    def _parts(self, x_TD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns the plain and the rotary channels of q by head, the latent of k and v, and the rotary ones of k."""
        q, kv, rotary_k = self._latents(x_TD, inputs)
        q_plain, q_rotary = jnp.split(q.reshape(len(x_TD), self.spec.heads, -1), (self.spec.plain_dim,), axis=-1)
        q_rotary, rotary_k = self._turn(q_rotary, inputs), self._turn(rotary_k[:, None], inputs)
        return q_plain, q_rotary, self.kv_a_layernorm(kv), rotary_k

    def _of_parts(
        self, q_plain: jax.Array, q_rotary: jax.Array, latent: jax.Array, rotary_k: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns q, k and v by head, all as wide as the widest."""
        spec = self.spec
        kv = self.kv_b_proj(latent, inputs.lora, site=self.sites["kv_b_proj"])
        k_plain, v = jnp.split(kv.reshape(len(kv), spec.heads, -1), (spec.plain_dim,), axis=-1)
        k_rotary = jnp.broadcast_to(rotary_k, q_rotary.shape)
        q, k = (jnp.concatenate(pair, axis=-1) for pair in ((q_plain, q_rotary), (k_plain, k_rotary)))
        q, k, v = (_widened(y, spec.head_dim) for y in (self._scaled(q, inputs), k, v))
        return q, k, v

    def _scaled(self, q_THC: jax.Array, inputs: LayerInputs) -> jax.Array:
        if inputs.query_scales is None or self.rope is None:
            return q_THC
        return q_THC * inputs.query_scales[self.rope].astype(q_THC.dtype)

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


class PairByHead(NamedTuple):
    """A projection whose outputs are those of heads, plain channels and then values, with the adapters of some rows.

    Attributes:
        w_KHN: its kernel.
        pair: A [A, K, C] and B [A, C, H, N] of its adapters, and the scale of each for each row, 0 where another is the
            row's (None: there are none).
    """

    w_KHN: jax.Array
    pair: tuple[jax.Array, jax.Array, jax.Array] | None

    @classmethod
    def of(cls, linear: LoRALinear, ctx: LoRAContext | None, x: jax.Array, heads: int) -> PairByHead:
        """Reads a layer, which has LoRA alone.

        Args:
            x: of the rows, with their dtype.
        """
        kernel_KN, bank = linear.weight_and_bank(ctx, x.dtype)
        w_KHN = kernel_KN.reshape(len(kernel_KN), heads, -1)
        if bank is None or ctx is None:
            return cls(w_KHN, None)
        slot_T = jnp.repeat(jnp.asarray(ctx.tile_adapter), len(x) // len(ctx.tile_adapter))
        scale_A = jnp.asarray(ctx.scale)
        scale_TA = jnp.where(slot_T[:, None] == jnp.arange(len(scale_A)), scale_A, 0.0)
        a, b = bank.a_AKC.astype(x.dtype), bank.b_ACN.astype(x.dtype)
        return cls(w_KHN, (a, b.reshape(*b.shape[:2], heads, -1), scale_TA))

    def transposed(self, q_THP: jax.Array, plain: int) -> jax.Array:
        """What the plain channels of q are to latents, [T, H, K]."""
        y = contract("thp,khp->thk", q_THP, self.w_KHN[..., :plain])
        if self.pair is not None:
            a, b, scale_TA = self.pair
            s = contract("thp,achp->thac", q_THP, b[..., :plain]) * scale_TA[:, None, :, None]
            y = y + contract("thac,akc->thk", s.astype(q_THP.dtype), a)
        return y.astype(q_THP.dtype)

    def __call__(self, x_THK: jax.Array, plain: int) -> jax.Array:
        """The values of latents by head, [T, H, V]."""
        y = contract("thk,khv->thv", x_THK, self.w_KHN[..., plain:])
        if self.pair is not None:
            a, b, scale_TA = self.pair
            s = contract("thk,akc->thac", x_THK, a) * scale_TA[:, None, :, None]
            y = y + contract("thac,achv->thv", s.astype(x_THK.dtype), b[..., plain:])
        return y.astype(x_THK.dtype)


def _widened(x_THC: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x_THC, ((0, 0), (0, 0), (0, width - x_THC.shape[-1])))
