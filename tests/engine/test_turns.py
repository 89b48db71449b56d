"""Turns: owners share slots by tokens and weights, whatever the number of their adapters; samples share the time."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from lorafusion_jax.serve.worker import loop
from lorafusion_jax.session.turns import JOBS, Turns
from scheduling import AdapterJob
from scheduling.types import Limits
from scheduling.window import Cursor, Tail, advance, plan_window

LENGTH = 300
HORIZON = 4


class Windows:
    """Plans windows as a session does; an adapter's name begins with its owner's."""

    def __init__(self, jobs_share: float = 0.5):
        self.turns, self.tail = Turns(jobs_share=jobs_share), Tail(limits=Limits(capacity_tokens=1024, num_stages=1))
        self.cursors: dict[str, Cursor] = {}
        self.tokens: Counter[str] = Counter()
        self.slots: list[set[str]] = []

    def add(self, name: str, rows: int = 1000, weight: float = 1.0) -> None:
        self.cursors[name] = Cursor(job=AdapterJob(name, [LENGTH] * rows, 12, weight=weight))

    def run(self, windows: int) -> None:
        for _ in range(windows):
            cursors = [cursor for cursor in self.cursors.values() if not cursor.is_finished]
            owners = [owner_of(cursor.job.name) for cursor in cursors]
            window = plan_window(*self.turns.weigh(cursors, owners, self.tail), HORIZON)
            self.turns.note(window.slots, cursors, owners, self.tail)
            after = advance(cursors, self.tail, window.slots)
            self.tail = after.tail
            self.cursors |= {cursor.job.name: cursor for cursor in after.cursors}
            for slot in window.slots:
                self.slots.append({owner_of(ref.adapter) for ref in slot.samples})
                for ref in slot.samples:
                    lengths = self.cursors[ref.adapter].job.sample_tokens
                    self.tokens[owner_of(ref.adapter)] += lengths[ref.sample]

    def shares(self) -> dict[str, float]:
        total = self.tokens.total()
        return {owner: tokens / total for owner, tokens in self.tokens.items()}


def owner_of(name: str) -> str:
    return JOBS if name.startswith("job") else name.partition("-")[0]


def test_owners_share_by_weight_and_not_by_number_of_models():
    windows = Windows()
    for number in range(4):
        windows.add(f"ana-{number}")
    windows.add("ben-0")
    windows.add("cleo-0", weight=2.0)
    windows.run(40)
    assert windows.shares() == pytest.approx({"ana": 0.25, "ben": 0.25, "cleo": 0.5}, abs=0.05)


@pytest.mark.parametrize("jobs_share", [0.25, 1.0])
def test_jobs_together_are_one_owner_and_take_what_is_left(jobs_share):
    windows = Windows(jobs_share)
    for number in range(3):
        windows.add(f"job-{number}")
    windows.add("ana-0", rows=150)
    windows.run(8)
    assert windows.shares()[JOBS] == pytest.approx(jobs_share / (1 + jobs_share), abs=0.15)
    windows.run(40)  # the client has no rows any more
    full = [slot for slot in windows.slots if slot == {JOBS}]
    assert len(full) > 60
    counts = Counter(windows.tokens)
    assert counts["ana"] == 150 * LENGTH


def test_the_first_call_of_an_owner_joins_the_next_slot():
    """Whoever has sent little is served at once, but not before all others all the time."""
    windows = Windows()
    windows.add("ana-0")
    windows.add("job-0")
    windows.run(10)
    first = len(windows.slots)
    windows.add("ben-0", rows=1)
    windows.run(1)
    assert "ben" in windows.slots[first]
    before = Counter(windows.tokens)
    for number in range(40):  # calls of some slots, one after the other: no more than a share
        windows.add(f"ben-{number}", rows=12)
        windows.run(1)
    since = windows.tokens - before
    assert since["ana"] / since.total() == pytest.approx(0.4, abs=0.05)


def test_jobs_alone_are_planned_as_ever():
    windows = Windows()
    cursors = [Cursor(job=AdapterJob("job-0", [LENGTH] * 9, 3)), Cursor(job=AdapterJob("job-1", [LENGTH], 1, weight=3))]
    weighed, tail = windows.turns.weigh(cursors, [JOBS, JOBS], windows.tail)
    assert (weighed, tail) == (cursors, windows.tail)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_samples_have_their_share_of_the_time_while_slots_wait(monkeypatch, share):
    spent = {"slots": 0.0, "samples": 0.0}

    def spend(kind: str, seconds: float) -> int:
        spent[kind] += seconds
        return 1

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: sum(spent.values())))
    worker = loop.WorkerLoop.__new__(loop.WorkerLoop)
    windows = {"plan": lambda horizon: SimpleNamespace(slots=(None,)), "run": lambda *_: spend("slots", 0.45)}
    worker._windows, worker._session = SimpleNamespace(**windows), SimpleNamespace(drain=lambda: None)  # type: ignore
    samples = SimpleNamespace(busy=True, advance=lambda: spend("samples", 0.07), wait=lambda: None)
    worker.samples = samples  # type: ignore
    worker._owed_s, worker._per_slot = 0.0, share / (1 - share)
    for _ in range(1000):
        worker.run_in_turn()
    assert spent["samples"] / sum(spent.values()) == pytest.approx(share, abs=0.02)
    samples.busy, before = False, spent["slots"]
    worker._owed_s = 0.0
    for _ in range(10):
        worker.run_in_turn()
    assert spent["slots"] - before == pytest.approx(4.5)  # whoever is alone has all of it
