"""The optimizers that this package brings, as optax has them. optax is imported on use: planning does without jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

type Numbers = Mapping[str, Any]


def adamw(lr: Any, weight_decay: Any, numbers: Numbers) -> Any:
    import optax

    return optax.adamw(lr, b1=numbers["b1"], b2=numbers["b2"], eps=numbers["eps"], weight_decay=weight_decay)


def sgd(lr: Any, weight_decay: Any, numbers: Numbers) -> Any:
    import optax

    return optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(lr, momentum=numbers["momentum"]))


def adafactor(lr: Any, weight_decay: Any, numbers: Numbers) -> Any:
    """Without momentum and without scaling by the parameter: B starts at zero, and scaling would keep it there.

    The decay is multiplied by the learning rate, as in every other optimizer here and in transformers' Adafactor;
    optax's own `weight_decay_rate` is a share per step.
    """
    import optax

    del numbers  # unused
    return optax.adafactor(lr, multiply_by_parameter_scale=False, weight_decay_rate=lr * weight_decay)


def lion(lr: Any, weight_decay: Any, numbers: Numbers) -> Any:
    import optax

    return optax.lion(lr, b1=numbers["b1"], b2=numbers["b2"], weight_decay=weight_decay)
