"""Runs training under its live view and the trackers that the job asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.report.events import Listener
from lorafusion_jax.report.screen import LINE_EVERY_S, Screen
from lorafusion_jax.report.trackers import trackers
from lorafusion_jax.session.processes import is_first
from lorafusion_jax.training import RunResult


def watch(
    console: Console,
    folder: Path,
    config: JobConfig,
    work: Callable[[Sequence[Listener]], RunResult],
    view: Callable[..., AbstractContextManager[Listener]] = Screen,
) -> RunResult:
    """Runs `work` under the live view and the trackers that the job asks for; `view` is made as `Screen` is."""
    if not is_first():  # the first process shows the run
        return work([])
    every = config.train.log_every_s
    with (
        trackers(config, folder) as listeners,
        view(folder.name, console, LINE_EVERY_S if every is None else every) as screen,
    ):
        return work([screen, *listeners])
