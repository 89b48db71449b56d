"""Snapshots of the trainable state, which can be read while training continues.

The devices copy the state, which takes milliseconds, and the copy is transferred to the host later. If a device lacks
memory for the copy, the state is transferred while training waits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lorafusion_jax.pipeline.processes import any_process
from lorafusion_jax.pipeline.stage import Stage
from lorafusion_jax.pipeline.state import adapter_arrays, gather

CHANGING = ("lora", "sums", "optimizers", "totals", "alive")  # attributes of a stage
SPARE = 0.03  # share of a device's memory to leave free, because of fragmentation


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Functions that wait for the copy and return it on the host. Any thread may call them, in any order.

    Attributes:
        state: see `state.gather`. Call it once: it frees the copies of sums and optimizers.
        adapters: weights by adapter, see `state.adapter_arrays`.
        on_devices: whether the copy is on the devices; otherwise it is on the host.
    """

    state: Callable[[], dict[str, Any]]
    adapters: Mapping[str, Callable[[], dict[str, np.ndarray]]]
    on_devices: bool


class Snapshots:
    """Copies the state of stages whose work is all dispatched.

    The free memory of a device is its limit minus the peak that training has used before the first copy.
    """

    def __init__(self, stages: Sequence[Stage]):
        self._stages = tuple(stages)
        self._programs: dict[Any, Callable[[Any], Any]] = {}
        self._free: list[float] | None = None  # bytes by stage

    def compile(self) -> None:
        """Compiles the copies, so that the first snapshot is as fast as later ones."""
        for stage in self._stages:
            self._program(_trainable_state(stage))

    def take(self, places: Mapping[str, int]) -> Snapshot:
        """Copies the state. The weights of the adapters in `places` (name → place) can be read separately.

        With several processes, reading an array may be a collective, which needs one order. Then the copy is read
        before this returns, and all processes must call it.
        """
        has_room = self._has_room()
        stages = [self._copy_stage(stage) for stage in self._stages] if has_room else self._stages
        state = partial(_state_once, stages) if has_room else partial(gather, stages)
        adapters = {name: partial(_adapter, stages, place) for name, place in places.items()}
        if has_room and jax.process_count() == 1:
            return Snapshot(state=state, adapters=adapters, on_devices=True)
        own = {name: read() for name, read in adapters.items()}  # before `state`, which frees the copy
        held = state()
        return Snapshot(
            state=lambda: held,
            adapters={name: partial(own.__getitem__, name) for name in own},
            on_devices=False,
        )

    def _has_room(self) -> bool:
        if self._free is None:
            self._free = [min(map(_never_used_bytes, stage.mesh.mesh.local_devices)) for stage in self._stages]
        needed = [_device_bytes(_trainable_state(stage)) for stage in self._stages]
        return not any_process(any(size > free for size, free in zip(needed, self._free, strict=True)))

    def _copy_stage(self, stage: Stage) -> Stage:
        arrays = _trainable_state(stage)
        view = copy.copy(stage)
        for name, array in self._program(arrays)(arrays).items():
            setattr(view, name, array)
        return view

    def _program(self, arrays: dict[str, Any]) -> Callable[[Any], Any]:
        leaves, structure = jax.tree.flatten(arrays)
        key = structure, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        if key not in self._programs:
            places = jax.tree.map(lambda leaf: leaf.sharding, arrays)
            # A function of its own: jax keeps programs of a function for as long as the function lives.
            copies = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=places)
            self._programs[key] = copies.lower(arrays).compile()
        return self._programs[key]


def _trainable_state(stage: Stage) -> dict[str, Any]:
    return {name: getattr(stage, name) for name in CHANGING}


def _state_once(stages: Sequence[Stage]) -> dict[str, Any]:
    # One array at a time: XLA pins host memory for all that is under way, which seems to hold up the devices.
    state = gather(stages)
    for stage in stages:
        stage.sums, stage.optimizers, stage.totals = {}, {}, None
    return state


def _adapter(stages: Sequence[Stage], place: int) -> dict[str, np.ndarray]:
    return adapter_arrays([stage.adapter(place) for stage in stages])


def _device_bytes(arrays: Any) -> int:
    """Returns the bytes of the arrays on one device."""
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def _never_used_bytes(device: Any) -> float:
    """Returns the bytes of a device that training has never used; infinity if unknown (CPU)."""
    memory = device.memory_stats() or {}
    if "bytes_limit" not in memory:
        return float("inf")
    return (1 - SPARE) * memory["bytes_limit"] - memory["peak_bytes_in_use"]
