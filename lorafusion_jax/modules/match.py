"""Matches the targets of adapters with the modules of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from flax import linen, nnx

from lorafusion_jax.adapters.spec import ALL_LINEAR
from lorafusion_jax.errors import ConfigError, LoraFusionError, raise_all
from lorafusion_jax.modules.linear import Linear, linear_of, weight_names
from lorafusion_jax.modules.product import unsupported_linear
from lorafusion_jax.modules.tree import Path, dotted, walk
from lorafusion_jax.modules.unmatched import Refused, all_excluded, by_reason, plausible_weights, unknown_target

HEADS = ("head", "lm_head", "logits", "classifier")  # last part of a head's path in a model without vocabulary
_LAYER = re.compile(r".*_\d+")
EXPERTS = "a weight for each expert: all-linear leaves it out, name it to adapt each expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A module of a model that holds a weight.

    Args:
        path: its first path.
        linear: its product; a text if it cannot carry LoRA; None if it is not a known linear layer.
        is_head: whether it is an output head, which "all-linear" leaves out.
    """

    path: Path
    module: nnx.Module
    linear: Linear | str | None
    is_head: bool = False

    @property
    def unsupported_reason(self) -> str:
        """Why the module cannot carry LoRA."""
        if is_experts(self):
            return EXPERTS
        return self.linear if isinstance(self.linear, str) else unknown_class(self.module)

    @property
    def refused(self) -> Refused:
        return dotted(self.path), own_class_name(self.module), self.unsupported_reason


def check_model(model: object) -> None:
    """Checks that a model is one of NNX.

    Raises:
        ConfigError: `lora.model`.
    """
    if isinstance(model, nnx.Module):
        return
    name = type(model).__name__
    if isinstance(model, linen.Module):
        fix = "lora = LinenLoRA(specs, targets=…); adapters = lora.init(model, variables, x)"
        raise ConfigError("lora.model", f"{name} is a Linen module, and this function takes NNX models.", fix=fix)
    fix = "the nnx.Module itself; nnx.Dict(…) or nnx.List(…) around several" if isinstance(model, dict | list) else ""
    raise ConfigError("lora.model", f"a model must be an nnx.Module, not a {name}.", fix=fix or "the nnx.Module itself")


def find_candidates(model: nnx.Module, heads: Sequence[str] | None = None) -> list[Candidate]:
    """Lists the modules with a weight of two or more axes, once per path."""
    candidates = [
        Candidate(path=path, module=module, linear=linear_of(module))
        for path, module in walk(model)
        if weight_names(module) or linear_of(module) is not None or isinstance(module, nnx.bridge.ToNNX)
    ]
    normed = {
        id(inner): f"{type(module).__name__} computes its weight before each call"
        for _, module in walk(model)
        if isinstance(module, nnx.WeightNorm | nnx.SpectralNorm)
        for _, inner in walk(module.layer_instance)
    }
    candidates = [
        replace(candidate, linear=normed.get(id(candidate.module), candidate.linear)) for candidate in candidates
    ]
    layers = [
        (candidate.path, candidate.linear.out_features, bool(candidate.linear.stack))
        for candidate in candidates
        if isinstance(candidate.linear, Linear)
    ]
    tables = [
        tuple(getattr(candidate.module, name).shape) for candidate in candidates for name in _tables(candidate.module)
    ]
    paths = find_heads(layers, tables, heads)
    return [replace(candidate, is_head=candidate.path in paths) for candidate in candidates]


