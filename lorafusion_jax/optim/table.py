"""Table of the optimizers. Never imports jax, because planning needs names, options and state sizes.

To add one, add a row to the table. Other packages can install an entry point of the group `lorafusion_jax.optimizers`
that loads an `Optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lorafusion_jax.optim import builtin
from lorafusion_jax.plugins import find, not_known

GROUP = "lorafusion_jax.optimizers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One kind of optimizer.

    Args:
        build: (learning rate, weight decay, options) → `optax.GradientTransformation` over one adapter's arrays. The
            numbers may be traced, so do not branch on them. Gradients are already clipped by norm.
        options: the numbers of `optim` that it uses, with their defaults. The names b1, b2, eps and momentum are keys
            of `optim`; others are keys of `optim.options`.
        states_per_weight: float32 numbers that it stores per weight, for the memory plan.
        per_layer: treats every layer of a stacked leaf as a separate parameter. It is needed if a parameter's shape or
            norm matters, as in a factored second moment; elementwise optimizers do not need it.

    Example:
        >>> sorted(OPTIMIZERS["adamw"].options)
        ['b1', 'b2', 'eps']
    """

    build: Callable[[Any, Any, Mapping[str, Any]], Any]
    states_per_weight: float
    options: Mapping[str, float] = field(default_factory=dict)
    per_layer: bool = False


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(build=builtin.adamw, states_per_weight=2, options={"b1": 0.9, "b2": 0.999, "eps": 1e-8}),
    "sgd": Optimizer(build=builtin.sgd, states_per_weight=1, options={"momentum": 0.0}),
    "adafactor": Optimizer(build=builtin.adafactor, states_per_weight=1, per_layer=True),
    "lion": Optimizer(build=builtin.lion, states_per_weight=1, options={"b1": 0.9, "b2": 0.99}),
}


def optimizer(name: str) -> Optimizer:
    """Finds an optimizer by its name in a job file.

    Raises:
        ConfigError: `plugin.unknown`, `plugin.broken`.
    """
    return find(GROUP, OPTIMIZERS, name, Optimizer)


def unknown_optimizer(name: str) -> str | None:
    """Explains an unknown `optim.name`; None if the name exists."""
    return not_known(GROUP, OPTIMIZERS, name)
