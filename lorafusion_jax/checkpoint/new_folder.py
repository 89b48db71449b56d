"""A folder that exists complete, with the digests of its files, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorafusion_jax.checkpoint.digests import write_digests
from lorafusion_jax.errors import CheckpointError, RunError
from lorafusion_jax.files import GONE, PART, remove_folder, sync

NEW, OLD = ".new", ".old"  # endings of the hidden names of a folder on its way


@contextmanager
def new_folder(target: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """Gives a hidden folder beside `target`, which gets that name when the block ends without error.

    SHA256SUMS is written into it first. What a killed process left of an earlier attempt is removed.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "law"
    >>> for text in ("old", "new"):
    ...     with new_folder(place, replace=True) as folder:
    ...         _ = (folder / "note.txt").write_text(text)
    >>> (place / "note.txt").read_text(), [folder.name for folder in place.parent.iterdir()]
    ('new', ['law'])

    Args:
        replace: takes the place of a folder that is there; the old one stays until then.

    Raises:
        CheckpointError: `export.exists`, the target is a file or a folder with something in it; `export.in-use`,
            another process is writing it.
        RunError: `save.no-space` or `save.failed`; nothing is left behind.
    """
    target = Path(target)
    if not replace and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            "export.exists",
            f"{target} is there already and is not empty.",
            fix="choose another folder, or remove this one",
        )
    building = target.with_name(f".{target.name}{NEW}")
    with _writing(target):
        building.mkdir(parents=True, exist_ok=True)
        with _only_one(building, target):
            try:
                for left in building.iterdir():  # by a process that was killed
                    shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
                yield building
                write_digests(building)
                _put(building, target)
            finally:
                shutil.rmtree(building, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes what killed processes left among the folders and files in `folder`.

    A folder that was about to be replaced gets its name back if the new one is not there.
    """
    for left in sorted(folder.glob(".*")):
        name = left.name[1 : -len(left.suffix)]
        if left.suffix == OLD and left.is_dir() and not (folder / name).exists():
            left.rename(folder / name)
        elif left.suffix in (NEW, OLD, GONE) or ".tmp-" in left.name:  # .tmp-PID: by earlier versions
            shutil.rmtree(left, ignore_errors=True)
        elif left.suffix == PART:
            left.unlink(missing_ok=True)


def _put(building: Path, target: Path) -> None:
    for path in building.rglob("*"):
        if not path.is_symlink():
            sync(path)
    sync(building)
    if target.is_dir() and any(target.iterdir()):
        old = target.with_name(f".{target.name}{OLD}")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        try:
            building.rename(target)
        except OSError:
            old.rename(target)
            raise
        remove_folder(old)
    else:
        building.rename(target)  # takes the place of an empty folder
    sync(target.parent)


@contextmanager
def _only_one(building: Path, target: Path) -> Iterator[None]:
    """Keeps two processes from writing the same folder; the lock ends with its process."""
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
def _writing(target: Path) -> Iterator[None]:
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
        fix=("free some space" if full else "see that the disk takes files there")
        + " and repeat the command, nothing was left behind; a run goes on with lorafusion resume",
    )
