"""Atomic writes: after a crash or on a full disk, either the old or the new file exists. And where caches are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

import platformdirs

PART, GONE = ".part", ".gone"  # suffixes of the hidden names that a killed process may leave


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Names a file in an error of the file system: an error of writing to an open file does not."""
    try:
        yield
    except OSError as problem:
        if problem.filename is None:
            problem.filename = str(path)
        raise


def replace_text(path: Path, text: str) -> None:
    """Writes a file atomically and durably, so later writes cannot reach the disk before it.

    >>> import tempfile
    >>> note = Path(tempfile.mkdtemp()) / "note.txt"
    >>> replace_text(note, "old"); replace_text(note, "new")
    >>> note.read_text(), len(list(note.parent.iterdir()))
    ('new', 1)
    """
    replace_bytes(path, text.encode())


def write_output(path: Path, text: str) -> None:
    """`replace_text` for a file that a user names. A link, a pipe or a device, as /dev/null, is written to."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
    else:
        replace_text(path, text)


def replace_bytes(path: Path, content: bytes) -> None:
    """`replace_text` for bytes."""
    part = path.with_name(f".{path.name}{PART}")
    with naming(path):
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            sync(path.parent)
        except OSError:
            with suppress(OSError):
                part.unlink()
            raise


def written_name(name: str) -> str:
    """The file that the hidden name of a write under way stands for; another name as it is.

    >>> written_name("runs/exp1/.report.html.part"), written_name("law.yaml")
    ('runs/exp1/report.html', 'law.yaml')
    """
    path = Path(name)
    return str(path.with_name(path.name[1 : -len(PART)])) if path.match(f".*{PART}") else name


def remove_folder(folder: Path) -> None:
    """Renames a folder before removing it, so that a crash does not leave a part of it under its name."""
    trash = folder.with_name(f".{folder.name}{GONE}")
    shutil.rmtree(trash, ignore_errors=True)
    folder.rename(trash)
    shutil.rmtree(trash)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it, durably: each is an entry of the one above."""
    for path in make_folders(folder):
        sync(path.parent)


def make_folders(folder: Path) -> list[Path]:
    """Makes a folder and those above it, and returns the new ones, the innermost first.

    `Path.mkdir` recurses for each of them, and a path of 4096 letters may have 2000.
    """
    missing = list(takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
    if not missing:
        folder.mkdir(exist_ok=True)  # raises if it is a file
    return missing


def sync(path: Path) -> None:
    """Waits until a file, or a directory entry if the file system supports it, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def user_cache(name: str) -> Path:
    """The user's cache of that name, `$XDG_CACHE_HOME/lorafusion/NAME` on Linux. It may not exist yet."""
    return platformdirs.user_cache_path("lorafusion") / name
