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


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """Gives a place for a complete folder, which takes the place of `target` when the block ends without error.

    What was there stays until then. A crash in the middle leaves the old or the new one, or for a moment neither.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "law"
    >>> for text in ("old", "new"):
    ...     with replaced_folder(place) as folder, new_folder(folder) as draft:
    ...         _ = (draft / "note.txt").write_text(text)
    >>> (place / "note.txt").read_text(), [folder.name for folder in place.parent.iterdir()]
    ('new', ['law'])

    Raises:
        RunError: `save.no-space` or `save.failed`.
    """
    fresh, old = (target.with_name(f".{target.name}.{end}") for end in ("new", "old"))
    for left in (fresh, old):  # by a crash
        shutil.rmtree(left, ignore_errors=True)
    try:
        yield fresh
        if target.exists():
            target.rename(old)
        fresh.rename(target)
    except OSError as problem:
        raise _write_error(target, problem) from problem
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        for left in (fresh, old):
            shutil.rmtree(left, ignore_errors=True)


def _flush(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _write_error(target: Path, problem: OSError) -> RunError:
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    return RunError(
        "save.no-space" if full else "save.failed",
        f"there is no space for {target}." if full else f"{target} could not be written.",
        where=str(target.parent),
        why=str(problem),
        fix=("free some space" if full else "see that the disk takes files there")
        + " and repeat the command, nothing was left behind; a run goes on with lorafusion resume",
    )
