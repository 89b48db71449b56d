"""Arrays that grow by appending, first in memory and on disk once they are large."""

from __future__ import annotations

import mmap
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lorafusion_jax.errors import DataError

BLOCK_NUMBERS = 1 << 22
MOST_IN_MEMORY = 64 << 20  # bytes of all arrays of a set
SUFFIX = ".array"


class GrowingArrays:
    """Named arrays of one dimension, or of rows of equal width.

    Args:
        folder: where to write once the arrays are large; made if necessary.
    """

    def __init__(self, folder: Path):
        self._folder, self._draft = folder, None
        self._parts: dict[str, list[np.ndarray]] = {}
        self._files: dict[str, BinaryIO] = {}
        self._shapes: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        self._bytes = 0

    def append(self, name: str, array: np.ndarray) -> None:
        """Adds an array at the end of another of the same name.

        Raises:
            DataError: `data.no-space`.
        """
        self._shapes.setdefault(name, (array.dtype, array.shape[1:]))
        if name in self._files:
            self._write(name, array)
            return
        self._parts.setdefault(name, []).append(array)
        self._bytes += array.nbytes
        if self._bytes > MOST_IN_MEMORY:
            self._spill()

    def finish(self) -> tuple[dict[str, np.ndarray], Path | None]:
        """Returns all arrays, and the folder that holds them if they are on disk."""
        if self._draft is None:
            return {name: np.concatenate(parts) for name, parts in self._parts.items()}, None
        self._spill()
        for file in self._files.values():
            file.close()
        arrays = {name: map_array(self._draft, name, *shape) for name, shape in self._shapes.items()}
        return arrays, self._draft

    def discard(self) -> None:
        """Removes the files. Arrays that are mapped stay readable."""
        for file in self._files.values():
            file.close()
        if self._draft is not None:
            shutil.rmtree(self._draft, ignore_errors=True)

    def _spill(self) -> None:
        if self._draft is None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._draft = Path(tempfile.mkdtemp(dir=self._folder, suffix=".part"))
            except OSError as problem:
                raise _no_space(self._folder, problem) from None
        for name, parts in self._parts.items():
            if name not in self._files:
                self._files[name] = (self._draft / f"{name}{SUFFIX}").open("wb")
            for part in parts:
                self._write(name, part)
        self._parts.clear()

    def _write(self, name: str, array: np.ndarray) -> None:
        try:
            self._files[name].write(np.ascontiguousarray(array).data)
        except OSError as problem:
            raise _no_space(self._folder, problem) from None


def map_array(folder: Path, name: str, dtype: np.dtype, width: tuple[int, ...] = ()) -> np.ndarray:
    """Maps an array of a folder into memory, for reading."""
    file = folder / f"{name}{SUFFIX}"
    if not file.stat().st_size:
        return np.zeros((0, *width), dtype)
    return np.memmap(file, dtype, mode="r").reshape(-1, *width)


def blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields an array in parts. What was read of a mapped array does not stay in memory."""
    for start in range(0, len(array), BLOCK_NUMBERS):
        yield array[start : start + BLOCK_NUMBERS]
        release(array)


def release(array: np.ndarray) -> None:
    """Lets the system forget what was read of a mapped array; it is read again where it is used."""
    owner = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, mmap.mmap):
        owner.madvise(mmap.MADV_DONTNEED)


def _no_space(folder: Path, problem: OSError) -> DataError:
    return DataError(
        "data.no-space",
        "the tokens of a large data set cannot be written.",
        where=str(folder),
        why=str(problem),
        fix="a cache folder with room for about 5 bytes a token; XDG_CACHE_HOME chooses it",
    )
