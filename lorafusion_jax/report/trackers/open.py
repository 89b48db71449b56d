"""Opens the trackers of a job, and keeps their failures away from the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lorafusion_jax.config.schema import JobConfig, ReportSettings
from lorafusion_jax.errors import ConfigError, install_line, raise_all
from lorafusion_jax.report.console import errors_to, say
from lorafusion_jax.report.events import AdapterEvent, Listener, RunEvent, RunStarted
from lorafusion_jax.report.servers import HandOver
from lorafusion_jax.report.trackers.mlflow import Mlflow
from lorafusion_jax.report.trackers.series import RUN, Tracker, hyperparameters, scalars
from lorafusion_jax.report.trackers.tensorboard import TensorBoard
from lorafusion_jax.report.trackers.trackio import Trackio
from lorafusion_jax.report.trackers.wandb import Wandb

NUMBERS = ("step", "eval", "slot")
TRACKERS: dict[str, tuple[str, type[Tracker]]] = {  # setting, and extra of this package → (module, class)
    "tensorboard": ("tensorboardX", TensorBoard),
    "wandb": ("wandb", Wandb),
    "mlflow": ("mlflow", Mlflow),
    "trackio": ("trackio", Trackio),
}


@contextmanager
def trackers(config: JobConfig, folder: Path) -> Iterator[list[Listener]]:
    """Yields a listener for each tracker of a job, and closes them at the end. They open with the first numbers.

    The last one hands adapters over, if the job says where.

    Raises:
        ConfigError, ErrorList: packages of trackers are not installed; see `HandOver`.
    """
    handover, chosen, problems = handovers(config, folder), _chosen(config.report), []
    packages: dict[str, Any] = {}
    for name in chosen:
        try:
            packages[name] = import_module(TRACKERS[name][0])
        except ImportError:
            off = "false" if getattr(config.report, name) is True else "null"
            fix = f"{install_line(name)}   or without it: report.{name}={off}"
            problems.append(ConfigError("report.missing-package", f"{_lacks(name)}.", fix=fix))
    raise_all(problems)
    opened = {name: TRACKERS[name][1](packages[name], getattr(config.report, name), folder) for name in chosen}
    listeners = [_Guarded(name, tracker, config) for name, tracker in opened.items()]
    try:
        yield [*listeners, *handover]
    finally:
        for listener in listeners:
            listener.close()


def handovers(config: JobConfig, folder: Path) -> list[HandOver]:
    """A listener that hands adapters over, if the job says where.

    Raises:
        ConfigError: see `HandOver`.
    """
    return [HandOver(config, folder)] if config.handover.is_on else []


class _Guarded:
    """A listener that passes numbers to a tracker until it fails. Its failure is reported once."""

    def __init__(self, name: str, tracker: Tracker, config: JobConfig):
        self._name, self._tracker, self._config = name, tracker, config
        self._taken: dict[str, int] = {}
        self._opened: set[str] = set()
        self._failed = False

    def __call__(self, event: RunEvent) -> None:
        if isinstance(event, RunStarted):
            self._taken = dict(event.taken)
        if event.kind in NUMBERS:
            self._try(lambda: self._log(event))

    def close(self) -> None:
        self._try(self._tracker.close)

    def _log(self, event: RunEvent) -> None:
        name, step = (event.adapter, event.step) if isinstance(event, AdapterEvent) else (RUN, event.slot)
        if name not in self._opened:
            adapters = [adapter for adapter in self._config.adapters if adapter.name == name]
            settings = hyperparameters(adapters[0], self._config) if adapters else {}
            self._tracker.open(name, settings, first_step=self._taken.get(name, 0))
            self._opened.add(name)
        self._tracker.log(name, scalars(event), step)

    def _try(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            work()
        except Exception as problem:  # a library and a network may raise anything
            self._failed = True
            why = (str(problem).strip() or type(problem).__name__).partition("\n")[0]
            say(errors_to(), f"report.{self._name} failed and gets no more numbers: {why}. The run goes on.", "yellow")


def missing_packages(settings: ReportSettings) -> list[str]:
    """Lists the trackers of a job whose package is not installed here; the machine that trains may have it."""
    return [
        f"[report.missing-package] {_lacks(name)} here; {install_line(name)}"
        for name in _chosen(settings)
        if find_spec(TRACKERS[name][0]) is None
    ]


def _chosen(settings: ReportSettings) -> list[str]:
    return [name for name in TRACKERS if getattr(settings, name) not in (None, False)]


def _lacks(name: str) -> str:
    return f"report.{name} needs a package that is not installed"
