"""Writing files so that a crash or a full disk leaves the old one or the new one."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path

PART, GONE = ".part", ".gone"  # endings of the hidden names that a killed process may leave


def replace_text(path: Path, text: str) -> None:
    """Writes a whole file or nothing; what is written later comes after it on the disk, too.

    >>> import tempfile
    >>> note = Path(tempfile.mkdtemp()) / "note.txt"
    >>> replace_text(note, "old"); replace_text(note, "new")
    >>> note.read_text(), len(list(note.parent.iterdir()))
    ('new', 1)
    """
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """`replace_text` for bytes."""
    part = path.with_name(f".{path.name}{PART}")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def remove_folder(folder: Path) -> None:
    """Removes a folder under another name, so that a crash leaves no half of it under its own."""
    gone = folder.with_name(f".{folder.name}{GONE}")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone)


def sync(path: Path) -> None:
    """Waits until a file, or the list of a folder where the file system can, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():
            os.fsync(handle)
    finally:
        os.close(handle)
