"""Cache of tokenised data sets on disk.

The key covers everything that determines the content: the bytes of the source, the settings, the tokenizer, its
template and the code of this package. So an entry is never stale. Entries are plain arrays (no pickle) and are written
atomically. A damaged entry is computed again.

An entry is a file of arrays: the length and the checksum of all that follows, the length of a header in JSON, the
header, and the bytes of the arrays. numpy's archives take four times as long to read, as each array of a small set has
a header of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data.disk_arrays import map_array
from lorafusion_jax.data.rows import RawSource
from lorafusion_jax.data.tokenized_set import DataReport, TokenizedSet
from lorafusion_jax.data.tokenizer import Tokenizer
from lorafusion_jax.files import user_cache

ARRAYS = ("tokens", "loss_mask", "offsets", "rows")
OPTIONAL = ("segment_lengths", "answer")
NAMED = ("numbers", "values")  # dictionaries of arrays
SMALL = ".tokens"  # suffix of a file
HEAD, ALIGNED = struct.Struct("<QQQ"), 64  # bytes of the rest, its checksum, bytes of the header; arrays begin so
LARGE = ".set"  # suffix of the folder of a large set
LARGEST_BYTES = 2 << 30  # size of all entries; the least recently used are removed first
UNSEEN: dict[Path, int] = {}  # bytes that this process has stored in a folder since it listed the entries


def token_cache() -> Path:
    """The folder of all entries, `$XDG_CACHE_HOME/lorafusion/tokens` on Linux; it may be removed any time."""
    return user_cache("tokens")


def entry_path(
    raw: RawSource, settings: DataSettings, tokenizer: Tokenizer, cache_dir: Path | None = None, *, reader: str = ""
) -> Path:
    """Returns the file of the cache entry for this source, settings and tokenizer.

    Args:
        cache_dir: cache folder (None: the user's cache folder).
        reader: source code of an objective that reads the rows.
    """
    folder = cache_dir or token_cache()
    options = settings.model_dump(exclude={"train", "eval"})  # the bytes matter, not the file name
    key = json.dumps(
        [
            raw.digest,
            raw.kind,
            options,
            tokenizer.digest,
            tokenizer.template_hash,
            tokenizer.adds_bos,
            tokenizer.eos_id,
            tokenizer.stop_ids,
            tokenizers.__version__,
            _code_digest(),
            reader,
        ],
        sort_keys=True,
    )
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{SMALL}"


def load(entry: Path) -> tuple[dict[str, Any], dict] | None:
    """Reads an entry: arrays and report. Returns None if it is missing or damaged."""
    if (folder := entry.with_suffix(LARGE)).is_dir():
        return _load_folder(folder)
    try:
        header, stored = _unpack(entry.read_bytes())
        arrays: dict[str, Any] = {
            name: stored[name] for name in (*ARRAYS, *OPTIONAL) if name in ARRAYS or name in stored
        }
        for kind in NAMED:
            start = f"{kind}."
            arrays[kind] = {name.removeprefix(start): stored[name] for name in stored if name.startswith(start)}
        report = header["report"]
        os.utime(entry)
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    return arrays, report


def _pack(arrays: dict[str, np.ndarray], report: dict) -> bytes:
    """The content of an entry's file."""
    contents = [np.ascontiguousarray(array).tobytes() for array in arrays.values()]
    shapes = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    header = json.dumps({"arrays": shapes, "report": report}).encode()
    header += b" " * (-(HEAD.size + len(header)) % ALIGNED)
    rest = header + b"".join(content + b"\0" * (-len(content) % ALIGNED) for content in contents)
    return HEAD.pack(len(rest), zlib.crc32(rest), len(header)) + rest


def _unpack(content: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """Inverse of `_pack`. The arrays are views of the content and cannot be written to.

    Raises:
        ValueError, struct.error: it is damaged.
    """
    size, checksum, header_size = HEAD.unpack_from(content)
    rest = memoryview(content)[HEAD.size :]
    if len(rest) != size or zlib.crc32(rest) != checksum:
        raise ValueError("damaged")
    header = json.loads(bytes(rest[:header_size]))
    arrays: dict[str, np.ndarray] = {}
    start = HEAD.size + header_size
    for name, code, shape in header["arrays"]:
        dtype, count = np.dtype(code), math.prod(shape)
        arrays[name] = np.frombuffer(content, dtype, count, start).reshape(shape) if count else np.zeros(shape, dtype)
        start += -(-count * dtype.itemsize // ALIGNED) * ALIGNED
    return header, arrays


def store(entry: Path, samples) -> None:
    """Writes an entry atomically. A full or read-only disk is no error: the next run tokenises again."""
    arrays = {name: getattr(samples, name) for name in (*ARRAYS, *OPTIONAL)}
    arrays |= {f"{kind}.{name}": array for kind in NAMED for name, array in getattr(samples, kind).items()}
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=entry.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                arrays = {name: array for name, array in arrays.items() if array is not None}
                file.write(_pack(arrays, dataclasses.asdict(samples.report)))
            os.replace(name, entry)
        except OSError:
            os.unlink(name)
            raise
        _shrink_at_times(entry)
    except OSError:
        return


def store_folder(entry: Path, samples, arrays: Path) -> None:
    """Makes an entry of the arrays of a large set, which are on disk. They stay mapped, whatever becomes of it."""
    small = {name: getattr(samples, name) for name in ("offsets", "rows", "segment_lengths")}
    small |= {f"numbers.{name}": array for name, array in samples.numbers.items()}
    tokens = ("tokens", "loss_mask", *(["answer"] if samples.answer is not None else []))
    large = {name: getattr(samples, name).dtype.str for name in tokens}
    large |= {f"values.{name}": array.dtype.str for name, array in samples.values.items()}
    head = {"report": dataclasses.asdict(samples.report), "large": large, "digest": samples.digest}
    folder = entry.with_suffix(LARGE)
    try:
        np.savez(arrays / "small.npz", **{name: array for name, array in small.items() if array is not None})
        (arrays / "head.json").write_text(json.dumps(head), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(arrays, folder)
        _shrink_at_times(folder)
    except OSError:
        return


def _load_folder(folder: Path) -> tuple[dict[str, Any], dict] | None:
    try:
        head = json.loads((folder / "head.json").read_text(encoding="utf-8"))
        arrays: dict[str, Any] = {"numbers": {}, "values": {}}
        with np.load(folder / "small.npz", allow_pickle=False) as archive:
            loaded = {name: archive[name] for name in archive}
        loaded |= {name: map_array(folder, name, np.dtype(dtype)) for name, dtype in head["large"].items()}
        for name, array in loaded.items():
            kind, _, inner = name.partition(".")
            if inner:
                arrays[kind][inner] = array
            else:
                arrays[kind] = array
        os.utime(folder)
        report = head["report"]
        # Reading all of it notices damage, and the digest of a run's data is needed anyway.
        is_intact = TokenizedSet(**arrays, report=DataReport(**report)).digest == head["digest"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    return (arrays, report) if is_intact else None


def _shrink_at_times(entry: Path) -> None:
    """Listing a folder for each of a thousand entries would cost more than to tokenise them."""
    folder, unseen = entry.parent, UNSEEN.get(entry.parent)
    if unseen is None or unseen + _size(entry) > LARGEST_BYTES // 16:
        _shrink(folder)
        UNSEEN[folder] = 0
    else:
        UNSEEN[folder] = unseen + _size(entry)


def _shrink(folder: Path) -> None:
    """Removes the entries that were not used for the longest time, but never the newest one."""
    entries = [*folder.glob(f"*{SMALL}"), *folder.glob("*.npz"), *folder.glob(f"*{LARGE}")]
    newest_first = sorted(((entry.stat().st_mtime, _size(entry), entry) for entry in entries), reverse=True)
    total_bytes = 0
    for number, (_, size, entry) in enumerate(newest_first):
        total_bytes += size
        if total_bytes > LARGEST_BYTES and number:
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)


def _size(entry: Path) -> int:
    return sum(file.stat().st_size for file in (entry.iterdir() if entry.is_dir() else (entry,)))


@functools.cache
def _code_digest() -> str:
    package = Path(__file__).parent.parent
    files = sorted([*(package / "data").rglob("*.py"), *(package / "objective").glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
