"""Which modules of a model the targets of the adapters mean."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from flax import nnx
from jax import lax

from lorafusion_jax.errors import ConfigError, LoraFusionError, raise_all
from lorafusion_jax.modules.spec import ALL_LINEAR
from lorafusion_jax.modules.tree import Path, dotted, walk


def find_linears(
    model: nnx.Module,
    targets: Mapping[str, Sequence[str]],
    *,
    allow_partial: bool = False,
) -> dict[Path, tuple[nnx.Linear, tuple[str, ...]]]:
    """Finds the linear layers that adapters target.

    Args:
        model: any NNX model.
        targets: adapter name → its targets; each is "all-linear", a name ("q_proj", "attn.query") or a regular
            expression of whole dotted paths.
        allow_partial: accepts a target that is present in some layers only.

    Returns:
        first path → (layer, names of the adapters that target it), in the order of the model.

    Raises:
        ConfigError: all problems: `lora.unknown-target`, `lora.partial-target`, `lora.not-linear`.
    """
    modules = [(path, module) for path, module in walk(model)]
    linears = [(path, module) for path, module in modules if isinstance(module, nnx.Linear)]
    errors: list[LoraFusionError] = []
    hits: dict[str, list[Path]] = {}
    for target in dict.fromkeys(target for names in targets.values() for target in names):
        hits[target] = [path for path, _ in linears if _matches(target, path)]
        errors += _problems(target, hits[target], modules, allow_partial)
    found: dict[int, tuple[Path, nnx.Linear, set[str]]] = {}
    for path, linear in linears:
        wanted = {name for name, names in targets.items() if any(path in hits[target] for target in names)}
        if wanted:
            found.setdefault(id(linear), (path, linear, set()))[2].update(wanted)
    errors += [error for path, linear, _ in found.values() if (error := _refusal(path, linear))]
    raise_all(errors)
    return {
        path: (linear, tuple(name for name in targets if name in wanted)) for path, linear, wanted in found.values()
    }


def _matches(target: str, path: Path) -> bool:
    name = dotted(path)
    if target == ALL_LINEAR or name == target or name.endswith(f".{target}"):
        return True
    try:
        return re.fullmatch(target, name) is not None
    except re.error as problem:
        raise ConfigError(
            "lora.unknown-target", f"target '{target}' is neither a name nor a regular expression.", why=str(problem)
        ) from None


def _problems(
    target: str, hits: list[Path], modules: list[tuple[Path, nnx.Module]], allow_partial: bool
) -> list[LoraFusionError]:
    if not hits:
        others = [(path, module) for path, module in modules if path and _matches(target, path)]
        if others and target != ALL_LINEAR:
            path, module = others[0]
            return [
                ConfigError(
                    "lora.not-linear",
                    f"target '{target}' is a {type(module).__name__}; only nnx.Linear layers can carry LoRA.",
                    where=dotted(path),
                )
            ]
        names = sorted({str(path[-1]) for path, module in modules if path and isinstance(module, nnx.Linear)})
        return [
            ConfigError(
                "lora.unknown-target",
                f"target '{target}' matches no linear layer of the model.",
                why="" if names else "it has no nnx.Linear layer at all; is it an NNX module?",
                fix=f"targets: {ALL_LINEAR}   or some of [{', '.join(names)}]" if names else "",
            )
        ]
    missing = [] if allow_partial else _layers_without(hits, [path for path, _ in modules])
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
    """Lists the layers (members of a numbered container) that lack what their neighbours have."""
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


def _refusal(path: Path, linear: nnx.Linear) -> ConfigError | None:
    """Names what a layer does that the LoRA layer would not do."""
    why = ""
    if hasattr(linear, "lora_a"):
        why = "it already has adapters; give all of them in one call"
    elif type(linear).__call__ is not nnx.Linear.__call__:
        why = f"{type(linear).__name__} computes in its own way (it overrides __call__)"
    elif linear.kernel.ndim != 2:
        why = f"its kernel has {linear.kernel.ndim} dimensions (stacked by vmap or scan?)"
    elif linear.dot_general is not lax.dot_general or linear.precision is not None:
        why = "it sets its own dot_general or precision"
    elif getattr(linear, "preferred_element_type", None) is not None:
        why = "it sets preferred_element_type"
    return (
        ConfigError(
            "lora.unsupported-linear",
            "this layer cannot carry LoRA.",
            where=dotted(path),
            why=why,
            fix="leave it out of targets",
        )
        if why
        else None
    )
