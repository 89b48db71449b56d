"""Matches the targets of adapters with the modules of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from flax import nnx

from lorafusion_jax.adapters.spec import ALL_LINEAR
from lorafusion_jax.errors import ConfigError, LoraFusionError, did_you_mean, first_few, raise_all
from lorafusion_jax.modules.linear import HEADS, Linear, linear_of, weight_names
from lorafusion_jax.modules.product import unsupported_linear
from lorafusion_jax.modules.tree import Path, dotted, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A module of a model that holds a weight.

    Args:
        path: its first path.
        linear: its product; a text if it cannot carry LoRA; None if it is not a known linear layer.
    """

    path: Path
    module: nnx.Module
    linear: Linear | str | None

    @property
    def is_head(self) -> bool:
        return bool(self.path) and self.path[-1] in HEADS

    @property
    def unsupported_reason(self) -> str:
        """Why the module cannot carry LoRA."""
        return self.linear if isinstance(self.linear, str) else unknown_class(self.module)


def find_places(model: nnx.Module) -> list[Place]:
    """Lists the modules with a weight of two or more axes, once per path."""
    return [
        Place(path=path, module=module, linear=linear_of(module))
        for path, module in walk(model)
        if weight_names(module) or linear_of(module) is not None
    ]


def find_targets(
    model: nnx.Module, targets: Mapping[str, Sequence[str]], *, allow_partial: bool = False
) -> tuple[dict[Path, tuple[Place, tuple[str, ...]]], list[Place]]:
    """Finds the layers that adapters target.

    Args:
        model: any NNX model.
        targets: adapter name → its targets; each is "all-linear", a name ("q_proj", "attn.query"), a glob
            ("decoder.*.mlp.*") or a regular expression of whole dotted paths.
        allow_partial: accept a target that is present in some layers only.

    Returns:
        First path → (layer, names of the adapters that target it), in the order of the model; and the modules that a
        pattern matched but that cannot carry LoRA.

    Raises:
        ConfigError: all problems: `lora.unknown-target`, `lora.partial-target`, `lora.unsupported-linear`.
    """
    places = find_places(model)
    errors: list[LoraFusionError] = []
    left_out: dict[Path, Place] = {}
    hits: dict[str, list[Path]] = {}
    for target in dict.fromkeys(target for names in targets.values() for target in names):
        matched = [place for place in places if matches(target, place)]
        able = [place for place in matched if isinstance(place.linear, Linear)]
        unable = [place for place in matched if not isinstance(place.linear, Linear)]
        if unable and (_is_name(target, places) or (not able and target != ALL_LINEAR)):
            errors += [unsupported_linear(where, why) for why, where in by_reason(unable).items()]
            continue
        left_out |= {place.path: place for place in unable}
        hits[target] = [place.path for place in able]
        errors += _problems(target, hits[target], places, allow_partial)
    raise_all(errors)
    found: dict[int, tuple[Place, set[str]]] = {}
    for place in places:
        wanted = {name for name, names in targets.items() if any(place.path in hits[target] for target in names)}
        if wanted:
            found.setdefault(id(place.module), (place, set()))[1].update(wanted)
    order = list(targets)
    return {place.path: (place, tuple(sorted(wanted, key=order.index))) for place, wanted in found.values()}, list(
        left_out.values()
    )


def matches(target: str, place: Place) -> bool:
    """Whether a target matches a module. "all-linear" excludes output heads and Flax's non-linear modules."""
    if target == ALL_LINEAR:
        if place.is_head:
            return False
        return place.linear is not None or not _is_flax(place.module)
    return name_matches(target, dotted(place.path))


def name_matches(target: str, name: str) -> bool:
    """Whether a name, glob or regular expression matches a dotted path."""
    if name == target or name.endswith(f".{target}") or fnmatchcase(name, target):
        return True
    pattern = _pattern(target)
    return pattern is not None and pattern.fullmatch(name) is not None


def by_reason(places: Sequence[Place]) -> dict[str, str]:
    """Groups places by the reason why they cannot carry LoRA: reason → "first.path and 5 more"."""
    reasons: dict[str, list[str]] = {}
    for place in places:
        reasons.setdefault(place.unsupported_reason, []).append(dotted(place.path))
    return {why: first_few(paths, 1) for why, paths in reasons.items()}


def unknown_class(module: nnx.Module) -> str:
    """Describes why a module is not known to be linear."""
    name = type(module).__name__
    if _is_flax(module):
        return f"an nnx.{name} is not a product with a weight"
    weights = weight_names(module)
    if len(weights) > 1:
        return f"{name} holds several weights ({', '.join(weights)}); LoRA needs a module for each"
    line = f"register_linear({name}, weight='{weights[0]}', equation=…)"
    return f"{name} is not known to be linear; if it is, say so with {line}"


def _is_flax(module: nnx.Module) -> bool:
    return type(module).__module__.startswith("flax.")


def _is_name(target: str, places: Sequence[Place]) -> bool:
    """Whether a target is the name of a module rather than a pattern."""
    return any(dotted(place.path) == target or dotted(place.path).endswith(f".{target}") for place in places)


@cache
def _pattern(target: str) -> re.Pattern[str] | None:
    try:
        return re.compile(target)
    except re.error:
        return None  # a glob such as "*.up"


def _problems(target: str, hits: list[Path], places: list[Place], allow_partial: bool) -> list[LoraFusionError]:
    if not hits:
        return [_unknown(target, [place.path for place in places if isinstance(place.linear, Linear)])]
    missing = [] if allow_partial else _layers_without(hits, [place.path for place in places])
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


def _unknown(target: str, paths: list[Path]) -> ConfigError:
    names = sorted({str(path[-1]) for path in paths if path})
    near = did_you_mean(target, sorted({*names, ALL_LINEAR, *map(dotted, paths)}), most=3)
    return ConfigError(
        "lora.unknown-target",
        f"target '{target}' matches no linear layer of the model{f'; {near}' if near else '.'}",
        why="" if names else "it has no linear layer of a known class; is it an NNX module? see register_linear",
        fix=f"targets: {ALL_LINEAR}   or some of [{', '.join(names)}]" if names else "",
    )


def _layers_without(hits: list[Path], paths: list[Path]) -> list[str]:
    """Lists the layers (items of a container) that lack a target which other layers have."""
    missing: dict[str, None] = {}
    for path in hits:
        for depth, part in enumerate(path[:-1]):
            if not isinstance(part, int):
                continue
            container, rest = path[:depth], path[depth + 1 :]
            numbers = {other[depth] for other in paths if len(other) > depth and other[:depth] == container}
            present = {hit[depth] for hit in hits if hit[:depth] == container and hit[depth + 1 :] == rest}
            missing.update(dict.fromkeys(dotted((*container, number, *rest)) for number in sorted(numbers - present)))
    return list(missing)
