"""Copies of device arrays in parts, which are transferred to the host in turn while training continues.

XLA would transfer an array to other memory through pinned memory of its size, from which a callback of CUDA copies it.
Other callbacks, without which no microbatch gets to the device, wait meanwhile. On an H200 arrays of 700 MB delayed
microbatches by 1 s. So parts go to pinned memory and are copied from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PINNED = "pinned_host"
PART = 64 * 2**20  # bytes of a part on one device
SPARE = 0.03  # share of a device's memory to leave free, because of fragmentation
GROUP = 4 * PART  # bytes of parts that are transferred together


@dataclass(frozen=True, slots=True)
class InParts:
    """An array that was cut along an axis. Not a pytree."""

    shape: tuple[int, ...]
    parts: list[jax.Array]
    axis: int

    def read(self) -> np.ndarray:
        """Reads its parts in turn, so that they share pinned memory."""
        # With a bound of one byte, each part is a group of its own.
        return read_together([self], group_bytes=1)[0]


def read_together(arrays: Sequence[InParts], *, group_bytes: int = GROUP) -> list[np.ndarray]:
    """Reads arrays in groups of parts, so that a group waits once for a device that is busy, and not each array.

    Args:
        group_bytes: bytes with which a group ends.
    """
    targets = [np.empty(array.shape, array.parts[0].dtype) for array in arrays]
    group: list[tuple[jax.Array, np.ndarray, Any]] = []
    for array, target in zip(arrays, targets, strict=True):
        count = len(array.parts)
        # Views of the target, cut as `jnp.array_split` cuts the device's array.
        pieces = np.array_split(target, count, array.axis) if count > 1 else [target]
        for part, piece in zip(array.parts, pieces, strict=True):
            for shard in (shard for shard in part.addressable_shards if shard.replica_id == 0):
                group.append((shard.data, piece, shard.index))
                if sum(data.nbytes for data, _, _ in group) >= group_bytes:
                    _transfer(group)
                    group = []
    _transfer(group)
    return targets


def _transfer(group: Sequence[tuple[jax.Array, np.ndarray, Any]]) -> None:
    # The list starts all transfers of the group before the first one is waited for.
    for data, (_, target, index) in zip([_pinned(data) for data, _, _ in group], group, strict=True):
        target[index] = np.asarray(data)


def find_cuts(shape: Sequence[int], shard_shape: Sequence[int], item: int) -> tuple[int, int]:
    """Returns along which axis, and into how many parts, an array is cut: the longest that each device has whole."""
    # Parts of an axis that is split over devices would have to move between them.
    unsplit = [axis for axis in range(len(shape)) if shard_shape[axis] == shape[axis]]
    if not unsplit:
        return 0, 1
    axis = max(unsplit, key=lambda axis: shard_shape[axis])
    return axis, max(1, min(shard_shape[axis], ceil(prod(shard_shape) * item / PART)))


def cut(leaf: jax.Array, axis: int, count: int) -> list[jax.Array]:
    """Copies an array, as parts."""
    # A copy also of an array in one part: training may donate the original before it is read.
    return jnp.array_split(leaf, count, axis) if count > 1 else [jnp.copy(leaf)]


def _pinned(data: jax.Array) -> jax.Array:
    """Begins to transfer an array of one device to pinned memory, if the device can."""
    (device,) = data.sharding.device_set
    if any(memory.kind == PINNED for memory in device.addressable_memories()):
        return jax.device_put(data, data.sharding.with_memory_kind(PINNED))
    return data


def never_used_bytes(device: Any) -> float:
    """Returns the bytes of a device that training has never used; infinity if unknown (CPU)."""
    memory = device.memory_stats() or {}
    if "bytes_limit" not in memory:
        return float("inf")
    return (1 - SPARE) * memory["bytes_limit"] - memory["peak_bytes_in_use"]
