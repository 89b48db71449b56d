"""Cache of quantised base weights on disk, beside the caches of tokens and programs.

The name of an entry covers what determines its bytes: the digests of the base model's files, and the program that
quantises. Entries are written atomically, by one process at a time, and checked when they are opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lorafusion_jax.errors import CheckpointError, RunError
from lorafusion_jax.files import user_cache
from lorafusion_jax.new_folder import new_folder, remove_unlocked
from lorafusion_jax.weights.entry import DamagedEntry, Entry, Place, entry_bytes, write_entry

FORMAT = 1  # of entries, and of how a kernel is read from a checkpoint before it is quantised
SPARE_BYTES = 20 * 10**9  # of the disk, which stay free
UNUSED_S = 30 * 24 * 3600  # entries that no run has read for so long are removed


def weight_cache() -> Path:
    """The folder of all entries, `$XDG_CACHE_HOME/lorafusion/quantised` on Linux; it may be removed any time."""
    return user_cache("quantised")


def entry_folder(base_files: Mapping[str, Mapping[str, str]], program: str) -> Path:
    """Returns the folder of an entry.

    Args:
        base_files: from `base_digests`.
        program: digest of the program that quantises.
    """
    key = json.dumps([FORMAT, base_files, program], sort_keys=True)
    return weight_cache() / hashlib.sha256(key.encode()).hexdigest()[:32]


def open_entry(folder: Path, places: Mapping[str, Place]) -> Entry | None:
    """Opens an entry; None if there is none.

    Raises:
        DamagedEntry: it is not what was written.
    """
    try:
        entry = Entry(folder, places)
    except OSError:
        return None
    with suppress(OSError):
        os.utime(folder)  # the time of its last use
    return entry


def make_room(folder: Path, places: Mapping[str, Place]) -> str | None:
    """Removes entries that are no longer used. Says why an entry cannot be written; None if it can."""
    cache, size = folder.parent, entry_bytes(places)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_unused(cache, folder)
        free = shutil.disk_usage(cache).free
    except OSError as problem:
        return f"{cache} cannot be used: {problem.strerror}"
    if not os.access(cache, os.W_OK):
        return f"{cache} is not writable"
    if free - size < SPARE_BYTES:
        return f"they take {_gb(size)}, {cache} has {_gb(free)} free, and {_gb(SPARE_BYTES)} must stay free"
    return None


def store_entry(
    folder: Path, places: Mapping[str, Place], array: Callable[[str], np.ndarray], about: Mapping[str, Any]
) -> str | None:
    """Writes an entry, or replaces a damaged one.

    Args:
        array: name → the whole array.
        about: see `write_entry`.

    Returns:
        Why it could not be written; None if it was, or if another process writes it or did so before.
    """
    if _is_intact(folder, places):
        return None
    try:
        with new_folder(folder, replace=True, digests=False) as building:
            write_entry(building, places, array, about)
    except CheckpointError:  # `export.in-use`: another process writes it
        return None
    except RunError as problem:
        return None if _is_intact(folder, places) else problem.why
    return None


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _is_intact(folder: Path, places: Mapping[str, Place]) -> bool:
    try:
        entry = open_entry(folder, places)
    except DamagedEntry:
        return False
    if entry is not None:
        entry.close()
    return entry is not None


def _remove_unused(cache: Path, entry: Path) -> None:
    """Removes unused entries, and temporary folders of killed processes (`new_folder` cleans up those of `wanted`)."""
    for folder in cache.iterdir():
        with suppress(OSError):
            if folder.name.startswith("."):
                if entry.name not in folder.name:  # `new_folder` looks after that
                    remove_unlocked(folder)
            elif time.time() - folder.stat().st_mtime > UNUSED_S:
                shutil.rmtree(folder)
