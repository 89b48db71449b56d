"""Moves arrays between the stages of a run, whichever processes hold them.

Processes that hold the same replicas form a row; together they hold all stages, and only they exchange arrays here. All
processes walk the same schedule, and draw the same links in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from lorafusion_jax.session.mesh import StageMesh
from lorafusion_jax.session.move import transfer
from lorafusion_jax.session.processes import answers_of_all, is_alone
from lorafusion_jax.session.wire import Ticket, Wire

type Tree = dict[str, Any]  # nested, of host arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One transfer from a stage to another, of which this process holds at least one.

    Attributes:
        target: devices of the other stage.
        sending, receiving: ticket of the message, if the other stage is in another process.
    """

    target: StageMesh
    wire: Wire | None = None
    sending: Ticket | None = None
    receiving: Ticket | None = None

    def send[T](self, arrays: T) -> T:
        """Moves arrays, each replica's part to the same replica. Returns them on the other stage, if that is here."""
        if self.sending is None:
            return transfer(arrays, self.target)
        assert self.wire is not None
        parts = [shard.data for array in jax.tree.leaves(arrays) for shard in _in_order(array)]
        self.wire.send(self.sending, parts)
        return arrays

    def receive(self, like: Any, sharding: NamedSharding) -> Any:
        """Returns the arrays that the other process sends, on this process's devices of the target stage.

        Args:
            like: their shapes and dtypes.
        """
        assert self.wire is not None
        assert self.receiving is not None
        leaves, structure = jax.tree.flatten(like)
        described = [
            jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype, sharding=SingleDeviceSharding(device))
            for leaf in leaves
            for device in sharding.addressable_devices_indices_map(leaf.shape)
        ]
        parts, count = self.wire.receive(self.receiving, described), len(described) // len(leaves)
        return structure.unflatten(
            jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts[number * count : (number + 1) * count])
            for number, leaf in enumerate(leaves)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Equal arrays on all devices of a stage, which every process of the row learns.

    Attributes:
        sending: a ticket for each other process of the row, if this process holds the stage.
        receiving: the ticket, if it does not.
    """

    device: Any = None
    wire: Wire | None = None
    sending: tuple[Ticket, ...] = ()
    receiving: Ticket | None = None

    def send(self, arrays: Any) -> Any:
        """Sends the arrays, and returns them."""
        # Empty arrays are not sent: `receive` makes its own.
        leaves = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(arrays) if leaf.size]
        for ticket in self.sending:
            assert self.wire is not None
            self.wire.send(ticket, leaves)
        return arrays

    def receive(self, like: Any) -> Any:
        """Returns the arrays on one device of this process.

        Args:
            like: shapes and dtypes.
        """
        assert self.wire is not None
        assert self.receiving is not None
        leaves, structure = jax.tree.flatten(like)
        sharding = SingleDeviceSharding(self.device)
        described = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf in leaves if leaf.size]
        arrays = iter(self.wire.receive(self.receiving, described))
        empty = (jnp.zeros(leaf.shape, leaf.dtype, device=sharding) for leaf in leaves if not leaf.size)
        return structure.unflatten([next(arrays if leaf.size else empty) for leaf in leaves])


class Links:
    """The ways between the stages of a run. Collective over all processes if stages are in different ones.

    Args:
        meshes: devices of each stage.

    Attributes:
        local: numbers of the stages that this process holds.
    """

    def __init__(self, meshes: Sequence[StageMesh]):
        self._meshes, self._wire, self._host_wire = tuple(meshes), None, None
        self.local = [stage for stage, mesh in enumerate(meshes) if is_alone() or mesh.is_local]
        if not self.apart:
            return
        mine = meshes[self.local[0]]
        # Any of its replicas will do: the processes of a row hold the same ones.
        replica = mine.local_replicas[0]
        self._holders = [mesh.processes[replica] for mesh in meshes]  # of each stage, in this row
        self._others = sorted({*self._holders} - {jax.process_index()})
        self._device = mine.mesh.local_devices[0]
        self._wire = Wire(self._device)
        self._host_wire = Wire(_host_device())

    @property
    def apart(self) -> bool:
        """Whether stages of a replica are in different processes."""
        return len(self.local) < len(self._meshes)

    def is_local(self, stage: int) -> bool:
        """Whether this process holds a stage."""
        return stage in self.local

    def link(self, source: int, target: int) -> Link | None:
        """Draws the next transfer from a stage to another; None if this process holds neither."""
        has_source, has_target = self.is_local(source), self.is_local(target)
        if not has_source and not has_target:
            return None
        mesh, wire = self._meshes[target], self._wire
        if has_source and has_target:
            return Link(target=mesh)
        assert wire is not None
        if has_source:
            return Link(target=mesh, wire=wire, sending=wire.ticket_to(self._holders[target]))
        return Link(target=mesh, wire=wire, receiving=wire.ticket_from(self._holders[source]))

    def announcement(self, stage: int) -> Announcement:
        """Draws the next announcement of a stage."""
        if not self.apart:
            return Announcement()
        assert self._wire is not None
        if self.is_local(stage):
            tickets = tuple(self._wire.ticket_to(process) for process in self._others)
            return Announcement(wire=self._wire, sending=tickets)
        ticket = self._wire.ticket_from(self._holders[stage])
        return Announcement(wire=self._wire, device=self._device, receiving=ticket)

    def share(self, trees: Mapping[int, Tree]) -> list[Tree]:
        """Returns host arrays of every stage on every process, bit by bit. Collective; waits.

        Args:
            trees: of each local stage.
        """
        if not self.apart:
            return [trees[stage] for stage in range(len(self._meshes))]
        wire = self._host_wire
        assert wire is not None
        leaves = {stage: _flat(tree) for stage, tree in trees.items()}
        # Sizes go first: whoever pulls arrays must know their shapes.
        shapes = self.by_stage({stage: _described(flat) for stage, flat in leaves.items()})
        tickets = {stage: [wire.ticket_to(process) for process in self._others] for stage in self.local}
        # All is offered before anything is awaited, so that processes cannot wait for one another.
        for stage, flat in leaves.items():
            arrays = [jax.device_put(_as_bytes(leaf), _host_device()) for leaf in flat.values() if np.size(leaf)]
            for ticket in tickets[stage]:
                wire.send(ticket, arrays)
        shared = []
        for stage in range(len(self._meshes)):
            if self.is_local(stage):
                shared.append(trees[stage])
            else:
                shared.append(_nested(_received(wire, wire.ticket_from(self._holders[stage]), shapes[stage])))
        return shared

    def by_stage[T](self, values: Mapping[int, T]) -> list[T]:
        """Returns what JSON can hold, for every stage on every process. Collective; waits.

        Args:
            values: of each local stage.
        """
        if not self.apart:
            return [values[stage] for stage in range(len(self._meshes))]
        answers = [json.loads(answer) for answer in answers_of_all(json.dumps(dict(values)))]
        # JSON has made the stages' numbers text.
        return [answers[process][str(stage)] for stage, process in enumerate(self._holders)]


def _in_order(array: jax.Array) -> list[Any]:
    """Returns the parts of this process, in the order of replicas."""
    parts = {shard.device: shard for shard in array.addressable_shards}
    return [parts[device] for device in array.sharding.addressable_devices_indices_map(array.shape)]


def _host_device() -> Any:
    """Returns a device in host memory; the first one if jax may not use the CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def _flat(tree: Tree, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], np.ndarray]:
    flat: dict[tuple[str, ...], np.ndarray] = {}
    for name, value in tree.items():
        flat |= _flat(value, (*path, name)) if isinstance(value, dict) else {(*path, name): np.asarray(value)}
    return flat


def _nested(flat: Mapping[tuple[str, ...], np.ndarray]) -> Tree:
    tree: Tree = {}
    for (*path, name), leaf in flat.items():
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = leaf
    return tree


def _described(flat: Mapping[tuple[str, ...], np.ndarray]) -> list[list[Any]]:
    return [[list(path), list(leaf.shape), leaf.dtype.name] for path, leaf in flat.items()]


def _as_bytes(leaf: np.ndarray) -> np.ndarray:
    """Without jax's rules for dtypes: it would make float64 and int64 narrower."""
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)


def _received(wire: Wire, ticket: Ticket, described: Sequence[Any]) -> dict[tuple[str, ...], np.ndarray]:
    sizes = [int(np.prod(shape)) * jnp.dtype(dtype).itemsize for _, shape, dtype in described]
    sharding = SingleDeviceSharding(_host_device())
    like = [jax.ShapeDtypeStruct((size,), np.uint8, sharding=sharding) for size in sizes if size]
    arrays = iter(wire.receive(ticket, like))
    return {
        tuple(path): (np.asarray(next(arrays)) if size else np.empty(0, np.uint8)).view(jnp.dtype(dtype)).reshape(shape)
        for (path, shape, dtype), size in zip(described, sizes, strict=True)
    }
