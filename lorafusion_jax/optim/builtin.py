"""The built-in optimizers, from optax. optax is imported on use, because planning runs without jax."""

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
    """Adafactor without momentum and without scaling by parameter norms, because B starts at zero and would stay zero.

    Weight decay is multiplied by the learning rate, as in the other optimizers here and in transformers' Adafactor.
    optax's `weight_decay_rate` is not.
    """
    import optax

    del numbers  # unused
    return optax.adafactor(lr, multiply_by_parameter_scale=False, weight_decay_rate=lr * weight_decay)


def lion(lr: Any, weight_decay: Any, numbers: Numbers) -> Any:
    import optax

    return optax.lion(lr, b1=numbers["b1"], b2=numbers["b2"], weight_decay=weight_decay)
