"""Trackio: a run for each adapter, in one project and group."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import copy_context
from typing import Any

from lorafusion_jax.report.trackers.series import RUN, Tracker, Value


class Trackio(Tracker):
    """Logs to a project."""

    def __init__(self, package: Any, setting: Any, folder: Any):
        super().__init__(package, setting, folder)
        self._runs: dict[str, Any] = {}

    def open(self, name: str, settings: Mapping[str, Value], *, first_step: int) -> None:
        # Trackio ends the run of the current context when it begins another one.
        self._runs[name] = copy_context().run(
            self._package.init,
            project=self._setting,
            name=f"{self._folder.name}-{'run' if name == RUN else name}",
            group=self._folder.name,
            config=dict(settings),
            resume="allow",
            embed=False,
        )

    def log(self, name: str, values: Mapping[str, float], step: int) -> None:
        self._runs[name].log(dict(values), step=step)

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()
