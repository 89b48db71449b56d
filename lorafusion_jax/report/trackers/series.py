"""What trackers are told: a series of numbers for each adapter, under the same names, and its settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.report.events import RunEvent

RUN = "_run"  # the series of the run as a whole; no adapter's name begins so
AXES = ("slot", "step")

type Value = str | int | float | bool


class Tracker(ABC):
    """Receives the numbers of a run.

    Args:
        package: the imported library.
        setting: value of its key in the job file.
        folder: the run folder.
    """

    def __init__(self, package: Any, setting: Any, folder: Path):
        self._package, self._setting, self._folder = package, setting, folder

    @abstractmethod
    def open(self, name: str, settings: Mapping[str, Value], *, first_step: int) -> None:
        """Begins the series of an adapter, or of the run. Steps up to `first_step` were told by an earlier process."""

    @abstractmethod
    def log(self, name: str, values: Mapping[str, float], step: int) -> None:
        """Adds numbers to a series."""

    @abstractmethod
    def close(self) -> None:
        """Ends all series."""


class TrackerOfRuns(Tracker):
    """A library that has an object for each run."""

    def __init__(self, package: Any, setting: Any, folder: Path):
        super().__init__(package, setting, folder)
        self._runs: dict[str, Any] = {}

    def log(self, name: str, values: Mapping[str, float], step: int) -> None:
        self._runs[name].log(dict(values), step=step)

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()


def scalars(event: RunEvent) -> dict[str, float]:
    """The numbers of an event by name. Adapters have the same names, so that their curves can be laid over each other.

    >>> from lorafusion_jax.report.events import AdapterEvaluated
    >>> scalars(AdapterEvaluated(adapter="law", step=3, eval_loss=1.5, eval_tokens=9, metrics={"eval_margin": 0.1}))
    {'eval_loss': 1.5, 'eval_tokens': 9, 'eval_margin': 0.1}
    """
    return {
        key: value
        for key, value in event.row().items()
        if key not in AXES and isinstance(value, int | float) and not isinstance(value, bool)
    }


def hyperparameters(adapter: AdapterConfig, config: JobConfig) -> dict[str, Value]:
    """The settings of an adapter that are set, by dotted key; lists and tables as texts."""
    settings = adapter.model_dump(mode="json", exclude={"name", "extended", "early_stop"})
    base_settings = {"base.model": Path(config.base.model).name, "base.quantize": config.base.quantize}
    return base_settings | dict(_flat(settings, ""))


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Value]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, str | int | float):
            yield f"{prefix}{key}", value
        elif value:
            yield f"{prefix}{key}", str(value)
