"""Optional trackers: TensorBoard and Weights & Biases, loaded only when a job asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorafusion_jax.config.schema import ReportSettings
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.report.events import Event, Listener


@contextmanager
def trackers(settings: ReportSettings, folder: Path) -> Iterator[list[Listener]]:
    """Opens the trackers that a job asks for and closes them at the end.

    Raises:
        ConfigError: the package of a tracker is not installed.
    """
    with _tensorboard(settings, folder) as board, _wandb(settings, folder) as run:
        yield [*board, *run]


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event under the names that users look for: `adapter/<name>/loss`, …"""
    prefix = f"adapter/{event.adapter}/" if event.adapter else "run/"
    return {prefix + key: value for key, value in event.values.items() if isinstance(value, int | float)}


@contextmanager
def _tensorboard(settings: ReportSettings, folder: Path) -> Iterator[list[Listener]]:
    if not settings.tensorboard:
        yield []
        return
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise _missing("report.tensorboard", "tensorboard") from None
    with SummaryWriter(str(folder / "tensorboard")) as writer:

        def write(event: Event) -> None:
            if event.kind in ("step", "eval", "slot"):
                for name, value in scalars(event).items():
                    writer.add_scalar(name, value, event.step if event.step is not None else event.slot)

        yield [write]


@contextmanager
def _wandb(settings: ReportSettings, folder: Path) -> Iterator[list[Listener]]:
    if settings.wandb is None:
        yield []
        return
    try:
        import wandb
    except ImportError:
        raise _missing("report.wandb", "wandb") from None
    run = wandb.init(project=settings.wandb, name=folder.name, dir=str(folder))

    def write(event: Event) -> None:
        if event.kind in ("step", "eval", "slot"):
            run.log(scalars(event) | {"slot": event.slot})

    try:
        yield [write]
    finally:
        run.finish()


def _missing(key: str, extra: str) -> ConfigError:
    return ConfigError("report.missing-package", f"{key} needs a package that is not installed.",
                       fix=f'pip install "lorafusion-jax[{extra}]"')
