"""What a run trains at the moment: settings, data and plan, which change together at a drained slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.data.prepare import AdapterData, Prepared
from lorafusion_jax.optim.schedules import learning_rates
from scheduling import Plan


@dataclass(slots=True, kw_only=True)
class Job:
    """Shared by everything that works on one run; only `Revisions` changes it."""

    config: JobConfig
    prepared: Prepared
    plan: Plan


def first_steps(adapter: AdapterConfig, data: AdapterData) -> int:
    """Optimizer steps of an adapter before it was extended."""
    return _steps(adapter, len(data.order if data.first is None else data.first))


def step_rates(adapter: AdapterConfig, data: AdapterData) -> np.ndarray:
    """Learning rate of each step of an adapter, float32.

    Each extension has a schedule of its own, warm-up included; so a rate never depends on when somebody asked for one.
    A stretch that was ended early keeps the schedule of all that was planned of it.
    """
    first = data.order if data.first is None else data.first
    planned = [len(first), *(each.samples for each in adapter.extended)]
    taken = np.diff([0, *data.cuts, len(data.order)])
    rates = [learning_rates(adapter.optim, _steps(adapter, samples)) for samples in planned]
    return np.concatenate([own[: _steps(adapter, count)] for own, count in zip(rates, taken.tolist(), strict=True)])


def _steps(adapter: AdapterConfig, samples: int) -> int:
    return -(-samples // adapter.global_samples)
