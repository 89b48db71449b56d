"""The optimizer of one adapter: a gradient transformation over the adapter's own arrays, at its own rank.

Its state is that of separate training: step counts are not shared, and factored moments have no padding. Numbers
(learning rate, decay, …) are arguments of the compiled update, so a sweep compiles once.

`check_optimizers` traces a step of each before a run, on shapes; it starts no backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from lorafusion_jax.errors import ConfigError, LoraFusionError
from lorafusion_jax.optim.schedules import OptimizerSettings, schedule
from lorafusion_jax.optim.table import optimizer

SHAPES = {"lora_a": (2, 12, 4), "lora_b": (2, 4, 10)}  # of two layers


class Hyper(NamedTuple):
    """Numbers of one optimizer step: float32 scalars of numpy, or tracers.

    Attributes:
        options: options of the optimizer, see `Optimizer.options`.
        lr_ratios: factors of the rate of named groups of leaves, see `Group`.
    """

    lr: Any
    weight_decay: Any
    clip: Any
    options: dict[str, Any]
    lr_ratios: dict[str, Any]


class Group(NamedTuple):
    """Leaves that the optimizer treats alike.

    Attributes:
        lr_group: name of the rate's factor (None: the rate itself).
        decay: whether weight decay applies.
    """

    lr_group: str | None = None
    decay: bool = True

    @property
    def label(self) -> str:
        return f"{self.lr_group or 'lr'}{'' if self.decay else ', no decay'}"


def hyper(settings: OptimizerSettings, lr: float) -> Hyper:
    """The numbers of a step at a learning rate. Options that are not set have the optimizer's defaults."""
    defaults = optimizer(settings.name).options
    values = {name: settings.option(name) for name in defaults}
    with np.errstate(over="ignore"):  # overflow gives infinity, and the adapter fails at its first step
        options = {name: np.float32(defaults[name] if value is None else value) for name, value in values.items()}
        ratios = {name: np.float32(ratio) for name, ratio in settings.lr_ratios.items()}
        return Hyper(np.float32(lr), np.float32(settings.weight_decay), np.float32(settings.clip), options, ratios)


def unchanging_hyper(settings: OptimizerSettings) -> Hyper:
    """Numbers of a step that does not change weights: rate and decay are 0, all other numbers are the job's.

    If all numbers were zero, Adam and clipping would divide 0 by 0. NaN draws less power on GPUs, so measurements with
    it would be too fast.
    """
    return hyper(settings, 0.0)._replace(weight_decay=np.float32(0), clip=np.float32(1))


def zero_hyper(settings: OptimizerSettings) -> Hyper:
    """Numbers for initialising an optimizer's state, which does not depend on them."""
    return jax.tree.map(np.zeros_like, hyper(settings, 0.0))


def transformation(
    settings: OptimizerSettings, numbers: Hyper, groups: Mapping[str, Group] | None = None
) -> optax.GradientTransformation:
    """Builds one adapter's optimizer, without clipping (see `clipped`).

    Args:
        settings: selects the optimizer.
        numbers: may be traced.
        groups: of each leaf by name (None: all leaves alike). If they differ, each group has a state of its own.
    """
    kind = optimizer(settings.name)

    def build(group: Group) -> optax.GradientTransformation:
        lr = numbers.lr if group.lr_group is None else numbers.lr * numbers.lr_ratios[group.lr_group]
        base_optimizer = kind.build(lr, numbers.weight_decay if group.decay else np.float32(0), numbers.options)
        return _with_checks(settings.name, _per_layer(base_optimizer) if kind.per_layer else base_optimizer)

    groups = {name: _effective(group, numbers) for name, group in (groups or {}).items()}
    different = sorted(set(groups.values()), key=str)
    if len(different) <= 1:
        return build(different[0] if different else Group())
    members = {group: [name for name, member_group in groups.items() if member_group == group] for group in different}
    return _in_groups({group.label: (names, build(group)) for group, names in members.items()})


def _effective(group: Group, numbers: Hyper) -> Group:
    return group if group.lr_group in numbers.lr_ratios else group._replace(lr_group=None)


