"""What a user reads about modules that cannot carry LoRA, and about targets without a match."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lorafusion_jax.adapters.spec import ALL_LINEAR
from lorafusion_jax.errors import ConfigError, did_you_mean, first_few

_TABLE = re.compile(r"embed|token|pos(ition)?(_|$)|query$|probe", re.IGNORECASE)  # parameters that are no weights
_BIAS = re.compile(r"bias|^b(_|\d|$)|_b$", re.IGNORECASE)
type Refused = tuple[str, str, str]  # path, class and reason of a module


def describe_left_out(modules: Sequence[Refused]) -> str:
    """The text of a warning: modules without adapters by their reasons."""
    count = f"{len(modules)} layers" if len(modules) > 1 else "1 layer"
    verb = "have" if len(modules) > 1 else "has"
    lines = [f"  {paths}: {why}" for paths, why in by_reason(modules)]
    return f"{count} that the targets match {verb} no adapters:\n" + "\n".join(lines)


def unknown_target(target: str, linear: Sequence[str], refused: Sequence[Refused]) -> ConfigError:
    """The error of a target that matches no layer: which layers there are, or why none of them was taken.

    Args:
        linear: paths of the layers that can carry LoRA.
        refused: other modules with weights.
    """
    names = sorted({path.rsplit(".", 1)[-1] for path in linear if path})
    all_names = {*names, *linear, ALL_LINEAR} if linear else set(names)
    near = did_you_mean(target, sorted(all_names - {target}), most=2)
    reasons = "; ".join(f"{paths}: {why}" for paths, why in by_reason(refused)[:4])
    if linear:
        return ConfigError(
            "lora.unknown-target",
            f"target '{target}' matches no linear layer of the model{f'; {near}' if near else '.'}",
            why=f"what it matches cannot carry LoRA: {reasons}" if reasons and target != ALL_LINEAR else "",
            fix=f"targets: {ALL_LINEAR}   or some of [{', '.join(names)}]",
        )
    lines = [why.partition("say so with ")[2] for _, _, why in refused if "say so with " in why]
    return ConfigError(
        "lora.unknown-target",
        f"target '{target}' matches no layer that can carry LoRA: the model has none.",
        why=f"these modules have weights, but {reasons}" if reasons else "it has no module with a weight",
        fix=lines[0] if lines else "",
    )


def all_excluded(target: str, paths: Sequence[str]) -> ConfigError:
    """The error of a target whose every match is excluded."""
    message = f"target '{target}' matches only what exclude takes out."
    return ConfigError("lora.unknown-target", message, where=first_few(paths, 4), fix="exclude less")


def plausible_weights(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Names of a module's matrices that may be weights of products: no tokens, positions or embeddings."""
    return [name for name, shape in without_biases(shapes).items() if 1 not in shape and not _TABLE.search(name)]


def without_biases(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Leaves out biases of several axes: with the last axes of another matrix, or called so and with some of its axes.

    >>> without_biases({"w": (8, 2, 4), "b": (8, 4), "offset": (2, 4), "bias_v": (3, 3)})
    {'w': (8, 2, 4), 'bias_v': (3, 3)}
    """

    def is_bias(name: str) -> bool:
        sizes = [size for size in shapes[name] if size != 1]
        called_so = bool(_BIAS.search(name))
        return any(
            len(sizes) < len(shape)
            and (list(shape[-len(sizes) :]) == sizes or (called_so and _is_in_order(sizes, shape)))
            for other, shape in shapes.items()
            if other != name and sizes
        )

    return {name: shape for name, shape in shapes.items() if not is_bias(name)}


def _is_in_order(sizes: Sequence[int], shape: Sequence[int]) -> bool:
    axes = iter(shape)
    return all(size in axes for size in sizes)


def by_reason(modules: Sequence[Refused]) -> list[tuple[str, str]]:
    """Groups modules by class and reason: ("first.path and 5 more (Class)", reason)."""
    groups: dict[tuple[str, str], list[str]] = {}
    for path, kind, why in modules:
        groups.setdefault((kind, why), []).append(path)
    return [(f"{first_few(paths, 1)} ({kind})", why) for (kind, why), paths in groups.items()]
