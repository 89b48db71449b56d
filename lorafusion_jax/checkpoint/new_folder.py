"""A folder that exists complete or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorafusion_jax.errors import CheckpointError, RunError


@contextmanager
def new_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a hidden folder beside `target`, which gets that name when the block ends without error.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "law"
    >>> with new_folder(place) as folder:
    ...     _ = (folder / "note.txt").write_text("done")
    >>> [file.name for file in place.iterdir()]
    ['note.txt']

    Raises:
        CheckpointError: `export.exists`, the target is a file or a folder with something in it.
        RunError: `save.no-space` or `save.failed`; nothing is left behind.
    """
    target = Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            "export.exists",
            f"{target} is there already and is not empty.",
            fix="choose another folder, or remove this one",
        )
    building = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        yield building
        for file in building.rglob("*"):
            if file.is_file():
                _flush(file)
        building.rename(target)  # takes the place of an empty folder
    except OSError as problem:
        raise _write_error(target, problem) from problem
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _flush(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _write_error(target: Path, problem: OSError) -> RunError:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(
            "save.no-space",
            f"there is no space for {target}.",
            where=str(target.parent),
            why=str(problem),
            fix="free some space and repeat the command; nothing was left behind",
        )
    return RunError("save.failed", f"{target} could not be written.", where=str(target.parent), why=str(problem))