def find_targets(
    model: nnx.Module,
    targets: Mapping[str, Sequence[str]],
    *,
    allow_partial: bool = False,
    heads: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
) -> tuple[dict[Path, tuple[Candidate, tuple[str, ...]]], list[Candidate]]:
    """Finds the layers that adapters target.

    Args:
        model: any NNX model.
        targets: adapter name → its targets; each is "all-linear", a name ("q_proj", "attn.query"), a glob
            ("decoder.*.mlp.*") or a regular expression of whole dotted paths.
        allow_partial: accept a name that is present in some layers only. "all-linear" may be.
        heads: see `find_heads`.
        exclude: names, globs or regular expressions of layers that no target reaches.

    Returns:
        First path → (layer, names of the adapters that target it), in the order of the model; and the modules that a
        pattern matched but that cannot carry LoRA.

    Raises:
        ConfigError: all problems: `lora.unknown-target`, `lora.partial-target`, `lora.unsupported-linear`.
    """
    everything = find_candidates(model, heads)
    candidates = [candidate for candidate in everything if not _is_excluded(candidate, exclude)]
    errors = unknown_names("exclude", exclude, [dotted(candidate.path) for candidate in everything])
    errors += unknown_names("heads", heads or (), [dotted(candidate.path) for candidate in everything])
    left_out: dict[Path, Candidate] = {}
    hits: dict[str, list[Path]] = {}
    for target in dict.fromkeys(target for names in targets.values() for target in names):
        matched = [candidate for candidate in candidates if matches(target, candidate)]
        able = [candidate for candidate in matched if isinstance(candidate.linear, Linear)]
        unable = [candidate for candidate in matched if not isinstance(candidate.linear, Linear)]
        is_name = any(_is_called(candidate.path, target) for candidate in candidates)  # rather than a pattern
        if unable and (is_name or (not able and target != ALL_LINEAR)):
            refused = [candidate.refused for candidate in unable]
            fix = f"exclude={[path for path, _, _ in refused]}" if able else "leave it out of targets"
            errors += [unsupported_linear(where, why, fix) for where, why in by_reason(refused)]
            continue
        left_out |= {candidate.path: candidate for candidate in unable}
        if target == ALL_LINEAR:
            left_out |= {candidate.path: candidate for candidate in candidates if is_experts(candidate)}
        hits[target] = [candidate.path for candidate in able]
        excluded = [
            dotted(candidate.path)
            for candidate in everything
            if _is_excluded(candidate, exclude) and matches(target, candidate)
        ]
        errors += _problems(target, hits[target], candidates, allow_partial, excluded)
    adapted = {path for paths in hits.values() for path in paths}
    errors += _shared_weights(everything, lambda candidate: candidate.path in adapted)
    raise_all(errors)
    targeted: dict[int, tuple[Candidate, set[str]]] = {}
    for candidate in candidates:
        target_names = {
            name for name, names in targets.items() if any(candidate.path in hits[target] for target in names)
        }
        if target_names:
            targeted.setdefault(id(candidate.module), (candidate, set()))[1].update(target_names)
    order = list(targets)
    return {
        candidate.path: (candidate, tuple(sorted(target_names, key=order.index)))
        for candidate, target_names in targeted.values()
    }, list(left_out.values())


def unknown_names(argument: str, names: Sequence[str], paths: Sequence[str]) -> list[LoraFusionError]:
    """Reports names of an argument that match none of the paths of modules with weights."""
    return [
        ConfigError(
            "lora.unknown-target", f"{argument} '{name}' matches no module with a weight.", fix=f"some of {list(paths)}"
        )
        for name in names
        if not any(name_matches(name, path) for path in paths)
    ]


def _is_excluded(candidate: Candidate, exclude: Sequence[str]) -> bool:
    return any(name_matches(name, dotted(candidate.path)) for name in exclude)


def check_owners(model: nnx.Module) -> None:
    """Checks that no weight with adapters belongs to several layers.

    Raises:
        ConfigError: `lora.shared-weight`.
    """
    raise_all(_shared_weights(find_candidates(model), lambda candidate: hasattr(candidate.module, "lora_plan")))


def _shared_weights(
    candidates: Sequence[Candidate], has_adapters: Callable[[Candidate], bool]
) -> list[LoraFusionError]:
    """Reports weights with adapters that other modules hold, too. One module at several paths is one owner."""
    owners: dict[int, dict[int, Candidate]] = {}
    for candidate in candidates:
        for variable in _variables(candidate.module):
            owners.setdefault(id(variable), {}).setdefault(id(candidate.module), candidate)
    errors: dict[tuple[str, ...], LoraFusionError] = {}
    for modules in owners.values():
        if len(modules) < 2 or not any(has_adapters(candidate) for candidate in modules.values()):
            continue
        paths = tuple(dotted(candidate.path) for candidate in modules.values())
        errors[paths] = ConfigError(
            "lora.shared-weight",
            "these layers hold one weight, and each of them would have adapters of its own.",
            where=", ".join(path or "the model itself" for path in paths),
            why="merged, the adapters of all would be added to that weight",
            fix=f"exclude={list(filter(None, paths))}, share the whole layer, or give each its own weight",
        )
    return list(errors.values())


def _variables(module: nnx.Module) -> list[nnx.Variable]:
    plan = getattr(module, "lora_plan", None)
    names = weight_names(module) if plan is None else [plan.linear.weight]
    return [getattr(module, name) for name in names if hasattr(module, name)]  # adapters of Linen hold no weights


def matches(target: str, candidate: Candidate) -> bool:
    """Whether a target matches a module. "all-linear" excludes output heads and Flax's non-linear modules."""
    if target == ALL_LINEAR:
        if candidate.is_head or is_experts(candidate):
            return False
        return candidate.linear is not None or bool(_plausible(candidate.module))
    return name_matches(target, dotted(candidate.path))


def name_matches(target: str, name: str) -> bool:
    """Whether a name, glob or regular expression matches a dotted path."""
    if name == target or name.endswith(f".{target}") or fnmatchcase(name, target):
        return True
    pattern = _pattern(target)
    return pattern is not None and pattern.fullmatch(name) is not None


def is_experts(candidate: Candidate) -> bool:
    """Whether a layer has a weight for each expert: it takes LoRA if a target names it."""
    return isinstance(candidate.linear, Linear) and candidate.linear.experts > 0


