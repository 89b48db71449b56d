"""Checks optimizers and schedules before a run: one step of each, traced on shapes. Starts no backend."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from lorafusion_jax.errors import ConfigError, LoraFusionError
from lorafusion_jax.optim.schedules import schedule
from lorafusion_jax.optim.settings import OptimizerSettings
from lorafusion_jax.optim.step import hyper, transformation

SHAPES = {"lora_a": (2, 12, 4), "lora_b": (2, 4, 10)}  # of two layers


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
