"""Checks the folder of a new run before data and model are read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from lorafusion_jax.checkpoint.begun_folder import StartFile, begun_folder
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.values import as_in_file
from lorafusion_jax.errors import CheckpointError, first_few, quoted

SHOWN = 4  # settings that a message names before it counts the rest


@contextmanager
def new_run_folder(folder: RunFolder, config: JobConfig) -> Iterator[StartFile]:
    """Claims the folder of a new run; see `begun_folder`. Other commands see the run from here on.

    Raises:
        CheckpointError: `run.exists`, `run.no-plan`, `run.folder`, `run.in-use`.
    """
    must_hold_no_run(folder, config)
    must_be_writable(folder.path)
    with begun_folder(folder.path) as begun:
        yield begun


def must_hold_no_run(folder: RunFolder, config: JobConfig) -> None:
    """Checks that the folder holds no run. The error names the settings that differ.

    Raises:
        CheckpointError: `run.exists`, `run.no-plan`.
    """
    folder.must_have_its_plan()
    if not folder.plan_file.exists():
        return
    before = folder.read_config()
    if config.base.revision is None:  # the run has pinned a revision
        config = config.model_copy(update={"base": config.base.model_copy(update={"revision": before.base.revision})})
    differing = [str(difference) for difference in differences(before, config)]
    if not differing:
        raise CheckpointError(
            "run.exists",
            f"{folder.path} already holds a run with these settings.",
            fix=f"lorafusion resume {quoted(folder.path)}   or another --out",
        )
    raise CheckpointError(
        "run.exists",
        f"{folder.path} already holds a run with other settings.",
        why=first_few(differing, SHOWN, "; "),
        fix=f"another --out; lorafusion resume {quoted(folder.path)} continues it with its own settings",
    )


def must_be_writable(path: Path) -> None:
    """Checks that a folder can be created and written. Leaves no files.

    Raises:
        CheckpointError: `run.folder`.
    """
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as problem:
        why = f"{existing} is not writable: {problem.strerror}"
        raise CheckpointError(
            "run.folder",
            f"{path} cannot be a run folder.",
            why=f"{existing} is a file" if existing.is_file() else why,
            fix="--out runs/NAME, a new folder in a place where you may write",
        ) from None


class Difference(NamedTuple):
    """A setting with two values: `adapters.law.optim.lr was 0.0001 and is 0.5`."""

    key: str
    was: object
    now: object

    def __str__(self) -> str:
        return f"{self.key} was {as_in_file(self.was)} and is {as_in_file(self.now)}"


def differences(before: JobConfig, now: JobConfig) -> Iterator[Difference]:
    """Yields the settings that differ."""
    settings_before, settings_now = flat_settings(before), flat_settings(now)
    for name in dict.fromkeys((*settings_before, *settings_now)):
        if settings_before.get(name) != settings_now.get(name):
            yield Difference(name, settings_before.get(name, "absent"), settings_now.get(name, "absent"))


def flat_settings(config: JobConfig) -> dict[str, object]:
    """Returns dotted key → value, with adapters by name, as in overrides."""
    values = config.model_dump(mode="json")
    values["adapters"] = {adapter["name"]: adapter for adapter in values["adapters"]}
    return dict(_leaves(values, ""))


def _leaves(values: dict, prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
