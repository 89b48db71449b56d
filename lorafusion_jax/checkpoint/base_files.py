"""Digests of the base model's files: of all bytes up to 4 GB in total, otherwise of headers and sampled blocks.

A sampled digest covers a file's size, its header (names, shapes and offsets of all tensors) and one block per 64 MB of
every tensor, at least one. Another model, another version or an exchanged tensor changes it. A single flipped bit may
not. `--verify-base` compares every byte.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lorafusion_jax.digests import BLOCK, THREADS, digest_of, sample_offsets
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.readable import open_regular

WHOLE_BYTES = 4 * 10**9
PATTERNS = ("config.json", "*.safetensors", "*.safetensors.index.json")
WHOLE, SAMPLED = "whole", "sampled"


def base_digests(directory: Path, *, every_byte: bool = False) -> dict[str, dict[str, str]]:
    """Returns the digests of a base model's configuration and weights.

    Returns:
        "whole": file → digest of all bytes, for a small base or with `every_byte`; "sampled": file → digest of header
        and samples, for a large base.
    """
    files = sorted({file for pattern in PATTERNS for file in directory.glob(pattern)})
    small = sum(file.stat().st_size for file in files) < WHOLE_BYTES
    kinds = {WHOLE: lambda file: digest_of(file.resolve())} if small or every_byte else {}
    kinds |= {} if small else {SAMPLED: _digest_of_samples}
    with ThreadPoolExecutor(THREADS) as pool:
        return {
            kind: dict(zip((file.name for file in files), pool.map(digest, files), strict=True))
            for kind, digest in kinds.items()
        }


def check_base(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]], directory: Path) -> None:
    """Checks that a run continues with the base model that it began with.

    Args:
        before, now: from `base_digests`.

    Raises:
        CheckpointError: `run.base-changed`.
    """
    changed = [
        f"{name} {_describe_change(before[kind].get(name), now[kind].get(name))}"
        for kind in before.keys() & now.keys()
        for name in sorted(before[kind].keys() | now[kind].keys())
        if before[kind].get(name) != now[kind].get(name)
    ]
    if not before.keys() & now.keys():
        changed = ["its size passed 4 GB or fell below"]
    if changed:
        raise CheckpointError(
            "run.base-changed",
            "the base model has changed since this run started.",
            where=str(directory),
            why="; ".join(changed),
            fix="restore the files, or start a new run with lorafusion train",
        )


def _describe_change(before: str | None, now: str | None) -> str:
    return "is new" if before is None else "is gone" if now is None else "has other content"


def _digest_of_samples(file: Path) -> str:
    if file.suffix != ".safetensors":
        return digest_of(file.resolve())
    total = hashlib.sha256()
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(8)
        header = stream.read(min(int.from_bytes(start, "little"), size))
        total.update(str(size).encode() + start + header)
        for offset in _samples(header, size):
            total.update(os.pread(stream.fileno(), BLOCK, offset))
    return total.hexdigest()


def _samples(header: bytes, size: int) -> Iterator[int]:
    """Yields the offsets of the samples of every tensor."""
    begin = 8 + len(header)
    try:
        spans = {name: entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"}
        places = [(name, begin + int(start), begin + int(stop)) for name, (start, stop) in spans.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # loading reports what is wrong
        places = [("", begin, size)]
    for name, start, stop in places:
        yield from sample_offsets(name, start, stop)


def commit_of(directory: Path) -> str | None:
    """Returns the commit of a model in the hub's cache: the name of its folder."""
    path: Any = directory.resolve()
    return path.name if path.parent.name == "snapshots" else None
