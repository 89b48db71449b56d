"""Attention of a layer as a module: executes `families.attention.Attention`.

Dims: `T` packed tokens · `D` model width · `H` heads · `K` key heads · `C` head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from lorafusion_jax.families.attention import Attention
from lorafusion_jax.models.attention import AttentionImplementation, attention
from lorafusion_jax.models.build import Builder, times
from lorafusion_jax.models.cache import Cache, CachedKeys, paged_attention, store
from lorafusion_jax.models.inputs import LayerInputs, by_parts
from lorafusion_jax.models.rope import apply_rope, halves_of_pairs
from lorafusion_jax.models.segments import Segments
from lorafusion_jax.models.stream import KeysAndValues
from lorafusion_jax.modules import LoRALinear, lora_siblings
from lorafusion_jax.modules.tensor_sums import added_up, copied
from pallas_kernels.norm import rms_norm


class SelfAttention(nnx.Module):
    """o_proj(attention(rope(norm(q_proj x)), rope(norm(k_proj x)), v_proj x)); see `families.attention.Attention`."""

    q_proj: LoRALinear

    def __init__(self, build: Builder, spec: Attention):
        self.spec, self.eps = spec, build.layer.around.eps
        self.parted, self.parts = build.parted, build.parts
        self.rope = None if spec.rope is None else build.config.ropes.index(spec.rope)
        self.sites = build.layer.site_index(spec.linears[0].name), build.layer.site_index(spec.out)
        self.inputs = tuple(linear.name for linear in spec.linears if linear.site == "qkv")
        for linear in spec.linears:
            setattr(self, linear.name, build.linear(linear.name))
        self.sinks = nnx.Param(jnp.zeros((spec.heads,), build.dtype)) if spec.sinks else nnx.data(None)
        self.q_norm, self.k_norm = (build.norm(f"{spec.module}.{name}") for name in ("q_norm", "k_norm"))

    def __call__(
        self, x_TD: jax.Array, inputs: LayerInputs, implementation: AttentionImplementation | None
    ) -> jax.Array:
        return self.with_keys(x_TD, None, inputs, implementation)[0]

    def with_keys(
        self,
        x_TD: jax.Array,
        keys: KeysAndValues | None,
        inputs: LayerInputs,
        implementation: AttentionImplementation | None,
    ) -> tuple[jax.Array, KeysAndValues]:
        """Like a call, and returns the keys and values.

        Args:
            keys: those of another layer (None: it has its own).
        """
        if keys is None:
            q, k, v, gate_TD = by_parts(self._heads, self.parts, inputs, x_TD)
        else:
            (q, gate_TD), (k, v) = by_parts(self._queries, self.parts, inputs, x_TD), keys
        o_TD = attention(
            q,
            k,
            v,
            self._segments(inputs),
            implementation=implementation,
            flat=True,
            scale=self.spec.scale,
            window=self.spec.window,
            soft_cap=self.spec.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
        )
        o_TD = o_TD if gate_TD is None else _gated(o_TD, gate_TD)
        return by_parts(self._out, self.parts, inputs, o_TD), (k, v)

    def with_cache(
        self,
        x_TD: jax.Array,
        inputs: LayerInputs,
        cache: Cache,
        implementation: AttentionImplementation | None,
        keys: CachedKeys | None = None,
    ) -> tuple[jax.Array, Cache, CachedKeys]:
        """Like a call, and returns the cache with the keys and values of these rows, and what other layers read.

        Rows of whole prompts attend to each other, as in training. Others attend to the blocks of their sequences.

        Args:
            keys: those of another layer (None: it has its own).
        """
        rows = inputs.cached
        assert rows is not None
        if keys is None:
            q, k, v, gate_TD = self._heads(x_TD, inputs)
            cache = {"keys": store(cache["keys"], k, rows), "values": store(cache["values"], v, rows)}
            keys = {"after": cache} if rows.reads_blocks else {"rows": {"keys": k, "values": v}}
        else:
            q, gate_TD = self._queries(x_TD, inputs)
        options = {"scale": self.spec.scale, "window": self.spec.window, "soft_cap": self.spec.soft_cap}
        options |= {"sinks": None if self.sinks is None else self.sinks[...]}
        if rows.reads_blocks:
            o_TD = paged_attention(q, keys["after"], rows, chunk=self.spec.chunk, **options)
        else:
            k, v = keys["rows"]["keys"], keys["rows"]["values"]
            o_TD = attention(q, k, v, self._segments(inputs), implementation=implementation, flat=True, **options)
        return self._out(o_TD if gate_TD is None else _gated(o_TD, gate_TD), inputs), cache, keys

    def _segments(self, inputs: LayerInputs) -> Segments:
        if self.spec.chunk is None:
            return inputs.segments
        assert inputs.chunks is not None, "these inputs have no chunks"
        return inputs.chunks

    def _out(self, o_TD: jax.Array, inputs: LayerInputs) -> jax.Array:
        y_TD = times(getattr(self, self.spec.out)(o_TD, inputs.lora, site=self.sites[1]), self.spec.out_factor)
        return added_up(y_TD) if self.parted else y_TD

    def _heads(self, x_TD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Returns q, k and v by head, normalised and rotated, and the gates of a gated attention."""
        x_TD = times(self._entered(x_TD), self.spec.in_factor)
        projections = [getattr(self, name) for name in self.inputs]
        q, k, v = self._split(lora_siblings(x_TD, projections, inputs.lora, site=self.sites[0]))
        q, gate_TD = self._split_gate(q)
        if self.spec.qk_norm == "full":
            q, k = self._normalise(q, k)
        q, k, v = (y.reshape(y.shape[0], -1, self.spec.head_dim) for y in (q, k, v))
        if self.spec.v_norm:
            v = self._normalise_values(v)
        if self.spec.qk_norm == "head" and not self.spec.turned_norm:
            q, k = self._normalise(q, k)
        if self.spec.rope is not None and self.spec.rope.share:
            q, k = self._turn(q, inputs), self._turn(k, inputs)
        if self.spec.turned_norm:
            q, k = self._normalise(q, k)
        if self.spec.qk_norm == "unit":
            q, k = self._to_unit(checkpoint_name(q, "qk_in")), self._to_unit(checkpoint_name(k, "qk_in"))
        if inputs.query_scales is not None and self.rope is not None:
            q = q * inputs.query_scales[self.rope].astype(q.dtype)
        return q, k, v, gate_TD

    def _queries(self, x_TD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, jax.Array | None]:
        """Like `_heads`, without keys and values."""
        x_TD = times(self._entered(x_TD), self.spec.in_factor)
        q, gate_TD = self._split_gate(self.q_proj(x_TD, inputs.lora, site=self.sites[0]))
        q = q.reshape(len(q), -1, self.spec.head_dim)
        if self.q_norm is not None:
            q = self.q_norm(checkpoint_name(q, "qk_in"))
        if self.rope is not None:
            q = self._turn(q, inputs)
        return q, gate_TD

    def _entered(self, x_TD: jax.Array) -> jax.Array:
        return copied(x_TD) if self.parted else x_TD

    def _turn(self, x_THC: jax.Array, inputs: LayerInputs) -> jax.Array:
        assert self.rope is not None
        assert self.spec.rope is not None
        tables = inputs.ropes[self.rope]
        if self.spec.rope.interleaved:
            x_THC = halves_of_pairs(x_THC, tables[0].shape[-1])
        return apply_rope(x_THC, tables)

    def _split(self, outputs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        if self.spec.k_is_v:
            q, k = outputs
            k = checkpoint_name(k, "qk_in")
            return q, k, k
        if not self.spec.fused:
            return outputs
        if self.spec.by_head:
            by_head = outputs[0].reshape(len(outputs[0]), self.spec.heads, -1)
            return tuple(y.reshape(len(y), -1) for y in jnp.split(by_head, 3, axis=-1))
        queries, keys = self.spec.queries, self.spec.keys
        return tuple(jnp.split(outputs[0], (queries, queries + keys), axis=-1))

    def _split_gate(self, q: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns the queries and the gates of a gated attention, both [T, H·C]."""
        if not self.spec.gated:
            return q, None
        q_THC, gate_THC = jnp.split(q.reshape(len(q), self.spec.heads, -1), 2, axis=-1)
        return q_THC.reshape(len(q), -1), checkpoint_name(gate_THC.reshape(len(q), -1), "attention_gate")

    def _normalise_values(self, v_TKC: jax.Array) -> jax.Array:
        return self._to_unit(v_TKC if self.spec.k_is_v else checkpoint_name(v_TKC, "qk_in"))

    def _to_unit(self, x_THC: jax.Array) -> jax.Array:
        return rms_norm(x_THC, jnp.ones((self.spec.head_dim,), x_THC.dtype), eps=self.eps)

    def _normalise(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k = checkpoint_name(q, "qk_in"), checkpoint_name(k, "qk_in")  # a norm's gradient needs its input
        assert self.q_norm is not None, self.spec
        assert self.k_norm is not None, self.spec
        return self.q_norm(q), self.k_norm(k)


@jax.checkpoint
def _gated(o_TD: jax.Array, gate_TD: jax.Array) -> jax.Array:
    """o · sigmoid(gate). Backward keeps both and nothing in float32."""
    return (o_TD * jax.nn.sigmoid(gate_TD.astype(jnp.float32))).astype(o_TD.dtype)
