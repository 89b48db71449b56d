"""Optional trackers, TensorBoard and Weights & Biases, loaded only for jobs that enable them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from lorafusion_jax.config.schema import ReportSettings
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.report.events import AdapterEvent, Listener, RunEvent

NUMBERS = ("step", "eval", "slot")
PLACES = ("slot", "step")  # the x axes


@contextmanager
def trackers(settings: ReportSettings, folder: Path) -> Iterator[list[Listener]]:
    """Yields the trackers of a job and closes them at the end; they open with the first numbers.

    Raises:
        ConfigError: the package of a tracker is not installed.
    """
    with ExitStack() as stack:
        listeners: list[Listener] = []
        if settings.tensorboard:
            listeners.append(_TensorBoard(_package("tensorboardX", "report.tensorboard", "tensorboard"), folder, stack))
        if settings.wandb is not None:
            listeners.append(_Wandb(_package("wandb", "report.wandb", "wandb"), settings.wandb, folder, stack))
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


def _package(module: str, key: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(
            "report.missing-package",
            f"{key} needs a package that is not installed.",
            fix=f'pip install "lorafusion-jax[{extra}]"',
        ) from None