def unknown_class(module: nnx.Module) -> str:
    """Describes why a module is not known to be linear."""
    name = own_class_name(module)
    if isinstance(module, nnx.bridge.ToNNX):
        linen_name = type(module.to_nnx__module).__name__
        return f"it holds the Linen module {linen_name}, whose layers are known only while it runs: see LinenLoRA"
    if is_embedding(module):
        return "an embedding"
    if _is_flax(module):
        return f"an nnx.{name} is not a product with a weight"
    weights = _plausible(module)
    if not weights:
        return f"its {', '.join(weight_names(module))} is no weight of a product"
    if len(weights) > 1:
        return f"it holds several weights ({', '.join(weights)}); LoRA needs a module for each"
    if any(isinstance(child, nnx.Module) for child in vars(module).values()):
        return f"its own code uses its {weights[0]}; LoRA needs a module for it"
    return f"not known to be linear; if it is, say so with {_line(name, weights[0], getattr(module, weights[0]).ndim)}"


def _line(name: str, weight: str, ndim: int) -> str:
    letters = f"k{'hijlmn'[1 - ndim :]}"
    return f"register_linear({name}, weight='{weight}', equation='...k,{letters}->...{letters[1:]}')"


def _plausible(module: nnx.Module) -> list[str]:
    """Names of parameters that may be weights of products: no tables, class tokens or positions."""
    if isinstance(module, nnx.bridge.ToNNX):
        return ["to_nnx__module"]
    if _is_flax(module) or is_embedding(module):
        return []
    return plausible_weights({name: getattr(module, name).shape for name in weight_names(module)})


def _tables(module: nnx.Module) -> list[str]:
    return weight_names(module) if is_embedding(module) else []


def own_class_name(module: nnx.Module) -> str:
    """Name of a module's class before its product was exchanged."""
    return getattr(type(module), "lora_class", type(module)).__name__


def _is_flax(module: nnx.Module) -> bool:
    return type(module).__module__.startswith("flax.")


@cache
def _pattern(target: str) -> re.Pattern[str] | None:
    try:
        return re.compile(target)
    except re.error:
        return None  # a glob such as "*.up"


def _problems(
    target: str, hits: list[Path], candidates: list[Candidate], allow_partial: bool, excluded: list[str]
) -> list[LoraFusionError]:
    if excluded and not hits:
        return [all_excluded(target, excluded)]
    if not hits:
        able = [dotted(candidate.path) for candidate in candidates if isinstance(candidate.linear, Linear)]
        return [
            unknown_target(
                target,
                able,
                [candidate.refused for candidate in candidates if not isinstance(candidate.linear, Linear)],
            )
        ]
    missing = (
        []
        if allow_partial or target == ALL_LINEAR
        else _layers_without(hits, [candidate.path for candidate in candidates])
    )
    if not missing:
        return []
    return [
        ConfigError(
            "lora.partial-target",
            f"target '{target}' is present in some layers only.",
            where="not in " + ", ".join(missing),
            fix="allow_partial=True if that is meant",
        )
    ]


def _layers_without(hits: list[Path], paths: list[Path]) -> list[str]:
    """Lists the layers (items of a container) that lack a target which other layers have."""
    missing: dict[str, None] = {}
    for path in hits:
        for depth, part in enumerate(path[:-1]):
            if not isinstance(part, int):
                continue
            container, path_within = path[:depth], path[depth + 1 :]
            numbers = {other[depth] for other in paths if len(other) > depth and other[:depth] == container}
            present = {hit[depth] for hit in hits if hit[:depth] == container and hit[depth + 1 :] == path_within}
            missing.update(
                dict.fromkeys(dotted((*container, number, *path_within)) for number in sorted(numbers - present))
            )
    return list(missing)


def find_heads(
    layers: Sequence[tuple[Path, int, bool]], tables: Sequence[tuple[int, ...]], named: Sequence[str] | None
) -> Collection[Path]:
    """Returns the paths of the output heads among linear layers.

    The named ones. If none are named, the last layer that is as wide as the vocabulary and outside of repeated layers;
    in a model without a vocabulary, layers with a usual name.

    Args:
        layers: path, out features, and whether it is a stack of layers.
        tables: shapes of the embedding tables. The longest one has the vocabulary.
        named: last parts of paths, or whole paths; empty for no head.
    """
    if named is not None:
        return {path for path, _, _ in layers if any(_is_called(path, name) for name in named)}
    vocabulary = max((shape[0] for shape in tables if len(shape) == 2), default=None)
    if vocabulary is None:
        return {path for path, _, _ in layers if path and path[-1] in HEADS}
    wide = [path for path, width, stacked in layers if width == vocabulary and not stacked and not _is_repeated(path)]
    return set(wide[-1:])


def is_embedding(module: Any) -> bool:
    """Whether a module is a table of embeddings, by Flax's classes or by the name of its class."""
    return isinstance(module, nnx.Embed | linen.Embed) or "embed" in type(module).__name__.lower()


def _is_called(path: Path, name: str) -> bool:
    return dotted(path) == name or dotted(path).endswith(f".{name}")


def _is_repeated(path: Path) -> bool:
    """Whether a path leads through a layer with a number."""
    return any(isinstance(part, int) or part.isdigit() or _LAYER.fullmatch(part) for part in path[:-1])
