"""Models of text and other input: their text part is a family of `table`, and their towers are left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lorafusion_jax.families.family import Family
from lorafusion_jax.families.table import FAMILIES

# model_type → (architecture, families that its text part may be of; the first one if it does not say)
WRAPPERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "apertus1p5": ("Apertus1p5ForConditionalGeneration", ("apertus1p5_text",)),
    "gemma3": ("Gemma3ForConditionalGeneration", ("gemma3_text",)),
    "gemma4": ("Gemma4ForConditionalGeneration", ("gemma4_text",)),
    "gemma4_unified": ("Gemma4UnifiedForConditionalGeneration", ("gemma4_unified_text",)),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", ("qwen3_5_text",)),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", ("qwen3_5_moe_text",)),
    "mistral3": ("Mistral3ForConditionalGeneration", ("mistral", "ministral3", "mistral4")),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", ("qwen2_vl_text",)),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", ("qwen2_5_vl_text",)),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", ("qwen3_vl_text",)),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", ("qwen3_vl_moe_text",)),
    "llama4": ("Llama4ForConditionalGeneration", ("llama4_text",)),
}
UNCAPPED = ("gemma3",)  # in transformers 5.23 the whole model has no soft cap of the logits, unlike its text model
FLAT = ("qwen2_vl", "qwen2_5_vl")  # published files have the keys of the text part beside those of the others
OF_IMAGES = (
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "vision_token_id",
)  # fmt: skip
OF_ROOT = {"qwen3_vl_moe": "tie_word_embeddings"}  # keys of the whole model only; its text part has a default in files
TEXT = "text_config"
SCORED = ("gemma3", "qwen3_5")  # of which transformers 5.23 has models with a score in place of the head
TEXT_ROOT = "model."  # of the names of a model of text
IN_PEFT = "model.language_model."  # of those of the text part, for transformers 5, PEFT and vLLM
OTHERS_IN_PEFT = {"llama4": "language_model.model."}
SHARED = ("tie_word_embeddings", "quantization_config")  # keys that the whole model may have for its text part
# Llama's prefix → that in the checkpoint, as published and as transformers 5 names modules.
_LAYOUTS: tuple[Mapping[str, str], ...] = (
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.": "model.language_model.", "lm_head.": "lm_head."},
    {"model.": "model.", "lm_head.": "lm_head."},
)


def text_part(raw: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the config.json of the text part, and the model_type of the whole ("" for a model of text only).

    >>> raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"hidden_size": 8}}
    >>> text_part(raw)
    ({'hidden_size': 8, 'architectures': ['Gemma3ForCausalLM'], 'model_type': 'gemma3_text'}, 'gemma3')
    """
    architectures, text = raw.get("architectures"), raw.get(TEXT)
    flat = text is None
    names = architectures if isinstance(architectures, list) else []
    wrapper = next((name for name, (architecture, _) in WRAPPERS.items() if architecture in names), "")
    if not names and isinstance(raw.get("model_type"), str) and raw["model_type"] in WRAPPERS:
        wrapper = raw["model_type"]
    if flat and wrapper in FLAT:
        text = {key: value for key, value in raw.items() if key not in (*OF_IMAGES, "architectures", "model_type")}
    if not wrapper or not isinstance(text, dict):
        return dict(raw), ""
    if wrapper in OF_ROOT:
        text = text | {OF_ROOT[wrapper]: raw.get(OF_ROOT[wrapper], False)}
    families = WRAPPERS[wrapper][1]
    family = text.get("model_type", families[0])
    shared = {key: raw[key] for key in SHARED if raw.get(key) is not None and text.get(key) is None}
    fallback = [FAMILIES[family].architectures[0]] if family in families else [str(family)]
    names = (text.get("architectures") if family in families else None) or fallback
    return text | shared | {"architectures": names, "model_type": family}, wrapper


def auto_class(wrapper: str, *, scored: bool = False) -> str:
    """The class of transformers that loads a model as it is published.

    Args:
        wrapper: model_type of a multimodal model ("": it has text only).
        scored: whether an adapter has a score in place of the head.
    """
    if scored:
        return "AutoModelForSequenceClassification"
    return "AutoModelForImageTextToText" if wrapper else "AutoModelForCausalLM"


def root_in_peft(wrapper: str) -> str:
    """What transformers 5, PEFT and vLLM call the "model." of a multimodal model's text part."""
    return OTHERS_IN_PEFT.get(wrapper, IN_PEFT)


def loads_whole(wrapper: str, *, scored: bool) -> bool:
    """Whether a class of transformers loads a multimodal model with what an adapter needs; if not, its text part."""
    return bool(wrapper) and (not scored or wrapper in SCORED)


def names_in_file(
    family: Family, wrapper: str, names: Collection[str], stored: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Finds the tensors of a model of text in a checkpoint, see `stored_names`; an older one may lack `family.root`."""
    if wrapper:
        return stored_names(names, stored)
    older = family.root and not any(name.startswith(family.root) for name in stored)
    return {name: name.removeprefix(family.root) if older else name for name in names}, []


def stored_names(names: Collection[str], stored: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Finds the tensors of the text part in a checkpoint of the whole model.

    Args:
        names: of the text part's tensors, by Llama's names.
        stored: of the checkpoint.

    Returns:
        Llama's name → name in the checkpoint, and the names of the other parts, which are left out.

    >>> stored_names(["model.norm.weight"], ["language_model.model.norm.weight", "vision_tower.x"])
    ({'model.norm.weight': 'language_model.model.norm.weight'}, ['vision_tower.x'])
    """

    def renamed(layout: Mapping[str, str]) -> dict[str, str]:
        return {
            name: next((new + name.removeprefix(old) for old, new in layout.items() if name.startswith(old)), name)
            for name in names
        }

    layout = max(_LAYOUTS, key=lambda layout: len({*renamed(layout).values()} & {*stored}))
    return renamed(layout), [name for name in stored if not name.startswith(tuple(layout.values()))]
