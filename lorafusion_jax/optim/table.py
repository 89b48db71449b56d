"""Table of the optimizers, built from optax. Imports jax and optax on use: planning needs names, options and sizes.

To add one, add a row to the table. Other packages can install an entry point of the group `lorafusion_jax.optimizers`
that loads an `Optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
        elementwise: what it does to a number depends on that number, its gradient and its state alone, in leaves of any
            shape. Then all leaves are stepped as one array, which compiles much faster.

    Example:
        >>> sorted(OPTIMIZERS["adamw"].options)
        ['b1', 'b2', 'eps']
    """

    build: Callable[[Any, Any, Mapping[str, Any]], Any]
    states_per_weight: float
    options: Mapping[str, float] = field(default_factory=dict)
    per_layer: bool = False
    elementwise: bool = False


def _adamw(lr: Any, weight_decay: Any, numbers: Mapping[str, Any]) -> Any:
    import optax

    return optax.adamw(lr, b1=numbers["b1"], b2=numbers["b2"], eps=numbers["eps"], weight_decay=weight_decay)


def _sgd(lr: Any, weight_decay: Any, numbers: Mapping[str, Any]) -> Any:
    import optax

    return optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(lr, momentum=numbers["momentum"]))


def _adafactor(lr: Any, weight_decay: Any, numbers: Mapping[str, Any]) -> Any:
    """Adafactor without momentum and without scaling by parameter norms, because B starts at zero and would stay zero.

    Weight decay is multiplied by the learning rate, as in the other optimizers here and in transformers' Adafactor.
    optax's `weight_decay_rate` is not.
    """
    import optax

    del numbers  # unused
    return optax.adafactor(lr, multiply_by_parameter_scale=False, weight_decay_rate=lr * weight_decay)


def _lion(lr: Any, weight_decay: Any, numbers: Mapping[str, Any]) -> Any:
    import optax

    return optax.lion(lr, b1=numbers["b1"], b2=numbers["b2"], weight_decay=weight_decay)


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(
        build=_adamw, states_per_weight=2, options={"b1": 0.9, "b2": 0.999, "eps": 1e-8}, elementwise=True
    ),
    "sgd": Optimizer(build=_sgd, states_per_weight=1, options={"momentum": 0.0}, elementwise=True),
    "adafactor": Optimizer(build=_adafactor, states_per_weight=1, per_layer=True),
    "lion": Optimizer(build=_lion, states_per_weight=1, options={"b1": 0.9, "b2": 0.99}, elementwise=True),
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
