"""What tests of live sessions share: opening one, starting adapters, running until they end, comparing states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from narrow_places import narrow_places

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.report.events import Listener
from lorafusion_jax.session import AdapterState, Places, Session, Task, WindowPlanner

WINDOWS: dict[Session, WindowPlanner] = {}


def open_session(
    config: JobConfig,
    places: Mapping[Any, int],
    targets: Sequence[str] = (),
    reproducible: bool = False,
    **options: Any,
) -> Session:
    """Opens a session for adapters of a job. Its places have all targets, as users' have, or a few."""
    with pytest.MonkeyPatch.context() as patch:
        if targets:
            narrow_places(patch, targets)
        opened = Session.open_places(
            config.base,
            config.mesh,
            Places.of(places),
            batch=config.batch,
            train=config.train,
            directory=config.directory,
            reproducible=reproducible,
            **options,
        )
    WINDOWS[opened] = WindowPlanner(opened)
    return opened


def start(session: Session, task: Task, state: AdapterState | None = None) -> int:
    """Starts an adapter in a free place; returns its number."""
    free_place = session.find_place(task.spec)
    assert free_place is not None
    session.start(free_place, task, state)
    return free_place


def run(
    session: Session,
    slots: int = 1000,
    on_event: Listener = lambda event: None,
    may_fail: bool = False,
) -> dict[str, AdapterState]:
    """Runs up to so many slots. Adapters that end leave; returns their states."""
    ended: dict[str, AdapterState] = {}
    while slots > 0 and session.tasks:
        slots -= max(run_window(session, min(slots, 4), on_event), 1)
        session.drain()
        for name, task in list(session.tasks.items()):
            if task.status in ("done", "failed"):
                assert may_fail or task.status == "done", task.reason
                ended[name] = session.stop(name)
    return ended


def run_window(
    session: Session,
    slots: int,
    on_event: Listener = lambda event: None,
    pause: Callable[[], bool] = lambda: False,
) -> int:
    """Runs one window. Returns the number of its slots that ran."""
    windows = WINDOWS[session]
    return windows.run(windows.plan(slots), on_event, pause)


def assert_same(state: AdapterState, other: AdapterState) -> None:
    """Equal in every bit."""
    assert state.step == other.step
    assert state.weights.keys() == other.weights.keys()
    assert [name for name, leaf in other.weights.items() if not np.array_equal(state.weights[name], leaf)] == []
