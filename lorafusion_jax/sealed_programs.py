"""Seals the compiled programs that are kept: an entry that was damaged, cut or exchanged is compiled again.

jax runs what it finds under a key. A program of another key reads arrays that it was not made for, so each entry begins
with the SHA-256 of its key and its content. jax has no public way to give it a cache of one's own: this is the one file
that knows its private names.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import jax
import numpy as np
from jax._src import cache_key, compilation_cache
from jax._src.compilation_cache_interface import CacheInterface
from jax._src.lru_cache import LRUCache

SIZE = hashlib.sha256().digest_size


class SealedCache(CacheInterface):
    """A cache of files whose entries begin with a seal."""

    def __init__(self, files: LRUCache):
        self._files = files

    @property
    def _path(self) -> Path:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Path(self._files.path)

    def get(self, key: str) -> bytes | None:
        entry = self._files.get(key)
        if entry is None:
            return None
        if entry[:SIZE] == _seal(key, entry[SIZE:]):
            return entry[SIZE:]
        (self._path / f"{key}-cache").unlink(missing_ok=True)  # otherwise it is never written again
        return None

    def put(self, key: str, value: bytes) -> None:
        self._files.put(key, _seal(key, value) + value)


def seal_programs() -> None:
    """Makes jax seal what it writes to its cache from here on, and read what is sealed only."""
    compilation_cache.get_file_cache = _sealed_files


class _Bytes(list):
    """What a digest is made of."""

    def update(self, value: bytes) -> None:
        self.append(value)


def topology() -> bytes:
    """What keys of compiled programs say of the devices: also how many this process sees."""
    config_bytes = _Bytes()
    cache_key._hash_accelerator_config(config_bytes, np.array(jax.local_devices()[:1]))
    return b"".join(config_bytes)


def use_topology(described: bytes) -> None:
    """Makes jax keep programs for a process whose `topology` this is, on a device of the same kind."""
    cache_key._hash_accelerator_config = lambda digest, devices: digest.update(described)


def _sealed_files(path: str) -> tuple[CacheInterface, str]:
    return SealedCache(LRUCache(path, max_size=jax.config.jax_compilation_cache_max_size)), path


def _seal(key: str, value: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + value).digest()
