"""Successive halving by hand: results come in any order, and adapters may come later than others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lorafusion_jax.config.run_sections import EarlyStopSettings, HalvingSettings
from lorafusion_jax.session.task import AdapterProgress
from lorafusion_jax.training.selection import Selection
from lorafusion_jax.training.state import Progress

STEPS = 24


class Search:
    """Adapters on one held-out set, compared at steps 3, 6, 12 and 24; the loss of an adapter is always the same."""

    def __init__(self, **losses: float):
        self.losses, self.adapters = losses, {}
        config = SimpleNamespace(
            halving=HalvingSettings(first_step=3),
            train=SimpleNamespace(eval_every_steps=None),
            adapter=lambda name: SimpleNamespace(early_stop=EarlyStopSettings()),
        )
        self.job = SimpleNamespace(config=config, prepared=SimpleNamespace(adapters={}))
        self.selection = Selection(self.job, Progress(plan="", adapters=self.adapters))

    def begin(self, *names: str) -> None:
        for name in names:
            self.adapters[name] = AdapterProgress(name=name, num_steps=STEPS)
            self.job.prepared.adapters[name] = SimpleNamespace(eval=SimpleNamespace(digest="held out"))

    def train(self, step: int, *names: str) -> None:
        for name in names:
            self.adapters[name].step = step
            if self.selection.evaluates_between(name, step):
                self.selection.take(name, step, {"eval_loss": self.losses[name]})

    def ended(self) -> dict[str, str]:
        return {name: adapter.stop.partition(":")[0] for name, adapter in self.adapters.items() if adapter.stop}


@pytest.fixture
def search():
    search = Search(a=1.0, b=2.0, c=3.0, d=4.0, good=0.5, fair=1.5, bad=3.5)
    search.begin("a", "b", "c", "d")
    search.train(3, "a", "b", "c", "d")
    assert search.ended() == dict.fromkeys("cd", "halved at step 3 of 24")
    return search


def test_who_comes_later_is_compared_with_the_results_at_the_same_step(search):
    search.begin("good", "fair", "bad")
    search.train(3, "good", "fair", "bad")
    assert search.ended().keys() == {"c", "d", "bad"}
    assert search.adapters["bad"].stop.endswith("number 6 of 7")


def test_nobody_waits_for_who_comes_later(search):
    search.begin("good", "bad")
    search.train(4, "a", "b")
    search.train(1, "good", "bad")
    search.train(6, "a", "b")
    assert search.ended().keys() == {"c", "d", "b"}
    search.train(3, "good", "bad")
    search.train(12, "a")
    assert search.ended().keys() == {"c", "d", "b", "bad"}
    search.train(6, "good")
    search.train(12, "good")
    assert search.ended().keys() == {"c", "d", "b", "bad"}  # a has passed: what was decided stays


def test_who_goes_on_after_a_pause_is_late_as_well(search):
    search.adapters["b"].status = "paused"
    search.train(6, "a")
    search.adapters["b"].status = "running"
    search.train(6, "b")
    assert search.ended()["b"] == "halved at step 6 of 24"


def test_who_is_extended_after_an_early_end_trains_on(search):
    search.train(6, "a", "b")
    search.adapters["c"].extend(STEPS)
    search.train(6, "c")
    search.train(12, "a")
    search.train(12, "c")
    assert search.ended().keys() == {"d", "b"}
