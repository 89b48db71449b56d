"""What training changes, as it was at one moment, for reading while training goes on.

The devices copy it, which takes milliseconds; the copy comes to the host later. A device without room for the copy
sends its arrays to the host while training waits.
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
SPARE = 0.03  # of a device's memory that stays free beside the copy: the allocator cannot use every gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Functions that wait for the copy and return it on the host; any thread may call them, in any order.

    Attributes:
        state: see `state.gather`; it gives up the copy of what only it returns, so call it once.
        adapters: weights by adapter, see `state.adapter_arrays`.
        on_devices: whether the devices hold the copy; else it is on the host already.
    """

    state: Callable[[], dict[str, Any]]
    adapters: Mapping[str, Callable[[], dict[str, np.ndarray]]]
    on_devices: bool


class Snapshots:
    """Copies stages that have finished everything they were given.

    Whether the devices have room is judged by the most memory that training has used before the first copy.
    """

    def __init__(self, stages: Sequence[Stage]):
        self._stages = tuple(stages)
        self._programs: dict[Any, Callable[[Any], Any]] = {}
        self._free: list[float] | None = None  # bytes by stage

    def compile(self) -> None:
        """Compiles the copies, so that the first snapshot is as quick as the next."""
        for stage in self._stages:
            self._program(_changing(stage))

    def take(self, places: Mapping[str, int]) -> Snapshot:
        """Copies everything; of the adapters in `places`, name → place, the weights can be read by themselves.

        Processes of one run may have to meet to read an array, in one order: there the copy is read before this
        returns, and all of them must call it.
        """
        roomy = self._have_room()
        stages = [self._copied(stage) for stage in self._stages] if roomy else self._stages
        state = partial(_state_once, stages) if roomy else partial(gather, stages)
        adapters = {name: partial(_adapter, stages, place) for name, place in places.items()}
        if roomy and jax.process_count() == 1:
            return Snapshot(state=state, adapters=adapters, on_devices=True)
        own = {name: read() for name, read in adapters.items()}  # before `state`, which gives up the copy
        held = state()
        return Snapshot(
            state=lambda: held,
            adapters={name: partial(own.__getitem__, name) for name in own},
            on_devices=False,
        )

    def _have_room(self) -> bool:
        if self._free is None:
            self._free = [min(map(_unused, stage.mesh.mesh.local_devices)) for stage in self._stages]
        needed = [_device_bytes(_changing(stage)) for stage in self._stages]
        return not any_process(any(size > free for size, free in zip(needed, self._free, strict=True)))

    def _copied(self, stage: Stage) -> Stage:
        arrays = _changing(stage)
        view = copy.copy(stage)
        for name, array in self._program(arrays)(arrays).items():
            setattr(view, name, array)
        return view

    def _program(self, arrays: dict[str, Any]) -> Callable[[Any], Any]:
        leaves, structure = jax.tree.flatten(arrays)
        key = structure, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        if key not in self._programs:
            places = jax.tree.map(lambda leaf: leaf.sharding, arrays)
            self._programs[key] = jax.jit(_copy, out_shardings=places).lower(arrays).compile()
        return self._programs[key]


def _changing(stage: Stage) -> dict[str, Any]:
    return {name: getattr(stage, name) for name in CHANGING}


def _copy(arrays: Any) -> Any:
    return jax.tree.map(jnp.copy, arrays)


def _state_once(stages: Sequence[Stage]) -> dict[str, Any]:
    for leaf in jax.tree.leaves([_changing(stage) for stage in stages]):
        leaf.copy_to_host_async()
    state = gather(stages)
    for stage in stages:
        stage.sums, stage.optimizers, stage.totals = {}, {}, None
    return state


def _adapter(stages: Sequence[Stage], place: int) -> dict[str, np.ndarray]:
    return adapter_arrays([stage.adapter(place) for stage in stages])


def _device_bytes(arrays: Any) -> int:
    """What one device holds of them."""
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def _unused(device: Any) -> float:
    """Bytes of a device that training has never used; no bound where it does not tell (CPU)."""
    memory = device.memory_stats() or {}
    if "bytes_limit" not in memory:
        return float("inf")
    return (1 - SPARE) * memory["bytes_limit"] - memory["peak_bytes_in_use"]
