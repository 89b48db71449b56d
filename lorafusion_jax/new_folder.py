"""Writes folders atomically, with the digests of their files."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorafusion_jax.digests import write_digests
from lorafusion_jax.errors import CheckpointError, RunError
from lorafusion_jax.files import GONE, PART, make_folder, remove_folder, sync

NEW, OLD = ".new", ".old"  # suffixes of hidden temporary folders


@contextmanager
def new_folder(target: str | os.PathLike[str], *, replace: bool = False, digests: bool = True) -> Iterator[Path]:
    """Yields a hidden temporary folder, which is renamed to `target` when the block ends without error.

    SHA256SUMS is written into it first. Files that a killed process left in it are removed.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "law"
    >>> for text in ("old", "new"):
    ...     with new_folder(place, replace=True) as folder:
    ...         _ = (folder / "note.txt").write_text(text)
    >>> (place / "note.txt").read_text(), [folder.name for folder in place.parent.iterdir()]
    ('new', ['law'])

    Args:
        replace: replace an existing folder; it stays until the new one is complete.
        digests: write SHA256SUMS, which reads every byte again.

    Raises:
        CheckpointError: `export.exists`, the target is a file or a folder that is not empty; `export.in-use`, another
            process is writing it.
        RunError: `save.no-space` or `save.failed`; no files remain.
    """
    target = Path(target)
    if not replace and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            "export.exists",
            f"{target} already exists and is not empty.",
            fix="choose another folder, or remove this one",
        )
    building = target.with_name(f".{target.name}{NEW}")
    with _reporting_write_errors(target):
        make_folder(building)
        with _only_one(building, target):
            try:
                for leftover in building.iterdir():  # from a killed process
                    shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
                yield building
                if digests:
                    write_digests(building)
                _replace(building, target)
            finally:
                shutil.rmtree(building, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes temporary files and folders of killed processes in `folder`.

    If a process was killed while it replaced a folder, the old folder is restored.
    """
    for leftover in sorted(folder.glob(".*")):
        name = leftover.name[1 : -len(leftover.suffix)]
        if leftover.suffix == OLD and leftover.is_dir() and not (folder / name).exists():
            leftover.rename(folder / name)
        elif leftover.suffix in (NEW, OLD, GONE):
            shutil.rmtree(leftover, ignore_errors=True)
        elif leftover.suffix == PART:
            leftover.unlink(missing_ok=True)


def remove_unlocked(folder: Path) -> None:
    """Removes a temporary folder of a killed process. A process that lives holds a lock on it, as in `new_folder`.

    Raises:
        OSError: it is locked, or cannot be removed.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(handle)


def _replace(building: Path, target: Path) -> None:
    for path in building.rglob("*"):
        if not path.is_symlink():
            sync(path)
    sync(building)
    if target.is_dir() and any(target.iterdir()):
        backup = target.with_name(f".{target.name}{OLD}")
        shutil.rmtree(backup, ignore_errors=True)
        target.rename(backup)
        try:
            building.rename(target)
        except OSError:
            backup.rename(target)
            raise
        remove_folder(backup)
    else:
        building.rename(target)  # also replaces an empty folder
    sync(target.parent)


@contextmanager
def _only_one(building: Path, target: Path) -> Iterator[None]:
    """Prevents two processes from writing the same folder. The lock ends with its process."""
    handle = os.open(building, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                "export.in-use", f"another process is writing {target}.", fix="wait for it, or choose another folder"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


@contextmanager
def _reporting_write_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise _write_error(target, problem) from problem


def _write_error(target: Path, problem: OSError) -> RunError:
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    return RunError(
        "save.no-space" if full else "save.failed",
        f"there is no space for {target}." if full else f"{target} could not be written.",
        where=str(target.parent),
        why=str(problem),
        fix=("free some space" if full else "make sure that the disk is writable")
        + " and repeat the command; no files were left. lorafusion resume continues a run",
    )
