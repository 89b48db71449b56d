"""One optimizer per adapter, for a model that holds its adapters stacked.

A adapters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from lorafusion_jax.adapters.table import GROUP, KINDS, leaves_of
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.plugins import known_names


class PerAdapterState(NamedTuple):
    """Optimizer states by adapter name, each for the adapter's own slices."""

    states: dict[str, Any]


def per_adapter(
    optimizers: Mapping[str, optax.GradientTransformation], *, axis: int | None = None
) -> optax.GradientTransformationExtraArgs:
    """Gives each adapter its own optimizer: state, step count, schedule, clipping and decay.

    Every leaf of the parameters holds the adapters stacked, as in `lora_a` [A, K, R], or [L, A, K, R] in a stack of
    layers. `update` takes `active`, the adapters that had rows in this step, as bool [A], indices or names. Weights and
    states of the others stay bit-identical. Clipping by global norm uses the leaves of one adapter.

    A mask of a table is about one microbatch, and a gradient may be of several: under `optax.MultiSteps` around it, or
    summed in a `lax.scan`. So an adapter that a mask leaves out steps, too, if its gradient has a finite number other
    than 0. Indices and names are the caller's choice, and hold as they are.

    Wrappers belong inside, `per_adapter({"law": optax.MultiSteps(optax.adamw(1e-3), 2), …})`: then each adapter counts
    its own microbatches, as in separate training, and `optax.apply_if_finite` skips the steps of one adapter only.

    Args:
        optimizers: adapter → its transformation, in stacking order (the order of `apply_lora`).
        axis: adapter axis of every leaf (None: that of each tensor of adapters, by its name; 0 for other leaves).

    Raises:
        ConfigError: `optim.per-adapter`, a leaf has another number of adapters on this axis, or `active` may be a mask
            written in numbers; `optim.unknown-adapter`, `active` names an unknown adapter.

    >>> params = {"lora_a": jnp.ones((2, 4, 2))}
    >>> optimizer = per_adapter({"law": optax.sgd(0.5), "med": optax.adamw(1e-2)})
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update({"lora_a": jnp.ones((2, 4, 2))}, state, params, active=["law"])
    >>> updates["lora_a"][:, 0, 0].tolist()
    [-0.5, -0.0]
    """
    names = tuple(optimizers)
    if not names:
        raise ConfigError("optim.per-adapter", "per_adapter needs at least one optimizer.")
    by_name = {name: optax.with_extra_args_support(optimizer) for name, optimizer in optimizers.items()}

    def init(params: Any) -> PerAdapterState:
        axes = adapter_axes(params, len(names), axis)
        return PerAdapterState(
            {name: by_name[name].init(_slice(params, number, axes)) for number, name in enumerate(names)}
        )

    def update(updates: Any, state: Any, params: Any = None, *, active: Any = None, **extra: Any):
        axes = adapter_axes(updates, len(names), axis)
        mask = _mask(active, names)
        changes, states = [], {}
        for number, name in enumerate(names):
            adapter_updates = _slice(updates, number, axes)
            weights = None if params is None else _slice(params, number, axes)
            change, after = by_name[name].update(adapter_updates, state.states[name], weights, **extra)
            if mask is not None:
                steps = mask.adapters[number]
                if mask.is_of_rows:
                    steps = steps | _has_gradient(adapter_updates)
                change = _where(steps, change, jax.tree.map(_zero_update, change))
                after = _where(steps, after, state.states[name])
            changes.append(change)
            states[name] = after
        return jax.tree.map(lambda n, *leaves: jnp.stack(leaves, n), axes, *changes), PerAdapterState(states)

    return optax.GradientTransformationExtraArgs(init, update)


def active_adapters(table: Any, count: int) -> jax.Array:
    """The adapters with rows in a table of `use_adapters`: bool [count], for `update(…, active=…)`.

    >>> active_adapters([0, 2, 2, -1], 3).tolist()
    [True, False, True]
    """
    return jnp.any(jnp.asarray(table).reshape(-1, 1) == jnp.arange(count), axis=0)


