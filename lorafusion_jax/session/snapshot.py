"""Snapshots of the trainable state, which can be read while training continues.

The devices copy the state, which takes milliseconds, and the copy is transferred to the host later. If a device lacks
memory for the copy, the state is transferred while training waits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from lorafusion_jax.session.adapter_state import AdapterState
from lorafusion_jax.session.device_copy import InParts, cut, find_cuts, never_used_bytes
from lorafusion_jax.session.distant_stage import AnyStage, local_stages
from lorafusion_jax.session.links import Links
from lorafusion_jax.session.processes import any_process
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.state import gather, states_of

CHANGING = ("lora", "sums", "totals", "alive")  # attributes of a stage with arrays of all adapters


class Snapshot:
    """The trainable state at one moment.

    Args:
        read: waits for the copy and returns it on the host, see `state.gather`.
        index: position of each adapter.
        progress: as in `state.states_of`.
        waiting: states of adapters that are in no place.
    """

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        index: Mapping[str, int],
        progress: Mapping[str, tuple[int, str]],
        *,
        waiting: Mapping[str, AdapterState] = MappingProxyType({}),
    ):
        self._read: Callable[[], dict[str, Any]] | None = read
        self._waiting = dict(waiting)
        self._index, self._progress = index, progress
        self._weights: dict[str, Mapping[str, np.ndarray]] = {}

    def states(self) -> dict[str, AdapterState]:
        """Returns the states by adapter. Call it once: it frees the copy, and keeps only the weights."""
        assert self._read is not None, "a snapshot is read once"
        arrays, self._read = self._read(), None
        states = self._waiting | states_of(arrays, self._index, self._progress)
        self._weights = {name: state.weights for name, state in states.items()}
        return states

    def adapter(self, name: str) -> Mapping[str, np.ndarray]:
        """Returns an adapter's weights after `states` was called: "layers.self_attn.q_proj.lora_a" → [L, K, r]."""
        return self._weights[name]


class Snapshots:
    """Copies the state of stages whose work is all dispatched.

    The free memory of a device is its limit minus the peak that training has used before the first copy.
    """

    def __init__(self, stages: Sequence[AnyStage], links: Links):
        self._all, self._links = tuple(stages), links
        self._stages = tuple(local_stages(stages).values())
        self._programs: dict[Any, Callable[[Any], Any]] = {}
        self._free: list[float] | None = None  # bytes by stage

    def compile(self) -> None:
        """Compiles the copies, so that the first snapshot is as fast as later ones."""
        for stage in self._stages:
            for arrays in _copied_together(stage):
                self._program(arrays)

    def take(
        self,
        index: Mapping[str, int],
        progress: Mapping[str, tuple[int, str]],
        waiting: Mapping[str, AdapterState] = MappingProxyType({}),
    ) -> Snapshot:
        """Copies the state; `index` and `progress` as in `state.states_of`, `waiting` as in `Snapshot`.

        With several processes, reading an array may be a collective, which needs one order. Then the state is read
        before this returns, and all processes must call it.
        """
        if jax.process_count() == 1 and self._has_room():
            copies = [self._copy_stage(stage) for stage in self._stages]
            read_copies = partial(gather, copies, self._links, read=InParts.read)
            return Snapshot(read_copies, index, progress, waiting=waiting)
        states = gather(self._all, self._links)
        return Snapshot(lambda: states, index, progress, waiting=waiting)

    def _has_room(self) -> bool:
        if self._free is None:
            self._free = [min(map(never_used_bytes, stage.mesh.mesh.local_devices)) for stage in self._stages]
        copy_bytes = [_device_bytes(_copied_together(stage)) for stage in self._stages]
        return not any_process(any(size > free for size, free in zip(copy_bytes, self._free, strict=True)))

    def _copy_stage(self, stage: Stage) -> Stage:
        # Shallow: `gather` reads the layout of the stage, with copies in place of the arrays that change.
        view = copy.copy(stage)
        of_all, *optimizers = [self._copy(arrays) for arrays in _copied_together(stage)]
        for name, tree in of_all.items():
            setattr(view, name, tree)
        view.optimizers = dict(zip(stage.optimizers, optimizers, strict=True))
        return view

    def _copy(self, arrays: Any) -> Any:
        parts = self._program(arrays)(arrays)
        return jax.tree.map(lambda leaf, pieces: InParts(leaf.shape, pieces, _cuts(leaf)[0]), arrays, parts)

    def _program(self, arrays: Any) -> Callable[[Any], Any]:
        """Returns the program that copies arrays, each to a list of parts."""
        leaves, structure = jax.tree.flatten(arrays)
        key = structure, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        if key not in self._programs:
            cuts = [_cuts(leaf) for leaf in leaves]
            places = [[leaf.sharding] * count for leaf, (_, count) in zip(leaves, cuts, strict=True)]

            # A function of its own: jax keeps programs of a function for as long as the function lives.
            def copies(tree: Any) -> Any:
                pairs = zip(jax.tree.leaves(tree), cuts, strict=True)
                return structure.unflatten([cut(leaf, axis, count) for leaf, (axis, count) in pairs])

            program = jax.jit(copies, out_shardings=structure.unflatten(places))
            # Compiled now: `jax.jit` alone would compile at the first call, while training waits for the snapshot.
            self._programs[key] = program.lower(arrays).compile()
        return self._programs[key]


def _copied_together(stage: Stage) -> list[Any]:
    """Returns the trainable state in parts that are copied by a program each: the arrays of all adapters, and the
    optimizer state of each adapter. So an adapter that joins needs no program for all of them."""
    return [{name: getattr(stage, name) for name in CHANGING}, *stage.optimizers.values()]


def _cuts(leaf: jax.Array) -> tuple[int, int]:
    return find_cuts(leaf.shape, leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize)


def _device_bytes(arrays: Any) -> int:
    """Returns the bytes of the arrays on one device."""
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))
