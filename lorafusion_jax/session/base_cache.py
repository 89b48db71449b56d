"""The cached kernels of a quantised base: read instead of the checkpoint's, or written while the run trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lorafusion_jax.checkpoint.base_model import base_identity
from lorafusion_jax.checkpoint.weight_cache import entry_folder, make_room, open_entry, store_entry
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.models import FrozenReader
from lorafusion_jax.models.loading import Weight
from lorafusion_jax.models.naming import Tensor
from lorafusion_jax.models.quantised_kernels import host_copy, program_digest
from lorafusion_jax.report.events import CacheSkipped, FilesDamaged, RunEvent
from lorafusion_jax.session.processes import any_process
from lorafusion_jax.weights.entry import DamagedEntry, Place, array_name, entry_places

BaseFiles = Mapping[str, Mapping[str, str]]  # from `base_digests`


class _Cancelled(Exception):
    """Writing was cancelled."""


@dataclass(slots=True, kw_only=True)
class CachedBase:
    """A base model, the cached form of its kernels, and what is to be cached.

    Attributes:
        reader: reads the base; its kernels from the cache if they are there.
        target: folder of the cache that `store` writes; None: it writes nothing.
        about: what that folder is for.
        notices: events that a user should see.
    """

    reader: FrozenReader
    target: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    notices: list[RunEvent] = field(default_factory=list)
    _quantised: dict[str, jax.Array] = field(default_factory=dict)

    @property
    def hit(self) -> bool:
        """Whether the kernels are in the cache."""
        return self.reader.entry is not None

    def read(self, progress: Callable[[int], None]) -> dict[str, Weight]:
        """Reads the base onto its devices, once; see `FrozenReader.read`."""
        try:
            frozen = self.reader.read(progress)
        finally:
            if self.reader.entry is not None:
                self.reader.entry.close()
        if self.target is not None:  # the stages hold the same arrays, so this takes no memory
            self._quantised = {
                array_name(kernel, name): array
                for kernel, arrays in frozen.items()
                if isinstance(arrays, dict)
                for name, array in arrays.items()
            }
        return frozen

    def store(self, cancelled: Callable[[], bool]) -> None:
        """Writes the kernels that were read to the cache, one array at a time. A failure becomes a notice.

        Args:
            cancelled: whether to stop before the next array; nothing is left then.
        """
        if self.target is None or not self._quantised:
            return

        def array(name: str) -> np.ndarray:
            if cancelled():
                raise _Cancelled
            return host_copy(self._quantised[name])

        try:
            problem = store_entry(self.target, _places(self.reader), array, self.about)
        except _Cancelled:
            return
        except RuntimeError as failure:  # of a device; the run reports it, too
            problem = str(failure).partition("\n")[0]
        finally:
            self._quantised = {}
        if problem is not None:
            self.notices.append(_skipped(problem))


def open_cache(
    config: JobConfig, full_reader: FrozenReader, base_files: BaseFiles | None, tensors: Sequence[Tensor] | None = None
) -> CachedBase:
    """Looks for the kernels of a base in the cache.

    Collective over processes: all of them read their cache, or all quantise, which computes together.

    Args:
        full_reader: reads all of the base.
        base_files: from `base_digests`; None: the cache is not used.
        tensors: those that this process reads (None: all).
    """
    reader = full_reader if tensors is None else replace(full_reader, tensors=tensors)
    kernels = full_reader.kernels
    if base_files is None or not kernels or not config.base.cache_quantized:
        return CachedBase(reader=reader)
    places, notices = _places(full_reader), list[RunEvent]()
    target = entry_folder(base_files, program_digest(kernels.values()))
    try:
        entry = open_entry(target, places)
    except DamagedEntry as damage:
        entry = None
        text = f"damaged: {target}: {damage}. The base is quantised again from its checkpoint"
        notices.append(FilesDamaged(text=text))
    if not any_process(entry is None):
        return CachedBase(reader=replace(reader, entry=entry))
    if entry is not None:  # another process lacks it
        entry.close()
        return CachedBase(reader=reader)
    if len(reader.tensors) < len(full_reader.tensors):
        problem = "its kernels are in several processes"
    else:
        problem = make_room(target, places)
    if problem is not None:
        return CachedBase(reader=reader, notices=[*notices, _skipped(problem)])
    about = {"model": base_identity(config)[0], "quantize": config.base.quantize, "written": time.strftime("%F %T")}
    return CachedBase(reader=reader, target=target, about=about, notices=notices)


def _places(reader: FrozenReader) -> dict[str, Place]:
    return entry_places(reader.kernels)


def _skipped(problem: str) -> CacheSkipped:
    return CacheSkipped(
        text=f"the quantised base is not cached: {problem}. The next start quantises it again "
        "(base.cache_quantized: false turns this off)"
    )
