"""A family of decoders: names in model files, keys of config.json, and fields over the mechanisms of a layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lorafusion_jax.errors import did_you_mean
from lorafusion_jax.families.hf_config import COMMON, MEANT
from lorafusion_jax.families.norm import Place

_LAYERS = "model.layers"
LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names and arithmetic of a family's models. Defaults are those of Llama.

    A key of config.json that is neither read nor known is an error, so a model is never computed as another one.

    Args:
        architectures: names in config.json; the first one is written.
        models, beyond: what people call its models, and what their layers have beyond Llama's; for the page of models.
        model_types: further names in `model_type` of config.json.
        saved_as: architectures of other families, whose classes transformers has for its models; `model_type` tells
            them apart, and tensors under the names of these classes are read, too.
        shared_types: names in `model_type` of config.json that another family has, too; architectures tell them apart.
        reads: keys of config.json that this family reads beyond those of every model (`hf_config.COMMON`), in the
            spelling of transformers, each with its value where config.json does not have it (None: none).
        keys: a key of this family's config.json → transformers' spelling, e.g. {"n_embd": "hidden_size"}. These keys
            are read.
        known: keys of config.json that do not change the computation.
        dropouts: keys of dropout inside the base whose value is not 0 where config.json does not have them. It is
            not applied, as what other keys of `hf_config.DROPOUTS` say, and a note says so.
        meant: values that stand for others in this family, by key.
        fields: fields of `ModelConfig` that all models of the family have in common, e.g. {"norms": "sandwich"}. An
            embedding_scale of "sqrt" is the root of the model's width.
        windows: layers with `sliding_window` if config.json has no `layer_types`: none, all, those from
            `max_window_layers` on, every second one before it, or those without rotary embeddings if
            `use_sliding_window`, or all but each n-th; "chunks": those with rotary embeddings attend within chunks.
        period: types of layers that follow each other again and again, if config.json has no `layer_types`.
        scaled_layers: layers whose rotary embeddings `rope_scaling` scales.
        experts: fields of `Experts` that all models of the family have in common; None: it has no experts. The keys
            `num_experts`, `num_experts_per_tok`, `moe_intermediate_size`, `norm_topk_prob` and those of `read_experts`
            say the others; `first_k_dense_replace`, `mlp_only_layers` and `decoder_sparse_step`, which layers have an
            MLP instead.
        expert_names: tensors of the experts in a checkpoint, "{}" for the number of the layer's expert: of gate and of
            up [F, D], or of up alone, and of down [D, F]; or two tensors of all experts, [E, in, out].
        experts_transposed: these two are [E, out, in]. Where only the other order fits a file, it has that.
        shared_expert: module of an MLP beside the experts that is as wide as an expert, whatever config.json says.
        delta_net: fields of `DeltaNet` that all models of the family have in common; None: it has no such layers. The
            keys `linear_…` say the others, and `layer_types` or `full_attention_interval` which layers have it.
        mixer: what layers of linear attention have in place of attention, if it is no delta net; the keys `mamba_…` and
            `conv_…` say its sizes.
        latent: attention has latents; the keys `q_lora_rank`, `kv_lora_rank`, `qk_…` and `v_head_dim` say their widths.
        whole_heads: with latents, `head_dim` counts all channels of q and k, not only the rotating ones.
        cached_heads: with latents, `head_dim` may also count what a cache keeps of a token.
        one_half: a layer has a mixer, an MLP or experts, as `layer_types` says: "mlp", "moe".
        frozen: projections of Mamba-2 that PEFT 0.21 adapts in no model of the family.
        rotated: layers with rotary embeddings: all, none, or those with a window ("if any": all of a model without
            windows); "unless null": none if rope_parameters has a theta of null.
        parallel: position of the norms where `use_parallel_residual` is true.
        rope: further fields of `Rope` that all layers of the family have in common, e.g. {"interleaved": True}.
        known_of_rope: keys of `rope_parameters` that do not change what is computed of text.
        ignored: beginnings of the names of a checkpoint's tensors that are left out; with a dot before, parts of names.
        joined: module of a layer in a checkpoint → projections whose rows lie in its tensors one below the other.
        turned: kernels of layers are [in, out] in a checkpoint.
        root: beginning of the names of a checkpoint's tensors, but of the head's, that older files lack.
        inner_factor: width of the MLP, in widths of the model, where config.json does not say it (0: it must).
        modules: Llama's module, or a tensor of it → the family's, e.g. {"model.embed_tokens": "tokens",
            "model.layers": "blocks", "self_attn.q_proj": "attention.query"}. Adapters are saved under Llama's names.
    """

    architectures: tuple[str, ...]
    models: str = ""
    beyond: str = ""
    model_types: tuple[str, ...] = ()
    saved_as: tuple[str, ...] = ()
    shared_types: tuple[str, ...] = ()
    reads: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    known: tuple[str, ...] = ()
    dropouts: Mapping[str, float] = field(default_factory=dict)
    meant: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    windows: Literal["never", "all", "switched", "first", "unrotated", "chunks"] | int = "never"
    period: tuple[str, ...] = ()
    scaled_layers: Literal["all", "full_attention"] = "all"
    experts: Mapping[str, Any] | None = None
    expert_names: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
    experts_transposed: bool = False
    shared_expert: str = ""
    delta_net: Mapping[str, Any] | None = None
    mixer: Literal["mamba", "convolution"] | None = None
    latent: bool = False
    whole_heads: bool = False
    cached_heads: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)
    one_half: bool = False
    frozen: tuple[str, ...] = ()
    rotated: Literal["all", "none", "unless null", "windows", "windows, if any"] = "all"
    parallel: Place = "parallel"
    known_of_rope: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    turned: bool = False
    root: str = ""
    inner_factor: int = 0
    modules: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := sorted({*self.reads, *self.keys.values()} - self.keys.keys() - MEANT):
            near = did_you_mean(unknown[0], MEANT)
            raise ValueError(f"reads and keys have {unknown[0]!r}, which means nothing here. {near or 'See `known`.'}")

    @property
    def read_keys(self) -> set[str]:
        """The keys of config.json that are read, in this family's spelling."""
        return {*COMMON, *self.reads, *self.keys} - ({*self.keys.values(), *self.known} - self.keys.keys())

    @property
    def meanings(self) -> set[str]:
        """The keys of config.json that are read, in transformers' spelling."""
        return {self.keys.get(key, key) for key in self.read_keys}

    def canonical(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a config.json of this family says, and the values of missing keys, in transformers' spelling."""
        present = [key for key in raw if key in self.read_keys]
        present.sort(key=lambda key: raw[key] is not None)  # of two spellings, a null says nothing
        values = {self.keys.get(key, key): raw[key] for key in present}
        if not values.get("rope_parameters"):  # as missing; the older spelling counts before the family's default
            values |= {"rope_parameters": None if values.get("rope_scaling") else self.reads.get("rope_parameters")}
        if isinstance(letters := values.get("hybrid_override_pattern"), str) and not values.get("layer_types"):
            values["layer_types"] = [LETTERS.get(letter, letter) for letter in letters]
        values = dict(self.reads) | values
        if self.inner_factor and values.get("intermediate_size") is None and type(values.get("hidden_size")) is int:
            values["intermediate_size"] = self.inner_factor * values["hidden_size"]
        if self.one_half and isinstance(types := values.get("layer_types"), list):
            values["num_hidden_layers"] = values.get("num_hidden_layers") or len(types)
        if values.get("use_sliding_window") is False and values.get("sliding_window") == 0:
            values["sliding_window"] = None  # transformers writes 0 where windows are off
        for key, others in self.meant.items():
            if isinstance(value := values.get(key), str):
                values[key] = others.get(value, value)
        return values

    def key_of(self, key: str) -> str:
        """The family's spelling of a key of transformers."""
        return next((family_key for family_key, common_key in self.keys.items() if common_key == key), key)

    def tensor_name(self, llama: str) -> str:
        """Checkpoint name of a tensor given by Llama's name, e.g. "model.layers.3.self_attn.q_proj.weight"."""
        path, _, leaf = llama.rpartition(".")
        inside = _IN_LAYER.fullmatch(path)
        if inside is None:
            return f"{self.modules.get(path, path)}.{leaf}"
        number, module = inside.groups()
        inside = self.modules.get(f"{module}.{leaf}", f"{self.modules.get(module, module)}.{leaf}")
        return f"{self.modules.get(_LAYERS, _LAYERS)}.{number}.{inside}"
