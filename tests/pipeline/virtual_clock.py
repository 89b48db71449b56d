"""A clock that moves only when a test says so, for what `Spans` records on threads of its own."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from lorafusion_jax.session import spans as module
from lorafusion_jax.session.spans import Issued, Spans


class Later:
    """What a device has ready when the test says so."""

    def __init__(self) -> None:
        self.ready = threading.Event()

    def block_until_ready(self) -> None:
        self.ready.wait()


class VirtualClock:
    """Seconds of a test, which ends events whenever it wants: no load of the machine changes a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def begin(self, spans: Spans, issued: Issued) -> Later:
        """Returns the result of an event; `end` makes it ready."""
        later = Later()
        spans.follow(issued, later)  # pyright: ignore[reportArgumentType]
        return later

    def end(self, spans: Spans, later: Later) -> None:
        """Makes a result ready now, and waits until that is noted."""
        noted = len(spans._spans)
        later.ready.set()
        while len(spans._spans) == noted:
            time.sleep(0.0001)

    def run(self, spans: Spans, issued: Issued, seconds: float) -> None:
        """An event that takes so long. Events that are not recorded any more are not waited for."""
        recorded = len(spans._host)
        later = self.begin(spans, issued)
        self.now += seconds
        if len(spans._host) > recorded:
            self.end(spans, later)
        else:
            later.ready.set()

    def fail(self, error: Exception) -> None:
        """Takes a while and fails."""
        self.now += 0.1
        raise error
