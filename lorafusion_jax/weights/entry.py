"""Quantised kernels in a folder: all their arrays in one file, and an index with their places and sampled digests.

`weights.bin` holds whole arrays one after another, each in C order. So any mesh reads its parts by byte range, whatever
mesh the writer had. `index.json` holds `{"arrays": {name: {"start", "bytes", "sampled"}}}`, and what the folder is for.
Never imports jax.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lorafusion_jax.digests import BLOCK, sample_offsets
from lorafusion_jax.files import replace_text
from lorafusion_jax.weights.table import ArraySpec, StoredKernel

WEIGHTS, INDEX = "weights.bin", "index.json"
Index = tuple[slice, ...]


class DamagedEntry(Exception):
    """The folder does not hold what was written into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Byte range of an array in the file."""

    spec: ArraySpec
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.spec.num_bytes


def entry_places(kernels: Mapping[str, StoredKernel]) -> dict[str, Place]:
    """Returns the places of all arrays, by `array_name`.

    Args:
        kernels: by their names.

    >>> from lorafusion_jax.weights.table import INT8
    >>> kernels = {"q": StoredKernel(INT8, (8, 4)), "k": StoredKernel(INT8, (8, 2))}
    >>> {name: place.start for name, place in entry_places(kernels).items()}
    {'k/scales': 0, 'k/values': 8, 'q/scales': 24, 'q/values': 40}
    """
    places, end = {}, 0
    for kernel, stored in sorted(kernels.items()):
        for array, spec in sorted(stored.arrays.items()):
            places[array_name(kernel, array)] = Place(spec=spec, start=end)
            end += spec.num_bytes
    return places


def array_name(kernel: str, array: str) -> str:
    return f"{kernel}/{array}"


def entry_bytes(places: Mapping[str, Place]) -> int:
    return max((region.stop for region in places.values()), default=0)


def write_entry(
    folder: Path, places: Mapping[str, Place], array: Callable[[str], np.ndarray], about: Mapping[str, Any]
) -> None:
    """Writes an entry into an empty folder, one array at a time.

    Args:
        array: name → the whole array.
        about: what the entry is for; readers of the folder see it.

    Raises:
        OSError: it cannot be written.
    """
    index = {}
    with (folder / WEIGHTS).open("wb") as file:
        for name, region in places.items():
            flat = np.ascontiguousarray(array(name)).reshape(-1).view(np.uint8)
            assert flat.nbytes == region.spec.num_bytes, name
            file.write(flat.data)
            file.flush()
            os.fsync(file.fileno())  # now, so that a writer who is told to stop does not wait for all of it
            sampled = _digest(name, region, lambda start, stop, flat=flat: flat[start:stop].tobytes())
            index[name] = {"start": region.start, "bytes": flat.nbytes, "sampled": sampled}
    replace_text(folder / INDEX, json.dumps({**about, "arrays": index}, indent=1) + "\n")


class Entry:
    """An open entry, whose index and samples are as they were written. Several threads may read it at once.

    The file stays open, so another process that removes the entry does not disturb the reader.

    Args:
        places: from `entry_places`.

    Raises:
        FileNotFoundError: there is no such folder.
        DamagedEntry: its files are not what was written.
    """

    def __init__(self, folder: Path, places: Mapping[str, Place]):
        self.folder, self._places = folder, places
        os.stat(folder)
        try:
            self._file = os.open(folder / WEIGHTS, os.O_RDONLY)
        except OSError as problem:
            raise DamagedEntry(f"{WEIGHTS}: {problem.strerror}") from problem
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def read(self, name: str, index: Index) -> np.ndarray:
        """Reads a rectangle of an array. Only its rows are read from the file.

        Raises:
            OSError: the file cannot be read.
        """
        region = self._places[name]
        shape, dtype = region.spec.shape or (1,), region.spec.numpy_dtype
        rows, *others = index or (slice(None),)
        first, last, _ = rows.indices(shape[0])
        row_bytes = region.spec.num_bytes // max(shape[0], 1)
        flat = np.empty((last - first) * row_bytes, np.uint8)
        self._fill(memoryview(flat), region.start + first * row_bytes)
        values = flat.view(dtype).reshape(last - first, *shape[1:])[:, *others]
        return np.ascontiguousarray(values) if region.spec.shape else values.reshape(())

    def close(self) -> None:
        os.close(self._file)

    def _fill(self, target: memoryview, start: int) -> None:
        while target:
            if not (count := os.preadv(self._file, [target], start)):
                raise OSError(f"{self.folder / WEIGHTS} was truncated while it was read")
            target, start = target[count:], start + count

    def _check(self) -> None:
        try:
            index = json.loads((self.folder / INDEX).read_bytes())["arrays"]
            size = os.fstat(self._file).st_size
            if size != entry_bytes(self._places):
                raise DamagedEntry(f"{WEIGHTS}: it has {size} bytes instead of {entry_bytes(self._places)}")
            for name, region in self._places.items():
                record = {"start": region.start, "bytes": region.spec.num_bytes, "sampled": self._digest(name, region)}
                if index.get(name) != record:
                    raise DamagedEntry(f"{WEIGHTS}: {name} differs from its digest in {INDEX}")
        except OSError as problem:
            raise DamagedEntry(problem.strerror or str(problem)) from problem
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise DamagedEntry(f"{INDEX}: {type(problem).__name__}: {problem}") from problem

    def _digest(self, name: str, region: Place) -> str:
        return _digest(name, region, lambda start, stop: os.pread(self._file, stop - start, region.start + start))


def _digest(name: str, region: Place, block: Callable[[int, int], bytes]) -> str:
    """Digest of the sampled blocks of an array.

    Args:
        block: (start, stop) within the array → its bytes.
    """
    total, size = hashlib.sha256(), region.spec.num_bytes
    for start in sample_offsets(name, 0, size):
        total.update(block(start, min(start + BLOCK, size)))
    return total.hexdigest()