def _slice(tree: Any, number: int, axes: Any) -> Any:
    return jax.tree.map(lambda axis, leaf: jax.lax.index_in_dim(leaf, number, axis, keepdims=False), axes, tree)


def _where(on: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda changed, unchanged: jnp.where(on, changed, unchanged), new, old)


def _zero_update(leaf: jax.Array) -> jax.Array:
    """An update that changes no bit of a weight: -0, because -0 + 0 is 0 and -0 + -0 is -0."""
    return jnp.full_like(leaf, -0.0)


def adapter_axes(tree: Any, count: int, axis: int | None = None) -> Any:
    """Returns the adapter axis of every leaf, counted from the first one; see `per_adapter`."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _axis_of(path, leaf, count, axis), tree)


def _axis_of(path: Any, leaf: Any, count: int, axis: int | None) -> int:
    if axis is None:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        after = next((axes for name in reversed(names) if (axes := _axes_after(name)) is not None), None)
        axis = 0 if after is None else leaf.ndim - 1 - after
    if -leaf.ndim <= axis < leaf.ndim and leaf.shape[axis] == count:
        return axis % leaf.ndim
    raise ConfigError(
        "optim.per-adapter",
        f"a leaf has shape {leaf.shape}, and axis {axis} of it must hold the {count} adapters.",
        where=jax.tree_util.keystr(path),
        fix="wrt=nnx.LoRAParam, an optimizer for each adapter of the model; axis=… for leaves of another form",
    )


@cache
def _axes_after(name: str) -> int | None:
    """Number of axes after that of the adapters of a tensor; None: no kind has one of this name."""
    leaves = leaves_of(known_names(GROUP, KINDS))
    return next((len(leaf.axes) for leaf in leaves if leaf.name == name), None)


class _Mask(NamedTuple):
    """The adapters that step, bool [A], and whether a table's rows say so rather than the caller."""

    adapters: jax.Array
    is_of_rows: bool


def _has_gradient(tree: Any) -> jax.Array:
    """Whether a gradient has a finite number other than 0. One of no rows is exactly 0."""
    return jnp.any(jnp.array([jnp.any((leaf != 0) & jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _mask(active: Any, names: Sequence[str]) -> _Mask | None:
    if active is None:
        return None
    if isinstance(active, str | set) or (isinstance(active, Sequence) and any(isinstance(n, str) for n in active)):
        active_names = [active] if isinstance(active, str) else list(active)
        if wrong := [name for name in active_names if name not in names]:
            raise ConfigError("optim.unknown-adapter", f"active names {wrong}, but the adapters are {list(names)}.")
        return _Mask(jnp.array([name in active_names for name in names]), is_of_rows=False)
    numbers = np.zeros(0, np.int32) if isinstance(active, Sequence) and not active else jnp.asarray(active)
    if numbers.dtype != bool:
        _check_indices(numbers, names)
        return _Mask(active_adapters(numbers, len(names)), is_of_rows=False)
    if numbers.shape != (len(names),):
        raise ConfigError(
            "optim.per-adapter",
            f"active has shape {numbers.shape}, but there are {len(names)} adapters.",
            fix="active=active_adapters(table, number of adapters), or their names",
        )
    return _Mask(jnp.asarray(numbers), is_of_rows=True)


def _check_indices(numbers: Any, names: Sequence[str]) -> None:
    fix = "active=active_adapters(table, number of adapters), a mask of bool, or names"
    if not jnp.issubdtype(numbers.dtype, jnp.integer):
        raise ConfigError("optim.per-adapter", f"active is of {numbers.dtype}, not bool or indices.", fix=fix)
    traced = isinstance(numbers, Tracer)
    if numbers.shape == (len(names),) and (traced or set(np.asarray(numbers).tolist()) <= {0, 1}):
        message = f"active has one integer per adapter ({len(names)}): a mask or indices."
        raise ConfigError("optim.per-adapter", message, fix=fix)
    if not traced and (wrong := sorted(set(np.ravel(numbers).tolist()) - {*range(-1, len(names))})):
        message = f"active has the indices {wrong}, but there are {len(names)} adapters."
        raise ConfigError("optim.unknown-adapter", message, fix=f"-1 to {len(names) - 1}")
