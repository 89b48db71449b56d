"""What a PEFT folder says of its adapter, without reading its tensors: `lora.init_from` needs no other settings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lorafusion_jax.adapters.patterns import Patterns
from lorafusion_jax.adapters.table import BIASED, PLAIN, adapter_kind
from lorafusion_jax.errors import CheckpointError, LoraFusionError
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.multimodal import IN_PEFT, TEXT_ROOT
from lorafusion_jax.layout.layer import (
    BESIDE,
    BLOCK,
    EMBEDDING,
    EMBEDDINGS,
    GPT_2,
    LING,
    MIXER,
    MIXERS,
    PARALLEL,
    PATHS,
    PER_LAYER_NAMES,
    RENAMED,
    ROOTS,
    peft_path,
    saved_path,
)
from lorafusion_jax.peft.experts import our_key, targets_of, with_one_rank
from lorafusion_jax.peft.read_config import CONFIG_FILE, SAVED, Described, describe, kind_of, read_config
from lorafusion_jax.readable import check_regular

TENSOR_FILE = "adapter_model.safetensors"
ROOT = "base_model."
PREFIX = f"{ROOT}model.model."
_MODULES = dict.fromkeys((*(path.partition(".")[0] for path in PATHS.values() if "." in path), *MIXERS, BLOCK))
_IN_LAYER = "|".join(rf"{name}\." for name in (*BESIDE, PARALLEL, *_MODULES))  # longer ones first
_OF_LAYER = "|".join(rf"{name}\." for name in PER_LAYER_NAMES)  # projections without a module
_MATRICES = ("lora_A", "lora_B")  # they are modules with a weight; others are parameters
_IN_MEMORY = re.compile(r"\.((?:lora|vera)_\w+)\.default(\.weight)?$")
# The text part of a multimodal model, as transformers 5 and earlier versions name it.
_WHOLE = re.compile(
    rf"{re.escape(ROOT)}model\.((?:model\.)?language_model\.(?:model\.)?)(layers|embed_tokens|lm_head)\."
)
_EMBEDDING = re.compile(rf"({re.escape(PREFIX)})(?:{'|'.join(EMBEDDINGS.values())})(\.token_adapter\.)")
_PROJECTION = re.compile(rf"({re.escape(PREFIX)}layers\.\d{{1,6}}\.)(\w+\.\w+)(?=\.)")
KEY = re.compile(re.escape(PREFIX) + rf"(layers\.(\d{{1,6}})\.(?:{_IN_LAYER}|(?={_OF_LAYER}))(\w+))\.([\w.]+)")


def describe_folder(folder: Path, kind: str | None = None) -> Described:
    """Reads adapter_config.json and the names of the tensors.

    Args:
        kind: name of its adapter kind (None: the built-in kind that adapter_config.json describes).

    Raises:
        CheckpointError, ErrorList: see `read_config` and `describe`; `peft.damaged`.
    """
    raw = read_config(folder) | {SAVED: None}  # who reads the tensors checks it
    biased = kind == PLAIN and raw.get("lora_bias") is True
    kind = kind_of(raw) if kind is None else BIASED if biased else kind
    names = {leaf.peft_name for leaf in adapter_kind(kind).of_projections}
    paths, root = _projections(folder, names, targets_of(raw))
    raw = with_one_rank(raw, paths)
    return describe(raw, paths, folder.resolve().name, str(folder / CONFIG_FILE), kind=kind, root=root)


def has_score(folder: Path) -> bool:
    """Whether adapter_config.json says that the folder holds a score of texts."""
    try:
        saved = read_config(folder).get(SAVED)
    except CheckpointError:
        return False
    return isinstance(saved, list) and "score" in saved


def plain_name(key: str) -> str:
    """The name of a tensor in a folder, from its name in memory, which other programs write and PEFT reads, too.

    >>> plain_name("layers.0.self_attn.q_proj.lora_A.default.weight")
    'layers.0.self_attn.q_proj.lora_A.weight'
    >>> plain_name("layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight")
    'layers.0.self_attn.q_proj.lora_magnitude_vector'
    """

    def of_folder(match: re.Match[str]) -> str:
        return f".{match[1]}{(match[2] or '') if match[1] in _MATRICES else ''}"

    return _IN_MEMORY.sub(of_folder, key)


def text_name(key: str) -> tuple[str, str]:
    """The name of a tensor in a folder of the text part alone, and what PEFT calls the text part's "model.".

    >>> text_name("base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight")
    ('base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight', 'model.language_model.')
    """
    match = _WHOLE.match(key)
    if match is None:
        for root in dict.fromkeys(ROOTS.values()):
            if key.startswith(f"{ROOT}model.{root}"):
                inside = f"{PREFIX}{key.removeprefix(f'{ROOT}model.{root}')}"
                return _our_embedding(_our_projection(inside, root)), root
        return _our_embedding(_our_projection(key, TEXT_ROOT)), TEXT_ROOT
    part = "lm_head" if match[2] == "lm_head" else f"{TEXT_ROOT}{match[2]}"
    return f"{ROOT}model.{part}.{key[match.end() :]}", match[1]


def _our_projection(key: str, root: str) -> str:
    """The name of a tensor with our name of the projection, which others of its family or another have, too."""
    name_of = {path: name for name, path in RENAMED.items() if ROOTS.get(name, TEXT_ROOT) == root}
    key = key.replace(f"{PREFIX}h.", f"{PREFIX}layers.", 1) if root == GPT_2 else key
    match = _PROJECTION.match(key)
    if match is None or match[2] not in name_of:
        return key
    module = match[2].partition(".")[0]
    return f"{match[1]}{module}.{name_of[match[2]]}{key[match.end() :]}"


def _our_embedding(key: str) -> str:
    return _EMBEDDING.sub(rf"\g<1>{EMBEDDING}\g<2>", key)


def embedding_in_peft(paths: Iterable[str]) -> str:
    """What PEFT calls the embedding of a model with these projections.

    >>> embedding_in_peft(["layers.0.attention.dense"]), embedding_in_peft(["layers.0.mlp.up_proj"])
    ('embed_in', 'embed_tokens')
    """
    paths = list(paths)
    in_mixers = any(path.split(".")[2:3] == [MIXER] for path in paths)
    of_ling = any(path.rpartition(".")[2].startswith(LING) for path in paths)
    return EMBEDDINGS.get(MIXER if in_mixers else LING if of_ling else root_for(paths), EMBEDDING)


def whole_name(key: str, root: str = IN_PEFT, embedding: str = EMBEDDING) -> str:
    """The name of a tensor in a folder for a multimodal model, or of another root; the inverse of `text_name`.

    Args:
        embedding: name of the embedding there.

    >>> whole_name("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    'base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    if not key.startswith(PREFIX):
        return key
    inside = key.removeprefix(PREFIX)
    inside = f"{embedding}{inside.removeprefix(EMBEDDING)}" if inside.startswith(f"{EMBEDDING}.") else inside
    if match := KEY.fullmatch(key):
        inside = f"{peft_path(match[1])}.{match[4]}"
    return f"{ROOT}model.{root}{inside}"


def root_for(paths: Iterable[str]) -> str:
    """What PEFT calls the text part's "model." in a model with these projections."""
    return next((root for path in paths if (root := ROOTS.get(path.rpartition(".")[2]))), TEXT_ROOT)


def root_of(keys: Iterable[str]) -> str:
    """What a folder calls the text part's "model."."""
    return next((root for key in keys if (root := text_name(key)[1]) != TEXT_ROOT), TEXT_ROOT)


def lora_settings(folder: Path, kind: str | None = None, model: ModelConfig | None = None) -> dict[str, Any]:
    """The `lora` settings that a folder brings along; none where it cannot be read, which its readers will say.

    Args:
        model: base model of the job. Projections that the folder lets out by an expression or by whole paths are then
            let out by `layers_to_transform` and `exclude`.
    """
    try:
        described = describe_folder(folder, kind)
    except (LoraFusionError, OSError, ValueError):  # names that no system takes are ValueErrors
        return {}
    spec = described.spec
    settings = {"rank": spec.rank, "targets": list(spec.targets)}
    settings |= {"lora_bias": True} if spec.kind == BIASED and kind in (None, PLAIN) else {}
    settings |= {"dropout": 0.0} if spec.on_experts else {}  # the default is above
    settings |= {} if spec.patterns is None else _pattern_settings(spec.patterns)
    settings |= {} if model is None or not described.some_layers else _let_out(described, model)
    settings |= {} if spec.tokens is None else {"trainable_tokens": spec.tokens.peft}
    return settings | ({"alpha": spec.alpha, "rslora": spec.rslora} if described.has_scale else {})


def _pattern_settings(patterns: Patterns) -> dict[str, Any]:
    exclude = patterns.exclude if isinstance(patterns.exclude, str) else list(patterns.exclude)
    return {
        "rank": patterns.rank,
        "rank_pattern": dict(patterns.ranks),
        "alpha_pattern": dict(patterns.alphas),
        "layers_to_transform": None if patterns.layers is None else list(patterns.layers),
        "exclude": exclude,
    }


def _let_out(described: Described, model: ModelConfig) -> dict[str, Any]:
    """Settings of an adapter that has no tensors for some of the projections that its targets and patterns name."""
    every = [
        f"layers.{layer}.{saved_path(linear.path)}"
        for linear in model.linears
        if linear.name in described.spec.targets
        for layer in model.layers_with(linear.path)
    ]
    if all(path in described.ranks for path in every if described.spec.has(path)):
        patterns = described.spec.patterns
        only_others = patterns is not None and all(replace(patterns, layers=None).has(path) for path in every)
        return {"exclude": []} if only_others else {}  # exclude_modules may name a tower only
    layers = sorted({_layer_of(path) for path in described.ranks})
    absent = [path for path in every if path not in described.ranks and _layer_of(path) in layers]
    return {"layers_to_transform": layers, "exclude": absent}


def _layer_of(path: str) -> int:
    return int(path.split(".")[1])


def _projections(folder: Path, names: Collection[str | None], experts: Sequence[str]) -> tuple[list[str], str]:
    file = folder / TENSOR_FILE
    try:
        check_regular(file)
        with safe_open(file, "np") as reader:
            keys = list(reader.keys())
        matches = [KEY.fullmatch(our_key(text_name(plain_name(key))[0], experts)) for key in keys]
        return list(dict.fromkeys(match[1] for match in matches if match and match[4] in names)), root_of(keys)
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(
            "peft.damaged", f"{TENSOR_FILE} cannot be read.", where=str(file), why=str(problem)
        ) from None