def _in_groups(
    groups: Mapping[str, tuple[Sequence[str], optax.GradientTransformation]],
) -> optax.GradientTransformation:
    """Applies a transformation to each group of leaves. The state is one of each group, by label."""

    def of(tree: Any, names: Sequence[str]) -> Any:
        return None if tree is None else {name: tree[name] for name in names}

    def init(params: Any) -> Any:
        return {label: group_optimizer.init(of(params, names)) for label, (names, group_optimizer) in groups.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        changes: dict[str, Any] = {}
        stepped = {}
        for label, (names, group_optimizer) in groups.items():
            change: Any
            change, stepped[label] = group_optimizer.update(of(updates, names), state[label], of(params, names))
            changes |= change
        return {name: changes[name] for name in updates}, stepped

    return optax.GradientTransformation(init, update)


def clipped[Tree](gradient: Tree, norm: chex.Numeric, largest: chex.Numeric) -> Tree:
    """Clips a gradient to the global norm `largest`, like optax.clip_by_global_norm.

    The norm is an argument, because it spans pipeline stages.
    """
    return jax.tree.map(lambda leaf: jnp.where(norm < largest, leaf, leaf / norm * largest), gradient)


def _with_checks(name: str, built: optax.GradientTransformation) -> optax.GradientTransformation:
    """Checks that updates and new state have the structure, shapes and dtypes of their inputs.

    Otherwise an optimizer of another package could change the dtype of weights or cause recompilation in each step. The
    check runs at tracing only.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        changes, stepped = built.update(updates, state, params)
        for part, tree, before in (("changes", changes, updates), ("state", stepped, state)):
            try:
                chex.assert_trees_all_equal_shapes_and_dtypes(tree, before)
            except AssertionError as problem:
                raise ConfigError(
                    "plugin.broken",
                    f"the optimizer '{name}' returns {part} of another structure, shape or dtype than it was given.",
                    why=str(problem),
                    fix="return what `update` was given, leaf by leaf in the same shapes and dtypes",
                ) from problem
        return changes, stepped

    return optax.GradientTransformation(built.init, update)


def _per_layer(built: optax.GradientTransformation) -> optax.GradientTransformation:
    """Treats each layer of a stacked leaf as a separate parameter.

    adafactor factors and clips whole parameters, and the stack of a stage is not a parameter of the model. There is one
    state per leaf, because leaves of a stage may have different numbers of layers.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        steps = {name: jax.vmap(built.update)(updates[name], state[name], params[name]) for name in updates}
        return {name: change for name, (change, _) in steps.items()}, {
            name: state for name, (_, state) in steps.items()
        }

    def init(params: Any) -> Any:
        return {name: jax.vmap(built.init)(leaf) for name, leaf in params.items()}

    return optax.GradientTransformation(init, update)


def check_optimizers(settings: Iterable[OptimizerSettings]) -> None:
    """Traces a step of each optimizer, and each schedule.

    Raises:
        ConfigError: `plugin.broken`.
    """
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    for setting in settings:
        _traced("optimizer", setting.name, lambda weights, setting=setting: _step(setting, weights), params)
        build = schedule(setting.schedule).build
        rates = lambda counts, setting=setting, build=build: build(setting.lr, setting.min_lr_ratio, 8)(counts)  # noqa: E731
        _traced("schedule", setting.schedule, rates, jax.ShapeDtypeStruct((8,), jnp.int32))


def _step(setting: OptimizerSettings, weights):
    optimizer = transformation(setting, hyper(setting, setting.lr))
    return optimizer.update(weights, optimizer.init(weights), weights)


def _traced(kind: str, name: str, function, shapes) -> None:
    try:
        jax.eval_shape(function, shapes)
    except LoraFusionError:
        raise
    except Exception as problem:  # code of another package may raise anything
        raise ConfigError(
            "plugin.broken",
            f"the {kind} '{name}' cannot be used.",
            why=f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}",
            fix="update or repair the package that it comes from",
        ) from None
