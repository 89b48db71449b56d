"""Trackio: a run for each adapter, in one project and group."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import copy_context

from lorafusion_jax.report.trackers.series import RUN, TrackerOfRuns, Value


class Trackio(TrackerOfRuns):
    """Logs to a project."""

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
