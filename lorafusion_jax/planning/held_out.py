"""How held-out sets are evaluated: the size of their microbatches, and which adapters begin with one loss."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.config.references import reference_of
from lorafusion_jax.config.schema import AdapterConfig, BatchSettings, MeshSettings
from lorafusion_jax.data.tokenized_set import TokenizedSet
from scheduling import AdapterJob, make_plan

PARTS = (1, 2, 4, 8)  # of the largest microbatch: each size that a set uses compiles once
SMALLEST = 512  # smaller ones gain little, see the next line
PASS_TOKENS = 400  # a pass costs as much as so many tokens beside its own (8B, one H200: benchmarks/LOG.md)
MOST_FILLED = 8  # microbatches of the largest size, above which the last one's padding matters no more


class SetSize(NamedTuple):
    """Microbatches of a held-out set.

    Attributes:
        tokens: of each, with padding.
        count: how many there are, on each replica.
    """

    tokens: int
    count: int


def size_of_set(
    lengths: Sequence[int] | np.ndarray, batch: BatchSettings, mesh: MeshSettings, most_samples: int | None = None
) -> SetSize:
    """Chooses the microbatches that a pass over a set takes least time with.

    It depends on the set alone, so an adapter is evaluated in the same way whoever trains beside it.

    Args:
        lengths: of its samples.
        most_samples: in a microbatch (None: as many as fit).

    >>> batch, mesh = BatchSettings(capacity_tokens=8192), MeshSettings()
    >>> size_of_set([300] * 5, batch, mesh), size_of_set([300] * 5 + [1700], batch, mesh)
    (SetSize(tokens=2048, count=1), SetSize(tokens=4096, count=1))
    """
    key = np.asarray(lengths, np.int64).tobytes()
    return _size_of_set(key, batch.largest, batch.tile_tokens, mesh.replicas, mesh.stages, most_samples)


@lru_cache(maxsize=4096)  # adapters of a search have one set
def _size_of_set(key: bytes, largest: int, tile: int, replicas: int, stages: int, most_samples: int | None) -> SetSize:
    lengths = np.sort(np.frombuffer(key, np.int64))[::-1]
    sizes = {-(-largest // (part * tile)) * tile for part in PARTS}
    least = max(int(lengths.max(initial=1)), SMALLEST)
    if lengths.sum() > MOST_FILLED * largest:
        sizes = {largest}
    choices = []
    for size in {largest, *(size for size in sizes if size >= least)}:
        count = -(-_num_filled(lengths, size, most_samples) // replicas)
        choices.append(((count + stages - 1) * (size + PASS_TOKENS), size, count))
    _, tokens, count = min(choices)
    return SetSize(tokens, count)


def _num_filled(lengths: np.ndarray, size: int, most_samples: int | None) -> int:
    """How many microbatches the samples fill, the longest first, each where it fits first."""
    room, samples = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    num_used = 0
    for length in lengths:
        fits = room[:num_used] >= length
        if most_samples is not None:
            fits &= samples[:num_used] < most_samples
        index = int(fits.argmax()) if fits.any() else num_used
        if index == num_used:
            room[index], num_used = size, num_used + 1
        room[index] -= length
        samples[index] += 1
    return max(num_used, 1)


def pack_set(
    lengths: np.ndarray, capacity_tokens: int, batch: BatchSettings, mesh: MeshSettings
) -> Sequence[Sequence[Sequence[int]]]:
    """Packs the samples of a set alone, for a forward pass over all of it: [slots, replicas, samples]."""
    return _pack_set(lengths.astype(np.int64).tobytes(), capacity_tokens, batch.tile_tokens, mesh.replicas)


@lru_cache(maxsize=1024)
def _pack_set(key: bytes, capacity_tokens: int, tile: int, replicas: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    tokens = np.frombuffer(key, np.int64).tolist()
    plan = make_plan(
        [AdapterJob(name="set", sample_tokens=tokens, global_batch=len(tokens))],
        capacity_tokens=capacity_tokens,
        num_stages=1,
        data_parallel=replicas,
        tile_tokens=tile,
        time_limit_s=0,  # no search
        seed=0,
    )
    return tuple(tuple(tuple(ref.sample for ref in part) for part in slot.replicas) for slot in plan.slots)


def first_loss_key(adapter: AdapterConfig, held_out: TokenizedSet | None) -> Hashable | None:
    """Returns the same for adapters that have one held-out loss before their first step; None: for no other.

    An adapter whose first values change no output is the base alone then, whatever its rank, targets and seed.
    """
    objective, lora = adapter.objective, adapter.lora
    reference = reference_of(adapter, [adapter.name])
    if held_out is None or adapter.rollout.is_on or not adapter_kind(lora.kind).starts_as_base:
        return None
    if lora.init_from is not None or lora.trainable_tokens or objective.chosen.head is not None:
        return None
    if reference is not None and reference.kind != "base":
        return None
    return held_out.digest, objective.model_dump_json()
