"""The learning rates of an adapter that was extended: what was planned keeps its own."""

from __future__ import annotations

import numpy as np
import pytest

from lorafusion_jax.config.schema import AdapterConfig, DataSettings, Extension, OptimSettings
from lorafusion_jax.data.prepare import AdapterData, Mix, sample_order
from lorafusion_jax.optim.schedules import learning_rates
from lorafusion_jax.session.task import first_steps, step_rates

MIX = Mix(parts=None, num_samples=10, weights=(1.0,), seed=0)


def adapter_of(*extended: tuple[int, int], schedule="cosine") -> AdapterConfig:
    return AdapterConfig(
        name="law",
        data=DataSettings(train="law.jsonl"),
        optim=OptimSettings(schedule=schedule, warmup=0.2),
        global_samples=4,
        extended=tuple(Extension(after=after, samples=samples) for after, samples in extended),
    )


def data_of(adapter: AdapterConfig) -> AdapterData:
    return AdapterData(
        train=None,  # type: ignore[arg-type]
        eval=None,
        order=sample_order(adapter, MIX),
        first=sample_order(adapter_of(), MIX),
        cuts=tuple(extension.after for extension in adapter.extended),
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_each_extension_has_a_schedule_of_its_own(schedule):
    adapter = adapter_of((10, 20), schedule=schedule)  # 3 steps, the last of them short, and 5 more
    rates = step_rates(adapter, data_of(adapter))
    np.testing.assert_array_equal(rates[:3], learning_rates(adapter.optim, 3))
    np.testing.assert_array_equal(rates[3:], learning_rates(adapter.optim, 5))
    assert first_steps(adapter, data_of(adapter)) == 3


def test_one_that_ended_early_keeps_the_schedule_that_was_planned():
    adapter = adapter_of((8, 8), (12, 1))  # finished after 2 of 3 steps, then after 1 of 2
    rates = step_rates(adapter, data_of(adapter))
    planned = [learning_rates(adapter.optim, steps)[:taken] for steps, taken in ((3, 2), (2, 1), (1, 1))]
    np.testing.assert_array_equal(rates, np.concatenate(planned))


def test_the_stream_goes_on_where_it_ended():
    first, longer = data_of(adapter_of()), data_of(adapter_of((10, 15)))
    np.testing.assert_array_equal(longer.order[:10], first.order)
    assert sorted(longer.order[10:20]) == list(range(10))
    assert longer.batch_starts(4).tolist() == [0, 4, 8, 10, 14, 18, 22]
