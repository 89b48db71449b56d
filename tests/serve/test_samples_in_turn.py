"""Samples and slots in turn on one device, whose clock is counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lorafusion_jax.serve.worker import loop


class Device:
    """Runs what is issued in order. The host waits as an engine that looks at its tokens one call later does."""

    def __init__(self, passes_s: float, slot_s: float):
        self.passes_s, self.slot_s, self.now, self.free = passes_s, slot_s, 0.0, 0.0
        self.before, self.calls, self.slots, self.busy = 0.0, 0, 0, True

    def issue(self, seconds: float) -> None:
        self.free = max(self.now, self.free) + seconds

    def advance(self) -> None:
        before, _ = self.before, self.issue(self.passes_s)
        self.now, self.before, self.calls = max(self.now, before), self.free, self.calls + 1

    def wait(self) -> None:
        self.now = max(self.now, self.free)

    def run(self, *_: object) -> int:
        self.issue(self.slot_s)
        self.slots += 1
        return 1


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("slot_s", [0.1, 0.45, 2.0])
def test_samples_have_their_share_of_the_device(monkeypatch, share, slot_s):
    device = Device(0.14, slot_s)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: device.now))
    turns = loop.WorkerLoop.__new__(loop.WorkerLoop)
    turns.samples = device  # type: ignore[assignment]
    turns._session = SimpleNamespace(drain=device.wait)  # type: ignore[assignment]
    turns._windows = SimpleNamespace(plan=lambda _: SimpleNamespace(slots=[1]), run=device.run)  # type: ignore[assignment]
    turns._owed_s, turns._per_slot = 0.0, share / (1 - share)
    for _ in range(4000):
        turns.run_in_turn()
    spent = device.calls * device.passes_s, device.slots * device.slot_s
    assert spent[0] / sum(spent) == pytest.approx(share, abs=0.01)
    device.busy = False
    turns.run_in_turn()
    assert turns._owed_s == 0  # nothing, while nobody asks
