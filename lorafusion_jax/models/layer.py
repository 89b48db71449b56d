"""One decoder layer: attention and MLP with their norms and residual sums. Executes `families.layer.Layer`.

Dims: `T` packed tokens · `D` model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.families.attention import Attention
from lorafusion_jax.families.delta_net import DeltaNet
from lorafusion_jax.families.experts import Experts
from lorafusion_jax.families.latent_attention import LatentAttention
from lorafusion_jax.families.layer import Absent
from lorafusion_jax.families.mamba import Mamba
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.short_convolution import ShortConvolution
from lorafusion_jax.layout.layer import Half
from lorafusion_jax.models.attention import AttentionImplementation
from lorafusion_jax.models.build import Builder
from lorafusion_jax.models.cache import Cache
from lorafusion_jax.models.delta_net import GatedDeltaNet
from lorafusion_jax.models.experts import MixtureOfExperts, ParallelMixture
from lorafusion_jax.models.inputs import LayerInputs, by_parts
from lorafusion_jax.models.latent_attention import LatentSelfAttention
from lorafusion_jax.models.mamba import MambaMixer
from lorafusion_jax.models.mlp import MLP
from lorafusion_jax.models.norm import LayerNorm, RMSNorm
from lorafusion_jax.models.per_layer_input import OwnInput
from lorafusion_jax.models.self_attention import SelfAttention
from lorafusion_jax.models.short_convolution import GatedConvolution
from lorafusion_jax.models.stream import Stream
from lorafusion_jax.modules import LoRAContext

type Feed = Callable[[jax.Array, LoRAContext | None], jax.Array]


class DecoderLayer(nnx.Module):
    """x + residual · attention(x), then x + residual · mlp(x), with norms of the inputs, of the outputs, or of both.

    The tensors of `LayerSpec.checkpoints` have names for rematerialisation policies. Backward can recompute everything
    else from them without a matrix product.

    Args:
        number: of the layer, or of any layer like it.
        half: builds only one half, for a layer that two pipeline stages share: "attention" is the first sum, "mlp" the
            second.
        prepared: as in `LoRALinear`.
        parted: whether `config` is the part of a device, see `ModelConfig.part_of` and `tensor_sums`.
        parts: of the rows, in which everything but the attention of rows to each other is computed, see `by_parts`.
    """

    def __init__(
        self,
        config: ModelConfig,
        adapters: Sequence[AdapterSpec],
        *,
        number: int = 0,
        half: Half | None = None,
        dtype: Any,
        rngs: nnx.Rngs,
        prepared: bool = False,
        parted: bool = False,
        parts: int = 1,
    ):
        spec = config.layer(number)
        build = Builder(
            config=config, layer=spec, adapters=adapters, dtype=dtype, rngs=rngs, prepared=prepared, parted=parted,
            parts=parts,
        )  # fmt: skip
        self.spec, self.half, self.parts = spec, half, parts
        for norm in spec.around.norms:
            if half in (None, norm.half):
                setattr(self, norm.path, build.norm(norm.path))
        if half != "mlp":
            mixer = spec.attention
            if isinstance(mixer, DeltaNet):
                self.linear_attn = GatedDeltaNet(build, mixer)
            elif isinstance(mixer, Mamba):
                setattr(self, mixer.module, MambaMixer(build, mixer))
            elif isinstance(mixer, ShortConvolution):
                setattr(self, mixer.module, GatedConvolution(build, mixer))
            elif isinstance(mixer, LatentAttention):
                self.self_attn = LatentSelfAttention(build, mixer)
            elif not isinstance(mixer, Absent):
                setattr(self, mixer.module, SelfAttention(build, mixer))
            if spec.second is not None:
                setattr(self, spec.second.module, MambaMixer(build, spec.second))
        if half != "attention":
            if not isinstance(spec.mlp, Absent):
                mlp = MixtureOfExperts(build, spec.mlp) if isinstance(spec.mlp, Experts) else MLP(build, spec.mlp)
                setattr(self, spec.mlp.module, mlp)
            self.parallel = nnx.data(None) if spec.beside is None else ParallelMixture(build, spec.beside)
            if spec.own_input is not None:
                setattr(self, spec.own_input.module, OwnInput(build, spec.own_input))
            self.layer_scalar = nnx.Param(jnp.ones((1,), dtype)) if spec.scaled else nnx.data(None)

    def __call__(
        self, x_TD: Float[Array, "T D"], inputs: LayerInputs, implementation: AttentionImplementation | None = None
    ) -> Float[Array, "T D"]:
        return self._run(x_TD, inputs, lambda h_TD: self._mix(h_TD, inputs, implementation))

    def with_keys(
        self,
        carried: Stream | Float[Array, "T D"],
        inputs: LayerInputs,
        implementation: AttentionImplementation | None = None,
    ) -> Stream:
        """Like a call, of a layer that gives keys and values to later ones, or after such a layer."""
        x_TD, shared = (carried.x_TD, carried.shared) if isinstance(carried, Stream) else (carried, {})
        spec, shared_after = self.spec.attention, dict(shared)
        if not isinstance(spec, Attention) or spec.sharing == "none":
            return Stream(self(x_TD, inputs, implementation), shared)

        def mix(h_TD: jax.Array) -> jax.Array:
            attention = self._attention
            assert isinstance(attention, SelfAttention)
            before = shared[spec.module] if spec.reads else None
            o_TD, shared_after[spec.module] = attention.with_keys(h_TD, before, inputs, implementation)
            return o_TD

        return Stream(self._run(x_TD, inputs, mix), shared_after)

    def with_cache(
        self,
        carried: Stream | Float[Array, "T D"],
        inputs: LayerInputs,
        cache: Cache,
        implementation: AttentionImplementation | None = None,
    ) -> tuple[Stream | Float[Array, "T D"], Cache]:
        """Like a call, and returns the cache with these rows, see `models.cache`. The MLP's half has none."""
        x_TD, shared = (carried.x_TD, carried.shared) if isinstance(carried, Stream) else (carried, {})
        spec, shared_after, caches = self.spec.attention, dict(shared), [cache]

        def mix(h_TD: jax.Array) -> jax.Array:
            if not isinstance(spec, Attention | LatentAttention):
                o_TD, caches[0] = getattr(self, spec.module).with_cache(h_TD, inputs, cache)
                return o_TD
            attention = self._attention
            if isinstance(attention, LatentSelfAttention):
                o_TD, caches[0] = attention.with_cache(h_TD, inputs, cache, implementation)
                return o_TD
            assert isinstance(spec, Attention)
            before = shared[spec.module] if spec.reads else None
            if (second := self.spec.second) is not None:
                second_TD, states = getattr(self, second.module).with_cache(h_TD, inputs, cache)
                cache_of_rows = {name: cache[name] for name in spec.row_shapes}
                o_TD, rows, _ = attention.with_cache(h_TD, inputs, cache_of_rows, implementation, before)
                caches[0] = rows | states
                return o_TD + second_TD
            o_TD, caches[0], keys = attention.with_cache(h_TD, inputs, cache, implementation, before)
            if spec.sharing == "gives":
                shared_after[spec.module] = keys
            return o_TD

        y_TD = self._run(x_TD, inputs, mix)
        return (Stream(y_TD, shared_after) if shared_after else y_TD), caches[0]

    def with_choices(
        self, x_TD: Float[Array, "T D"], inputs: LayerInputs, implementation: AttentionImplementation | None = None
    ) -> tuple[Float[Array, "T D"], Float[Array, "2 M E"] | None]:
        """Like a call, and returns `balance.count_choices` of its router; None if it has none."""
        choices: list[jax.Array] = []

        def feed(h_TD: jax.Array, lora: LoRAContext | None) -> jax.Array:
            mlp = self._mlp
            assert isinstance(mlp, MixtureOfExperts)
            assert inputs.inside is not None, "these inputs do not say whose choices are counted"
            y_TD, counts = mlp.with_choices(h_TD, lora, inputs.inside)
            choices.append(counts)
            return y_TD

        fed = feed if isinstance(self.spec.mlp, Experts) else None
        y_TD = self._run(x_TD, inputs, lambda h_TD: self._mix(h_TD, inputs, implementation), fed)
        return y_TD, choices[0] if choices else None

    def _mix(self, h_TD: jax.Array, inputs: LayerInputs, implementation: AttentionImplementation | None) -> jax.Array:
        if isinstance(self.spec.attention, DeltaNet | Mamba | ShortConvolution):
            return getattr(self, self.spec.attention.module)(h_TD, inputs)
        o_TD = self._attention(h_TD, inputs, implementation)
        second = self.spec.second
        return o_TD if second is None else o_TD + getattr(self, second.module)(h_TD, inputs)

    def _run(
        self,
        x_TD: jax.Array,
        inputs: LayerInputs,
        mix: Callable[[jax.Array], jax.Array],
        feed: Feed | None = None,
    ) -> jax.Array:
        """Runs the layer or half layer; `mix` is its attention, and `feed` its MLP (None: as it is)."""
        feed = feed or (lambda h_TD, lora: self._mlp(h_TD, lora))
        if isinstance(self.spec.mlp, Absent):
            x_TD, h_TD = self._enter("attention", x_TD)
            return x_TD + self._leave("attention", mix(h_TD))
        if self.half == "mlp" or isinstance(self.spec.attention, Absent):
            end = partial(self._end, feed)
            return by_parts(lambda x_TD, inputs: end(*self._enter("mlp", x_TD), inputs), self.parts, inputs, x_TD)
        x_TD, h_TD = self._enter("attention", x_TD)
        return by_parts(partial(self._after_attention, feed), self.parts, inputs, x_TD, h_TD, mix(h_TD))

    def _after_attention(
        self, feed: Feed, x_TD: jax.Array, h_TD: jax.Array, o_TD: jax.Array, inputs: LayerInputs
    ) -> jax.Array:
        """Adds the output of the attention, and runs the MLP of a whole layer; h is what the attention read."""
        if self.spec.around.parallel:
            if "mlp" in self.spec.around.before:
                x_TD, h_TD = self._enter("mlp", x_TD)
            return x_TD + self._leave("attention", o_TD) + self._leave("mlp", feed(h_TD, inputs.lora))
        if self.half == "attention":
            return x_TD + self._leave("attention", o_TD)
        x_TD, h_TD = self._enter("mlp", x_TD, self._leave("attention", checkpoint_name(o_TD, "o_out")))
        return self._end(feed, x_TD, h_TD, inputs)

    def _end(self, feed: Feed, x_TD: jax.Array, h_TD: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Runs the MLP on h, and adds its output to x."""
        y_TD = feed(h_TD, inputs.lora)
        if self.parallel is not None:
            y_TD = self.parallel.beside(y_TD, x_TD, inputs.lora)
        x_TD = x_TD + self._leave("mlp", y_TD)
        if self.spec.own_input is not None:
            assert inputs.of_layers is not None, "these inputs have none of the layer's own"
            x_TD = getattr(self, self.spec.own_input.module)(x_TD, inputs.of_layers, inputs.lora)
        return x_TD if self.layer_scalar is None else x_TD * self.layer_scalar[...]

    @property
    def _attention(self) -> SelfAttention | LatentSelfAttention:
        mixer = self.spec.attention
        return getattr(self, mixer.module if isinstance(mixer, Attention) else "self_attn")

    @property
    def _mlp(self) -> MLP | MixtureOfExperts:
        return getattr(self, self.spec.mlp.module)

    def _enter(self, half: Half, x_TD: jax.Array, delta_TD: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns x + delta, and what a half reads: this sum, or its norm."""
        norm = self._norm(self.spec.around.before, half)
        if norm is None:
            x_TD = x_TD if delta_TD is None else x_TD + delta_TD
            return x_TD, x_TD
        return norm.rms_norm_with_residual(x_TD) if delta_TD is None else norm.add_rms_norm(x_TD, delta_TD)

    def _leave(self, half: Half, y_TD: jax.Array) -> jax.Array:
        """Returns what a half adds to x."""
        norm = self._norm(self.spec.around.after, half)
        if norm is not None:
            name = "o_out" if half == "attention" else "down_out"
            y_TD = norm(checkpoint_name(y_TD, name))  # a norm's gradient needs its input
        return y_TD if self.spec.residual == 1 else y_TD * self.spec.residual

    def _norm(self, names: dict[Half, str], half: Half) -> RMSNorm | LayerNorm | None:
        return getattr(self, names[half]) if half in names else None
