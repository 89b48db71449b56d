"""Folders of arrays under names that orbax and tensorstore take as they are.

Orbax looks for its files by a pattern that begins with the folder, so in a folder `x[1]` it finds none; tensorstore
takes a backslash for a slash.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIGNS = frozenset("*?[]\\")  # of patterns, and a backslash
MANIFEST, UNMERGED = "manifest.ocdbt", "ocdbt.process_0"


@contextmanager
def plain_name(folder: Path) -> Iterator[Path]:
    """Yields a path to a folder without signs of patterns: the folder itself, or a link to it."""
    if not SIGNS & set(str(folder)):
        yield folder
        return
    parent = None if not SIGNS & set(tempfile.gettempdir()) else "/tmp"
    with tempfile.TemporaryDirectory(prefix="lorafusion-", dir=parent) as temporary:
        link = Path(temporary) / "folder"
        link.symlink_to(folder, target_is_directory=True)
        yield link


@contextmanager
def merged(arrays: Path) -> Iterator[Path]:
    """Yields a folder of arrays as it should be: one that orbax did not find again after writing lacks its last step.

    What a process has written is then a database of its own in a folder below, which is linked to where it belongs.
    """
    process = arrays / UNMERGED
    if (arrays / MANIFEST).exists() or not (process / MANIFEST).is_file():
        yield arrays
        return
    with tempfile.TemporaryDirectory(prefix="lorafusion-") as temporary:
        for path in (*arrays.iterdir(), *process.iterdir()):
            (Path(temporary) / path.name).symlink_to(path.resolve())
        yield Path(temporary)
