"""Moves arrays to a stage, and from one stage to another."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from lorafusion_jax.session.mesh import StageMesh


def to_stage(rows: Any, stage: StageMesh) -> Any:
    """Puts host arrays [replicas of this process, ...] on the stage's devices, one row on those of each replica."""
    return _put_rows(rows, stage.by_replica, stage.replicas)


def to_devices(rows: Any, stage: StageMesh) -> Any:
    """Puts host arrays [devices of this process, ...] on the stage's devices, one row each."""
    return _put_rows(rows, stage.by_device, stage.mesh.size)


def _put_rows(rows: Any, sharding: NamedSharding, count: int) -> Any:
    if jax.process_count() == 1:
        return jax.device_put(rows, sharding)
    return jax.tree.map(
        lambda leaf: jax.make_array_from_process_local_data(sharding, leaf, (count, *np.shape(leaf)[1:])), rows
    )


def replicate(host: Any, stage: StageMesh) -> Any:
    """Puts equal host arrays on every device of the stage."""
    if jax.process_count() == 1:
        return jax.device_put(host, stage.everywhere)
    return jax.tree.map(
        lambda leaf: jax.make_array_from_callback(
            np.shape(leaf), stage.everywhere, lambda index: np.asarray(leaf)[index]
        ),
        host,
    )


def transfer(arrays: Any, stage: StageMesh) -> Any:
    """Moves arrays to another stage, each replica's part to the same replica. Returns at once.

    Parts stay inside their process, so this is not a collective.
    """
    if jax.process_count() == 1:
        return jax.tree.map(lambda leaf: jax.device_put(leaf, _sharding_on(leaf, stage)), arrays)
    return jax.tree.map(lambda leaf: _put_shards(leaf, _sharding_on(leaf, stage)), arrays)


def _sharding_on(array: jax.Array, stage: StageMesh) -> NamedSharding:
    spec = array.sharding.spec if isinstance(array.sharding, NamedSharding) else stage.everywhere.spec
    return NamedSharding(stage.mesh, spec)


def _put_shards(array: jax.Array, target: NamedSharding) -> jax.Array:
    places = target.addressable_devices_indices_map(array.shape)
    # By the part that a device holds, because the devices of two stages come in no common order.
    shard_by_index = {_key(shard.index): shard.data for shard in array.addressable_shards}
    parts = [jax.device_put(shard_by_index[_key(index)], device) for device, index in places.items()]
    return jax.make_array_from_single_device_arrays(array.shape, target, parts)


def _key(index: Any) -> tuple:
    return tuple((part.start, part.stop) for part in index)


def to_host(array: jax.Array) -> np.ndarray:
    """Returns the whole array on the host. Collective if other processes hold parts of it."""
    if array.is_fully_addressable:
        return np.asarray(array)
    if array.is_fully_replicated:  # no other process has to take part
        return np.asarray(array.addressable_shards[0].data)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def to_local(array: jax.Array) -> np.ndarray:
    """Returns the value of a replicated array, from this process's copy."""
    return np.asarray(array.addressable_shards[0].data)


def first_of(arrays: Any) -> jax.Array:
    """Returns the first array of a tree, or the array itself."""
    return jax.tree.leaves(arrays)[0]
