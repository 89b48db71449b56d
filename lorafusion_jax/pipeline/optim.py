"""One adapter's optimizer: an optax chain over that adapter's own arrays, at its own rank.

Every adapter keeps the state that it would keep alone: no shared clock, no padding inside factored moments. Numbers
(learning rate, decay, …) are arguments of the compiled update, so a sweep compiles once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lorafusion_jax.config.schema import OptimSettings

LION_B2, ADAM_B2 = 0.99, 0.999


class Hyper(NamedTuple):
    """Numbers of one optimizer step; float32 scalars, numpy's or tracers."""

    lr: Any
    weight_decay: Any
    clip: Any
    b1: Any
    b2: Any
    eps: Any
    momentum: Any


def hyper(settings: OptimSettings, lr: float) -> Hyper:
    b2 = settings.b2 if settings.b2 is not None else LION_B2 if settings.name == "lion" else ADAM_B2
    values = (lr, settings.weight_decay, settings.clip, settings.b1, b2, settings.eps, settings.momentum)
    return Hyper(*(np.float32(value) for value in values))


def transformation(settings: OptimSettings, numbers: Hyper) -> optax.GradientTransformation:
    """Builds one adapter's optimizer; clipping comes before it, see `clipped`.

    Args:
        settings: decides the kind of optimizer.
        numbers: may be traced.
    """
    optimizer = _optimizer(settings.name, numbers)
    return _per_layer(optimizer) if settings.name == "adafactor" else optimizer


def clipped(gradient: Any, norm: Any, largest: Any) -> Any:
    """Scales a gradient down to a global norm of `largest`, as optax.clip_by_global_norm does.

    The norm is given, because it spans pipeline stages.
    """
    return jax.tree.map(lambda leaf: jnp.where(norm < largest, leaf, leaf / norm * largest), gradient)


def _per_layer(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Treats each layer of a stacked leaf as a parameter of its own: adafactor factors and clips whole parameters, and
    the stack of a stage is no parameter of anybody's model. A state per leaf, because leaves of a stage may differ in
    their number of layers."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        steps = {name: jax.vmap(optimizer.update)(updates[name], state[name], params[name]) for name in updates}
        return {name: change for name, (change, _) in steps.items()}, {
            name: state for name, (_, state) in steps.items()
        }

    def init(params: Any) -> Any:
        return {name: jax.vmap(optimizer.init)(leaf) for name, leaf in params.items()}

    return optax.GradientTransformation(init, update)


def _optimizer(name: str, numbers: Hyper) -> optax.GradientTransformation:
    lr, decay = numbers.lr, numbers.weight_decay
    if name == "adamw":
        return optax.adamw(lr, b1=numbers.b1, b2=numbers.b2, eps=numbers.eps, weight_decay=decay)
    if name == "lion":
        return optax.lion(lr, b1=numbers.b1, b2=numbers.b2, weight_decay=decay)
    if name == "adafactor":
        # B starts at zero: scaling updates by the size of the parameter would keep it there
        return optax.adafactor(lr, multiply_by_parameter_scale=False, weight_decay_rate=decay)
    return optax.chain(optax.add_decayed_weights(decay), optax.sgd(lr, momentum=numbers.momentum))


def learning_rates(settings: OptimSettings, num_steps: int) -> np.ndarray:
    """Tabulates the adapter's schedule: float32 learning rate of each of its steps.

    Warm-up is linear from lr / warm-up steps, so that the first step already learns; then constant, linear or cosine
    towards lr · min_lr_ratio, which would be reached one step after the last, so that the last step learns, too.
    """
    warm = round(settings.warmup * num_steps)
    left = max(num_steps - warm, 1)
    end = settings.lr * settings.min_lr_ratio
    body = {
        "constant": lambda: optax.constant_schedule(settings.lr),
        "linear": lambda: optax.linear_schedule(settings.lr, end, left),
        "cosine": lambda: optax.cosine_decay_schedule(settings.lr, left, alpha=settings.min_lr_ratio),
    }[settings.schedule]()
    rising = settings.lr * np.arange(1, warm + 1) / max(warm, 1)
    falling = np.asarray(body(jnp.arange(num_steps - warm))) * np.ones(num_steps - warm)
    return np.concatenate([rising, falling]).astype(np.float32)
