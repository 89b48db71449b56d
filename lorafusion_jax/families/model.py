"""Configuration of a decoder: one dataclass for all families, read from a Hugging Face config.json.

It is in this package because planning needs shapes without jax.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any, Literal

from lorafusion_jax.errors import CheckpointError, ConfigError
from lorafusion_jax.families.attention import MODULE, Attention, QKNorm
from lorafusion_jax.families.delta_net import DeltaNet
from lorafusion_jax.families.experts import Experts, ParallelExperts
from lorafusion_jax.families.hf_config import one_of_each
from lorafusion_jax.families.latent_attention import LatentAttention
from lorafusion_jax.families.layer import Absent, Layer
from lorafusion_jax.families.mamba import Mamba
from lorafusion_jax.families.mlp import MODULE as MLP
from lorafusion_jax.families.mlp import Activation, Mlp
from lorafusion_jax.families.norm import Kind, Norms, Place
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.per_layer_input import MIX, MIX_NORM, POSITIONS, TABLE, PerLayerInput
from lorafusion_jax.families.quantised import beside_config
from lorafusion_jax.families.read import translate
from lorafusion_jax.families.rope import Rope, RopeScaling
from lorafusion_jax.families.short_convolution import ShortConvolution
from lorafusion_jax.families.table import known_models
from lorafusion_jax.layout.layer import GLOBAL_ATTENTION, HALVES, WIDE_MLP, Half, Linear, saved_path
from lorafusion_jax.readable import SETTINGS, has_folder, read_text
from lorafusion_jax.weights.packed import Packed


@dataclass(frozen=True, kw_only=True)  # no __slots__: cached properties live in __dict__
class ModelConfig:
    """Shapes and arithmetic of a decoder-only transformer: the fields of its layers, see `families`.

    Args:
        rope_theta, rope_scaling, rope_channels: of all layers, see `families.rope.Rope`; unless there is a
            `pattern`, as for sliding_window.
        norms, norm_offset, norm_kind, norm_bias, norm_eps: see `families.norm.Norms`.
        qk_norm: whether q and k are normalised: each head on its own (True), all heads together ("full"), or, "unit",
            each head without a weight, in layers with rotary embeddings.
        mlp_gated, mlp_names, mlp_module: see `families.mlp.Mlp`.
        turned_norm: see `families.attention.Attention`.
        fused: q, k and v are one projection, and so are gate and up, if there is a gate; or only those of one half.
        attention_scale, attention_soft_cap: see `families.attention.Attention`.
        embedding_scale: factor of the embeddings, rounded to their dtype.
        residual_scale: factor of what attention and the MLP add.
        logit_scale, final_soft_cap: logits are soft_cap · tanh(logit_scale · head(x) / soft_cap).
        experts: instead of an MLP, or beside it if they are `ParallelExperts`, but in layers of `pattern` that say
            otherwise (None: there are none).
        attention_sinks, attention_gate, attention_out: see `families.attention.Attention`.
        v_norm: see `families.attention.Attention`.
        layer_scalar: see `families.layer.Layer.scaled`.
        delta_net, mixer: instead of attention, in the layers of `pattern` that say so.
        mixer_beside: the mixer is beside attention, in all layers.
        attention_factors, mlp_factors: of the input and the output of attention; of the MLP's gate and its output.
        attention_module: name of attention in its layer.
        fused_name, fused_by_head: see `families.attention.Attention`.
        latent: attention of all layers, but for its rope (None: it has no latents).
        output_vocab: tokens that the head has rows of, the first ones (0: all).
        input_width, input_vocab: width of the inputs that layers have of their own, and rows of their table (0: there
            are none), see `families.per_layer_input`.
        learned_positions: the embedding of a token's position is added to its own.
        chosen: tokens that an indexer chooses for each query; shorter samples are attended to as a whole, so that they
            need no indexer, and longer ones are refused (None: there is none).
        pattern: type of each layer; empty if all layers are alike.
        packed: how kernels of the checkpoint may be packed that reading widens (None: they are not).
        dropouts: rates of dropout inside the base, and a soft cap that only text models have, by key of config.json;
            they are not applied.
        wrapper: model_type of a multimodal model of which this is the text part, see `families.multimodal`.

    Example:
        >>> config = ModelConfig.from_hf({
        ...     "architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2})
        >>> config.family, config.head_dim, config.qkv_bias
        ('qwen2', 8, True)
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_channels: int | None = None
    norm_eps: float = 1e-6
    norms: Place = "pre"
    norm_offset: float = 0.0
    norm_kind: Kind = "rms"
    norm_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    mlp_gated: bool = True
    mlp_module: str = MLP
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    qk_norm: bool | Literal["full", "unit"] = False
    turned_norm: bool = False
    fused: bool | Half = False
    activation: Activation = "silu"
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    final_soft_cap: float | None = None
    tie_embeddings: bool = False
    max_positions: int = 2048
    sliding_window: int | None = None
    experts: Experts | None = None
    attention_sinks: bool = False
    attention_gate: bool = False
    attention_out: str = "o_proj"
    v_norm: bool = False
    layer_scalar: bool = False
    delta_net: DeltaNet | None = None
    mixer: Mamba | ShortConvolution | None = None
    mixer_beside: bool = False
    attention_factors: tuple[float, float] = (1.0, 1.0)
    mlp_factors: tuple[float, float] = (1.0, 1.0)
    attention_module: str = MODULE
    fused_name: str = "qkv_proj"
    fused_by_head: bool = False
    latent: LatentAttention | None = None
    output_vocab: int = 0
    input_width: int = 0
    input_vocab: int = 0
    learned_positions: bool = False
    chosen: int | None = None
    pattern: tuple[LayerType, ...] = ()
    checkpoint_format: str | None = None
    packed: Packed | None = None
    dropouts: tuple[tuple[str, float], ...] = ()
    wrapper: str = ""

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> ModelConfig:
        """Reads a model directory, a config.json or its content.

        Raises:
            CheckpointError: `model.not-found`; `model.bad-config`, values have wrong types or ranges;
                `model.unsupported`, the architecture or options are not supported (all in one message).
            ConfigError: `plugin.broken`, the installed family of this model does not load.
        """
        raw, where = (dict(source), "config") if isinstance(source, Mapping) else _read(Path(source))
        malformed: list[str] = []
        unsupported: list[str] = []
        fields = translate(raw, malformed, unsupported)
        if fields is not None and not malformed and not unsupported:
            if unknown := fields.keys() - cls.__dataclass_fields__:
                message = f"the family {fields['family']} has fields that no model has: {', '.join(sorted(unknown))}."
                raise ConfigError("plugin.broken", message, fix="repair the package that it comes from")
            return cls(**fields)
        if malformed and not unsupported:
            raise CheckpointError(
                "model.bad-config",
                "config.json cannot be used: " + _sentence(malformed),
                where=where,
                fix="correct these keys, or download the file again",
            )
        quantised = any("quanti" in problem for problem in unsupported)
        raise CheckpointError(
            "model.unsupported",
            "this model is not supported: " + _sentence([*unsupported, *malformed]),
            where=where,
            why=f"supported families: {known_models()}",
            fix="choose a base model of these families" + (", or a copy of it that is not quantised" * quantised),
        )

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The description of every layer."""
        by_type = {kind: self._layer(kind) for kind in dict.fromkeys(self._types)}
        return tuple(by_type[kind] for kind in self._types)

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """The different layers, in order of their first occurrence."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotary embeddings, in order of their first occurrence."""
        return tuple(dict.fromkeys(layer.attention.rope for layer in self.layers if layer.attention.rope is not None))

    def layer(self, number: int) -> Layer:
        """The description of a layer."""
        return self.layers[number]

    def kind_of(self, number: int) -> int:
        """Index of a layer's description in `kinds`."""
        return self._kind_numbers[number]

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the projections of its layers, which are the possible LoRA targets."""
        return tuple(dict.fromkeys(name for layer in self.kinds for name in layer.targets))

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The different projections of its layers, in order of their first occurrence."""
        by_path = {linear.path: linear for layer in reversed(self.kinds) for linear in layer.linears}
        paths = dict.fromkeys(linear.path for layer in self.kinds for linear in layer.linears)
        return tuple(by_path[path] for path in paths)

    def paths_of(self, name: str) -> tuple[str, ...]:
        """Where the projections of this name are in layers: "mlp.up_proj", "mlp.shared_experts.up_proj"."""
        return tuple(linear.path for linear in self.linears if linear.name == name)

    @cached_property
    def saved_shapes(self) -> Mapping[str, tuple[int, int]]:
        """(in, out) of the projections by name; by path in PEFT, too, where layers have other widths."""
        shapes = {linear.name: linear.shape for linear in reversed(self.linears)}
        wide = [
            linear for linear in self.linears
            if linear.module in (GLOBAL_ATTENTION, WIDE_MLP) or linear.shape != shapes[linear.name]
        ]  # fmt: skip
        by_path = {
            f"layers.{layer}.{saved_path(linear.path)}": linear.shape
            for linear in wide
            for layer in self.layers_with(linear.path)
        }
        return {linear.name: linear.shape for linear in self.linears if linear not in wide} | by_path

    def layers_with(self, path: str) -> tuple[int, ...]:
        """Numbers of the layers that have a projection, "self_attn.q_proj"."""
        return self.some_layers.get(path, tuple(range(self.num_layers)))

    @cached_property
    def some_layers(self) -> Mapping[str, tuple[int, ...]]:
        """Numbers of the layers that have a projection, of those projections that not all layers have."""
        having = [{linear.path for linear in layer.linears} for layer in self.kinds]
        return {
            linear.path: tuple(number for number, kind in enumerate(self._kind_numbers) if linear.path in having[kind])
            for linear in self.linears
            if not all(linear.path in paths for paths in having)
        }

    @property
    def num_routers(self) -> int:
        """Layers whose rows choose experts."""
        return sum(isinstance(layer.mlp, Experts) for layer in self.layers)

    def half_of(self, leaf: str) -> Half:
        """The half of the layers that owns a trainable leaf: "layers.self_attn.q_proj.lora_a"."""
        path = leaf.removeprefix("layers.").rpartition(".")[0]
        return self.layer(self.layers_with(path)[0]).half_of(leaf)

    @cached_property
    def _types(self) -> tuple[LayerType, ...]:
        rope = Rope(theta=self.rope_theta, scaling=self.rope_scaling, channels=self.rope_channels)
        return self.pattern or (LayerType(window=self.sliding_window, rope=rope),) * self.num_layers

    @cached_property
    def _kind_numbers(self) -> tuple[int, ...]:
        numbers = {layer: number for number, layer in enumerate(self.kinds)}
        return tuple(numbers[layer] for layer in self.layers)

    def _layer(self, kind: LayerType) -> Layer:
        if kind.linear:
            assert self.delta_net or self.mixer, "a layer of linear attention needs `delta_net` or `mixer`"
        recurrent = self.delta_net or self.mixer
        mixer = recurrent if kind.linear and recurrent else self._attention(kind)
        gate_factor, out_factor = self.mlp_factors
        mlp = Mlp(
            width=self.hidden_size,
            inner=self.intermediate_size * (2 if kind.wide else 1),
            activation=self.activation,
            bias=self.mlp_bias,
            fused=self.fused in (True, "mlp") and self.mlp_gated,
            gated=self.mlp_gated,
            names=self.mlp_names,
            gate_factor=gate_factor,
            out_factor=out_factor,
            module=WIDE_MLP if kind.wide else self.mlp_module,
        )
        before = self.norms == "post" and kind.linear  # so in OLMo hybrid
        around = Norms(
            width=self.hidden_size, position="pre of linear" if before else self.norms, kind=self.norm_kind,
            bias=self.norm_bias, offset=self.norm_offset, eps=self.norm_eps,
            halves=(kind.only,) if kind.only else HALVES,
        )  # fmt: skip
        experts = None if kind.dense else self.experts
        beside = experts if isinstance(experts, ParallelExperts) else None
        return Layer(
            attention=Absent() if kind.only == "mlp" else mixer,
            second=self.mixer if self.mixer_beside and isinstance(self.mixer, Mamba) else None,
            mlp=Absent() if kind.only == "attention" else experts if experts and not beside else mlp,
            around=around,
            beside=beside,
            own_input=self._own_input,
            residual=self.residual_scale,
            scaled=self.layer_scalar,
        )

    @property
    def _own_input(self) -> PerLayerInput | None:
        if not self.input_width:
            return None
        return PerLayerInput(width=self.hidden_size, inner=self.input_width, activation=self.activation)

    @property
    def undivided(self) -> bool:
        """Whether attention and the MLP of its layers read one x, or are layers of their own, so that stages end
        between layers only."""
        return any(layer.around.parallel or len(layer.around.halves) == 1 for layer in self.kinds)

    @property
    def crossing(self) -> str | None:
        """What its layers have of earlier ones beside x, for messages; None: nothing."""
        reads = any(kind.sharing == "reads" for kind in self.pattern)
        crossing = {"keys of earlier layers": reads, "inputs of their own": bool(self.input_width)}
        return " and ".join(name for name, present in crossing.items() if present) or None

    @cached_property
    def shared_width(self) -> int:
        """Elements per row of the keys and values that layers give to later ones."""
        layers = [layer.attention for layer in self.layers]
        return sum(2 * mixer.keys for mixer in layers if isinstance(mixer, Attention) and mixer.sharing == "gives")

    @cached_property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the frozen tensors that make the inputs of layers beside the embedding, by leaf name."""
        if not self.input_width:
            return {POSITIONS: (self.max_positions, self.hidden_size)} if self.learned_positions else {}
        together = self.num_layers * self.input_width
        return {
            TABLE: (self.input_vocab, together),
            MIX: (together, self.hidden_size),
            MIX_NORM: (self.input_width,),
        }

    def _attention(self, kind: LayerType) -> Attention | LatentAttention:
        if self.latent is not None:
            return replace(self.latent, rope=kind.rope)
        return Attention(
            width=self.hidden_size,
            heads=self.num_heads,
            kv_heads=kind.kv_heads or self.num_kv_heads,
            head_dim=kind.head_dim or self.head_dim,
            rope=kind.rope,
            window=kind.window,
            chunk=kind.chunk,
            scale=self.attention_scale,
            soft_cap=self.attention_soft_cap,
            qk_norm=self._qk_norm(kind),
            bias=self.qkv_bias,
            o_bias=self.o_bias,
            turned_norm=self.turned_norm,
            fused=self.fused in (True, "attention"),
            fused_name=self.fused_name,
            by_head=self.fused_by_head,
            sinks=self.attention_sinks,
            gated=self.attention_gate,
            v_norm=self.v_norm,
            k_is_v=kind.k_is_v,
            sharing=kind.sharing,
            in_factor=self.attention_factors[0],
            out_factor=self.attention_factors[1],
            out=self.attention_out,
            module=self.attention_module if kind.head_dim is None else GLOBAL_ATTENTION,
        )

    def _qk_norm(self, kind: LayerType) -> QKNorm:
        if self.qk_norm == "unit":
            return "unit" if kind.rope is not None and kind.rope.share else "none"
        return "full" if self.qk_norm == "full" else "head" if self.qk_norm else "none"

    @property
    def chunk(self) -> int | None:
        """Length of the chunks in which some layers attend; None: no layer does."""
        return next((kind.chunk for kind in self.pattern if kind.chunk is not None), None)

    def part_of(self, tensor: int) -> ModelConfig:
        """What one of `tensor` devices computes of every layer: its heads, and its columns of the MLP.

        >>> whole = ModelConfig(family="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=1,
        ...     num_heads=4, num_kv_heads=2, head_dim=8)
        >>> whole.part_of(2).layer(0).linear("o_proj").shape, whole.part_of(2).layer(0).linear("up_proj").shape
        ((16, 32), (32, 24))
        """
        return self if tensor == 1 else _part_of(self, tensor)

    @property
    def num_outputs(self) -> int:
        """Rows of the head: it gives logits of the tokens 0 to `num_outputs` - 1."""
        return self.output_vocab or self.vocab_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the base model; a tied head counts once."""
        embeddings = self.hidden_size * (self.vocab_size + (0 if self.tie_embeddings else self.num_outputs))
        others = self.hidden_size * (1 + self.norm_bias) + sum(map(prod, self.input_shapes.values()))
        return embeddings + sum(layer.num_parameters for layer in self.layers) + others

    def check_length(self, longest: int, *, where: str = "", sample: str = "the longest sample", fix: str = "") -> None:
        """Checks that samples are within the model's positions.

        Args:
            longest: tokens of the longest sample.
            where: folder of the model, for the message.
            sample: name of the sample in the message.
            fix: empty: a shorter data.max_length.

        Raises:
            CheckpointError: `model.positions`.
        """
        if longest > self.positions:
            raise CheckpointError(
                "model.positions",
                f"{sample} has {longest} tokens, but this model knows {self.positions} positions.",
                where=where,
                why=f"{self._bound_of_positions} in its config.json",
                fix=fix or f"data.max_length: {self.positions}",
            )

    def check_router_loss(self, factor: float) -> None:
        """Checks that the routers can have a load-balancing loss.

        Args:
            factor: `train.router_aux`; 0: none.

        Raises:
            ConfigError: `train.router-aux`.
        """
        if factor and (self.experts is None or not self.experts.router.has_balance_loss):
            scaled = self.experts is not None and self.experts.router.scaled
            routers = "has routers with factors of each expert" if scaled else "has routers that score by sigmoid"
            kind = "has no experts" if self.experts is None else routers
            raise ConfigError(
                "train.router-aux",
                f"train.router_aux={factor:g}, and this base ({self.family}) {kind}.",
                why="transformers has this loss for other routers, with a softmax, only",
                fix="train.router_aux: 0",
            )

    @property
    def positions(self) -> int:
        """Number of supported positions. Linear scaling of all rotary frequencies extends them."""
        scalings = [rope.scaling for rope in self.ropes]
        factors = [scaling.factor if scaling and scaling.kind == "linear" else 1 for scaling in scalings]
        positions = int(self.max_positions * min(factors, default=1))
        return positions if self.chosen is None else min(positions, self.chosen)

    @property
    def _bound_of_positions(self) -> str:
        if self.chosen is None or self.max_positions <= self.chosen:
            return f"max_position_embeddings is {self.max_positions}"
        return f"queries of longer samples read only what an indexer chooses, and index_topk is {self.chosen}"


@lru_cache(maxsize=16)  # of which the layers are described once
def _part_of(model: ModelConfig, tensor: int) -> ModelConfig:
    pattern = [replace(kind, kv_heads=kind.kv_heads and kind.kv_heads // tensor) for kind in model.pattern]
    return replace(
        model,
        num_heads=model.num_heads // tensor,
        num_kv_heads=model.num_kv_heads // tensor,
        intermediate_size=model.intermediate_size // tensor,
        pattern=tuple(pattern),
    )


def _read(path: Path) -> tuple[dict[str, Any], str]:
    file = path / "config.json" if has_folder(path) or path.suffix != ".json" else path
    try:
        raw = json.loads(read_text(file, SETTINGS), object_pairs_hook=one_of_each)
    except FileNotFoundError:
        raise CheckpointError(
            "model.not-found",
            "there is no model here.",
            where=str(file),
            fix="base.model: a folder that holds config.json",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "model.bad-config", "config.json cannot be read.", where=str(file), why=str(error)
        ) from None
    if not isinstance(raw, dict):
        raise CheckpointError("model.bad-config", "config.json is not a JSON object.", where=str(file))
    return raw | beside_config(file, raw), str(file)


def _sentence(problems: list[str]) -> str:
    return "; ".join(problems) + "."
