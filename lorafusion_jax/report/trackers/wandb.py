"""Weights & Biases: a run for each adapter, in one group."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from lorafusion_jax.report.trackers.series import RUN, TrackerOfRuns, Value


class Wandb(TrackerOfRuns):
    """Logs to a project. The x axis of an adapter is its own steps."""

    def open(self, name: str, settings: Mapping[str, Value], *, first_step: int) -> None:
        entity, _, project = self._setting.rpartition("/")
        tags = [self._folder.name] if name == RUN else [str(settings.get("objective.name", "")), "adapter"]
        self._runs[name] = self._package.init(
            project=project,
            entity=entity or None,
            group=self._folder.name,
            job_type="run" if name == RUN else "adapter",
            name=self._folder.name if name == RUN else name,
            tags=[tag for tag in tags if tag],
            config=dict(settings),
            dir=str(self._folder),
            id=self._id(name),
            resume="allow",  # a run that is resumed continues its curves
            reinit="create_new",  # several at once
        )

    def _id(self, name: str) -> str:
        return hashlib.sha256(f"{self._folder.resolve()}\0{name}".encode()).hexdigest()[:16]
