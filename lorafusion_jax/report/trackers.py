"""Optional trackers, TensorBoard and Weights & Biases, loaded only for jobs that enable them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lorafusion_jax.config.schema import ReportSettings
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.report.events import AdapterEvent, Listener, RunEvent

NUMBERS = ("step", "eval", "slot")
PLACES = ("slot", "step")  # the x axes
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # setting, and extra of this package → module


@contextmanager
def trackers(settings: ReportSettings, folder: Path) -> Iterator[list[Listener]]:
    """Yields the trackers of a job and closes them at the end; they open with the first numbers.

    Raises:
        ConfigError: the package of a tracker is not installed.
    """
    with ExitStack() as stack:
        listeners: list[Listener] = []
        if settings.tensorboard:
            listeners.append(_TensorBoard(_package("tensorboard"), folder, stack))
        if settings.wandb is not None:
            listeners.append(_Wandb(_package("wandb"), settings.wandb, folder, stack))
        yield listeners


def scalars(event: RunEvent) -> dict[str, float]:
    """The numbers of an event by tracker name: `adapter/<name>/loss`, …

    >>> from lorafusion_jax.report.events import AdapterEvaluated
    >>> scalars(AdapterEvaluated(adapter="law", step=3, eval_loss=1.5, eval_tokens=9, metrics={"eval_margin": 0.1}))
    {'adapter/law/eval_loss': 1.5, 'adapter/law/eval_tokens': 9, 'adapter/law/eval_margin': 0.1}
    """
    prefix = f"adapter/{event.adapter}/" if isinstance(event, AdapterEvent) else "run/"
    return {
        prefix + key: value
        for key, value in event.row().items()
        if key not in PLACES and isinstance(value, int | float)
    }


class _TensorBoard:
    """Writes `tensorboard/` in the run folder. The x axis of an adapter is its own steps."""

    def __init__(self, package: Any, folder: Path, stack: ExitStack):
        self._package, self._folder, self._stack, self._writer = package, folder, stack, None

    def __call__(self, event: RunEvent) -> None:
        if event.kind not in NUMBERS:
            return
        if self._writer is None:
            self._writer = self._stack.enter_context(self._package.SummaryWriter(str(self._folder / "tensorboard")))
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event.step if isinstance(event, AdapterEvent) else event.slot)


class _Wandb:
    """Logs to a project of Weights & Biases. The x axis is slots."""

    def __init__(self, package: Any, project: str, folder: Path, stack: ExitStack):
        self._package, self._project, self._folder, self._stack, self._run = package, project, folder, stack, None

    def __call__(self, event: RunEvent) -> None:
        if event.kind not in NUMBERS:
            return
        if self._run is None:
            self._run = self._package.init(project=self._project, name=self._folder.name, dir=str(self._folder))
            self._stack.callback(self._run.finish)
        self._run.log(scalars(event) | {"slot": event.slot})


def missing_packages(settings: ReportSettings) -> list[str]:
    """Lists the trackers of a job whose package is not installed here; the machine that trains may have it."""
    return [
        f"[report.missing-package] {_lacks(name)} here; pip install {_install(name)}"
        for name, module in PACKAGES.items()
        if getattr(settings, name) not in (None, False) and find_spec(module) is None
    ]


def _package(name: str) -> Any:
    try:
        return import_module(PACKAGES[name])
    except ImportError:
        fix = f"pip install {_install(name)}"
        raise ConfigError("report.missing-package", f"{_lacks(name)}.", fix=fix) from None


def _lacks(name: str) -> str:
    return f"report.{name} needs a package that is not installed"


def _install(name: str) -> str:
    return f'"lorafusion-jax[{name}]"'
