"""One adapter's optimizer: a gradient transformation over that adapter's own arrays, at its own rank.

Every adapter keeps the state that it would keep alone: no shared clock, no padding inside factored moments. Numbers
(learning rate, decay, …) are arguments of the compiled update, so a sweep compiles once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.optim.settings import OptimizerSettings
from lorafusion_jax.optim.table import optimizer


class Hyper(NamedTuple):
    """Numbers of one optimizer step; float32 scalars, numpy's or tracers.

    Attributes:
        options: the optimizer's own, see `Optimizer.options`.
    """

    lr: Any
    weight_decay: Any
    clip: Any
    options: dict[str, Any]


def hyper(settings: OptimizerSettings, lr: float) -> Hyper:
    """The numbers of a step at a learning rate; what the settings leave open has the optimizer's default."""
    defaults = optimizer(settings.name).options
    given = {name: settings.option(name) for name in defaults}
    with np.errstate(over="ignore"):  # too large for float32: infinite, and the adapter fails at its first step
        options = {name: np.float32(defaults[name] if value is None else value) for name, value in given.items()}
        return Hyper(np.float32(lr), np.float32(settings.weight_decay), np.float32(settings.clip), options)


def still(settings: OptimizerSettings) -> Hyper:
    """Numbers of a step that leaves weights as they are: rate and decay 0, everything else as the job has it.

    With all numbers zero Adam and clipping divide 0 by 0, and NaNs draw little power: with one adapter of four made of
    them, the passes of a 32B model took 2 to 4 % less time on an H200.
    """
    return hyper(settings, 0.0)._replace(weight_decay=np.float32(0), clip=np.float32(1))


def zero_hyper(settings: OptimizerSettings) -> Hyper:
    """Numbers for building an optimizer's first state, which depends on none of them."""
    return jax.tree.map(np.zeros_like, hyper(settings, 0.0))


def transformation(settings: OptimizerSettings, numbers: Hyper) -> optax.GradientTransformation:
    """Builds one adapter's optimizer; clipping comes before it, see `clipped`.

    Args:
        settings: decides the kind of optimizer.
        numbers: may be traced.
    """
    kind = optimizer(settings.name)
    built = kind.build(numbers.lr, numbers.weight_decay, numbers.options)
    return _checked(settings.name, _per_layer(built) if kind.per_layer else built)


def clipped[Tree](gradient: Tree, norm: chex.Numeric, largest: chex.Numeric) -> Tree:
    """Scales a gradient down to a global norm of `largest`, as optax.clip_by_global_norm does.

    The norm is given, because it spans pipeline stages.
    """
    return jax.tree.map(lambda leaf: jnp.where(norm < largest, leaf, leaf / norm * largest), gradient)


def _checked(name: str, built: optax.GradientTransformation) -> optax.GradientTransformation:
    """Refuses changes or a new state of another structure, shape or dtype than before.

    An optimizer of another package could otherwise change the weights' dtype, or compile a new program in each step.
    Costs nothing in a compiled step: shapes are compared while it is traced.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        changes, stepped = built.update(updates, state, params)
        for what, now, before in (("changes", changes, updates), ("state", stepped, state)):
            try:
                chex.assert_trees_all_equal_shapes_and_dtypes(now, before)
            except AssertionError as problem:
                raise ConfigError(
                    "plugin.broken",
                    f"the optimizer '{name}' returns {what} of another structure, shape or dtype than it was given.",
                    why=str(problem),
                    fix="return what `update` was given, leaf by leaf in the same shapes and dtypes",
                ) from problem
        return changes, stepped

    return optax.GradientTransformation(built.init, update)


def _per_layer(built: optax.GradientTransformation) -> optax.GradientTransformation:
    """Treats each layer of a stacked leaf as a parameter of its own: adafactor factors and clips whole parameters, and
    the stack of a stage is no parameter of anybody's model. A state per leaf, because leaves of a stage may differ in
    their number of layers."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        steps = {name: jax.vmap(built.update)(updates[name], state[name], params[name]) for name in updates}
        return {name: change for name, (change, _) in steps.items()}, {
            name: state for name, (_, state) in steps.items()
        }

    def init(params: Any) -> Any:
        return {name: jax.vmap(built.init)(leaf) for name, leaf in params.items()}

    return optax.GradientTransformation(init, update)
