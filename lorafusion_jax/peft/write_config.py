"""AdapterSpec → adapter_config.json, in PEFT's words; read_config.py reads it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from lorafusion_jax.adapters.kind import AdapterKind
from lorafusion_jax.adapters.patterns import Patterns
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.families.multimodal import IN_PEFT, TEXT_ROOT
from lorafusion_jax.layout.layer import EMBEDDING, GPT_2, peft_path
from lorafusion_jax.peft.experts import named_in_peft
from lorafusion_jax.peft.read_config import LORA, TRAINED_TOKENS, WEIGHT, dropout_key, peft_type
from lorafusion_jax.peft.settings import embedding_in_peft, root_for
from lorafusion_jax.weights.table import NONE

BY_PATH = (  # what names projections
    "target_modules", "target_parameters", "layers_to_transform", "exclude_modules", "rank_pattern", "alpha_pattern",
)  # fmt: skip


def config_of(
    spec: AdapterSpec,
    base_name: str,
    base_quantize: str = NONE,
    revision: str | None = None,
    paths: Collection[str] = (),
    multimodal: bool = False,
    root: str = IN_PEFT,
) -> dict[str, Any]:
    """Says in PEFT's words what an adapter is.

    Args:
        paths: its projections, "layers.0.self_attn.q_proj"; needed where a layer may have an MLP beside experts.
        multimodal: it is for a multimodal model, whose towers may have projections of the same names: the file lists
            the adapter's by their paths.
        root: what the multimodal model calls the text part's "model.".

    PEFT has no word for a base that was stored in another form. Where it was, `base_quantize` names the form; PEFT
    ignores keys that it does not know, with a warning.

    >>> config_of(AdapterSpec(name="law", rank=8, alpha=16), "org/base")["target_modules"][:2]
    ['q_proj', 'k_proj']
    """
    patterns = spec.patterns
    lets_out = patterns is not None and (patterns.layers is not None or bool(patterns.exclude))
    modules, parameters = named_in_peft(spec.targets, paths, lets_out=lets_out)
    config: dict[str, Any] = {} if base_quantize == NONE else {"base_quantize": base_quantize}
    config |= {
        "peft_type": LORA,
        "task_type": "CAUSAL_LM" if spec.head is None else spec.head.task,
        "base_model_name_or_path": base_name,
        "revision": revision,
        "r": spec.rank if spec.patterns is None else spec.patterns.rank,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": root_for(paths) == GPT_2,  # whose kernels are [in, out]
        "inference_mode": True,
        "modules_to_save": None if spec.head is None else spec.head.modules,
        "layers_to_transform": None,
        "layers_pattern": None,
        "auto_mapping": None,
    }
    if spec.tokens is not None:
        tokens = spec.tokens.peft
        names = {EMBEDDING: embedding_in_peft(paths)}
        renamed = isinstance(tokens, dict)
        config[TRAINED_TOKENS] = {names.get(k, k): ids for k, ids in tokens.items()} if renamed else tokens
    if spec.patterns is not None:
        config |= _some_projections(spec.patterns)
    kind = adapter_kind(spec.kind)
    more = _usual_settings(spec, kind) | (_of_lora() if peft_type(kind) == LORA else {})
    if parameters:
        more |= {"target_parameters": parameters, dropout_key(kind): 0.0}
    entries = (kind.peft or {}).items()
    config |= more | {key: value(spec) if callable(value) else value for key, value in entries}
    root = root if multimodal else root_for(paths)
    config |= _one_by_one(spec, config, paths, root) if names_each(spec, paths, multimodal) else {}
    return config | _of_parameters(spec, config, paths, root)


def names_each(spec: AdapterSpec, paths: Collection[str], multimodal: bool) -> bool:
    """Whether a file names each projection by its path: those of a multimodal model, whose towers may have projections
    of the same names, and those of a text part whose patterns speak of the whole model."""
    patterns = spec.patterns
    if multimodal or patterns is None:
        return multimodal
    in_text = replace(patterns, roots=(TEXT_ROOT,))
    exclude = (patterns.exclude,) if isinstance(patterns.exclude, str) else patterns.exclude
    return any("language_model" in name for name in exclude) or any(
        (patterns.rank_of(path), patterns.alpha_of(path)) != (in_text.rank_of(path), in_text.alpha_of(path))
        for path in paths
    )


def _one_by_one(spec: AdapterSpec, config: Mapping[str, Any], paths: Collection[str], root: str) -> dict[str, Any]:
    """Settings that name each projection by its path, in place of names and patterns."""
    full_paths = {path: f"{root}{peft_path(path)}" for path in paths}
    ends = tuple(f".{name}" for name in config["target_modules"])
    modules = [path for path in full_paths.values() if f".{path}".endswith(ends)]
    weights = {f"{path}.weight" for path in full_paths.values()}
    parameters = [
        full
        for name in config.get("target_parameters") or []
        for full in (sorted(path for path in weights if path.endswith(f".{name}")) or [name])
    ]
    ranks = {full_paths[path]: rank for path in paths if (rank := spec.rank_at(path)) != config["r"]}
    alphas = {} if spec.patterns is None else {full_paths[path]: spec.patterns.alpha_of(path) for path in paths}
    alphas = {path: alpha for path, alpha in alphas.items() if alpha != spec.alpha}
    settings = {"target_modules": modules, "layers_to_transform": None, "exclude_modules": None}
    settings |= {"target_parameters": parameters} if parameters else {}
    return settings | ({"rank_pattern": ranks, "alpha_pattern": alphas} if "rank_pattern" in config else {})


def _of_parameters(spec: AdapterSpec, config: Mapping[str, Any], paths: Collection[str], root: str) -> dict[str, Any]:
    """Patterns that reach MLPs beside experts, too: PEFT compares the name of a parameter, "….up_proj.weight"."""
    targets = [f".{name}" for name in config.get("target_parameters") or [] if name.endswith(WEIGHT)]
    trained = [path for path in paths if f".{root}{path}{WEIGHT}".endswith(tuple(targets))]
    if spec.patterns is None or not trained or "rank_pattern" not in config:
        return {}
    numbers = {"rank_pattern": spec.rank_at, "alpha_pattern": spec.patterns.alpha_of}
    return {
        key: {f"{path}{WEIGHT}": number_at(path) for path in trained if config[key]} | config[key]
        for key, number_at in numbers.items()
    }


def _some_projections(patterns: Patterns) -> dict[str, Any]:
    exclude = patterns.exclude if isinstance(patterns.exclude, str) else list(patterns.exclude)
    return {
        "layers_to_transform": None if patterns.layers is None else list(patterns.layers),
        "exclude_modules": exclude or None,
    }


def _usual_settings(spec: AdapterSpec, kind: AdapterKind) -> dict[str, Any]:
    """What every kind of adapter may have, of whatever type: without it a folder would have another scale."""
    settings: dict[str, Any] = {dropout_key(kind): spec.dropout}
    if kind.alpha_matters:
        alpha = int(spec.alpha) if float(spec.alpha).is_integer() else spec.alpha
        settings |= {"lora_alpha": alpha, "use_rslora": spec.rslora}
    if kind.scaled or peft_type(kind) == LORA:
        patterns = spec.patterns
        settings["rank_pattern"] = {} if patterns is None else dict(patterns.ranks)
        settings["alpha_pattern"] = {} if patterns is None else dict(patterns.alphas)
    return settings


def _of_lora() -> dict[str, Any]:
    return {"init_lora_weights": True, "use_dora": False}
