"""Learning-rate schedules, tabulated once per adapter. jax is imported on use.

To add one, add a row to the table. Other packages can install an entry point of the group `lorafusion_jax.schedules`
that loads a `Schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lorafusion_jax.plugins import find, not_known

GROUP = "lorafusion_jax.schedules"
LENGTH = 1024  # tables are computed in multiples of it: adapters of different lengths share the compiled operations


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate after the warm-up.

    Args:
        build: (peak rate, final rate / peak rate, number of steps) → function from an array of steps, counted from 0,
            to their rates, like an `optax.Schedule`.
        falls: whether it decays to `optim.min_lr_ratio`. That key has no effect otherwise.
    """

    build: Callable[[float, float, int], Callable[[Any], Any]]
    falls: bool = True


def _constant(lr: float, ratio: float, steps: int) -> Callable[[Any], Any]:
    import optax

    del ratio, steps  # unused
    return optax.constant_schedule(lr)


def _linear(lr: float, ratio: float, steps: int) -> Callable[[Any], Any]:
    import optax

    return optax.linear_schedule(lr, lr * ratio, steps)


def _cosine(lr: float, ratio: float, steps: int) -> Callable[[Any], Any]:
    import optax

    return optax.cosine_decay_schedule(lr, steps, alpha=ratio)


SCHEDULES: Mapping[str, Schedule] = {
    "constant": Schedule(build=_constant, falls=False),
    "linear": Schedule(build=_linear),
    "cosine": Schedule(build=_cosine),
}


def schedule(name: str) -> Schedule:
    """Finds a schedule by its name in a job file.

    Raises:
        ConfigError: `plugin.unknown`, `plugin.broken`.
    """
    return find(GROUP, SCHEDULES, name, Schedule)


def unknown_schedule(name: str) -> str | None:
    """Explains an unknown `optim.schedule`; None if the name exists."""
    return not_known(GROUP, SCHEDULES, name)


def warmup_steps(settings: OptimizerSettings, num_steps: int) -> int:
    """Number of warm-up steps, from a share of all steps (rounded) or a number of steps.

    Example:
        >>> from lorafusion_jax.config import OptimSettings
        >>> warmup_steps(OptimSettings(warmup=0.1), 25), warmup_steps(OptimSettings(warmup=10), 25)
        (2, 10)
    """
    return round(settings.warmup * num_steps) if settings.warmup < 1 else min(int(settings.warmup), num_steps)


def learning_rates(settings: OptimizerSettings, num_steps: int) -> np.ndarray:
    """Tabulates an adapter's schedule: the float32 learning rate of each step.

    The warm-up is linear and starts at lr / warm-up steps, so that the first step learns. The schedule then decays to
    lr · min_lr_ratio, which it would reach one step after the last, so that the last step learns.
    """
    import jax

    warm = warmup_steps(settings, num_steps)
    after_warm = num_steps - warm
    body = schedule(settings.schedule).build(settings.lr, settings.min_lr_ratio, max(after_warm, 1))
    rising = settings.lr * np.arange(1, warm + 1) / max(warm, 1)
    counts = np.arange(-(-after_warm // LENGTH) * LENGTH, dtype=np.int32)
    with jax.default_device(_host()):  # a live session's devices are busy with others
        falling = (np.asarray(body(jax.device_put(counts))) * np.ones(len(counts)))[:after_warm]
    with np.errstate(over="ignore"):
        return np.concatenate([rising, falling]).astype(np.float32)


def _host() -> Any:
    """The processor as a device of jax; None where there are none of its platform."""
    import jax

    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


class OptimizerSettings(Protocol):
    """The section `optim` of an adapter."""

    @property
    def name(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def schedule(self) -> str: ...
    @property
    def warmup(self) -> float: ...
    @property
    def min_lr_ratio(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip(self) -> float: ...
    @property
    def lr_ratios(self) -> Mapping[str, float]:
        """Factors of the learning rate of named groups of leaves."""
        ...

    def option(self, name: str) -> float | None:
        """A number that only some optimizers use; None if the job file does not set it."""
        ...
