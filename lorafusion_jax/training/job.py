"""The current settings, data and plan of a run. They change together, at a drained slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.data.prepare import AdapterData, Prepared
from lorafusion_jax.optim.schedules import learning_rates
from scheduling import Plan


@dataclass(slots=True, kw_only=True)
class Job:
    """Shared by all parts of a run. Only `Revisions` changes it."""

    config: JobConfig
    prepared: Prepared
    plan: Plan


def first_steps(adapter: AdapterConfig, data: AdapterData) -> int:
    """Returns the number of optimizer steps of an adapter before extensions."""
    return _steps(adapter, len(data.order if data.first is None else data.first))


def step_rates(adapter: AdapterConfig, data: AdapterData) -> np.ndarray:
    """Returns the learning rate of each step of an adapter, float32.

    Each extension has its own schedule, warm-up included, so a rate does not depend on when the extension was
    requested. A part that was ended early keeps the schedule of its planned length.
    """
    first = data.order if data.first is None else data.first
    planned = [len(first), *(part.samples for part in adapter.extended)]
    taken = np.diff([0, *data.cuts, len(data.order)])
    rates = [learning_rates(adapter.optim, _steps(adapter, samples)) for samples in planned]
    return np.concatenate(
        [of_part[: _steps(adapter, count)] for of_part, count in zip(rates, taken.tolist(), strict=True)]
    )


def _steps(adapter: AdapterConfig, samples: int) -> int:
    return -(-samples // adapter.global_samples)
