"""Moves arrays between the stages of a run, whichever processes hold them.

Processes that hold the same replicas form a row; together they hold all stages, and only they exchange arrays here. All
processes walk the same schedule, and draw the same links in the same order.

Arrays go by jax's transfer server, without collectives: the sender offers them, and the receiver pulls them. `receive`
returns at once, arrays that become ready when the data has arrived, so programs on them can be dispatched before. A
collective permute over the devices of both processes would hold up the programs of both: a stage that sends would wait
until the other stage runs its part. If a process is lost, its connections close, and the arrays that others have not
received yet raise an error.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.transfer import start_transfer_server
from jax.sharding import NamedSharding, SingleDeviceSharding

from lorafusion_jax.session.mesh import StageMesh
from lorafusion_jax.session.move import transfer
from lorafusion_jax.session.processes import answers_of_all, coordinator_address, is_alone

SOCKETS = 4  # a transfer is split over these
# An array goes in parts, so that copies from and to the devices run beside the sockets. jax's 256 MiB never split one.
PART_BYTES = 4 << 20
PROCESS_BITS = 32  # position of the receiver's number in the number of a message


class Ticket(NamedTuple):
    """One message between this process and another."""

    process: int  # the other one
    number: int


class Wire:
    """Connections of one device's client to other processes. Collective over all processes of the run.

    Tickets must be drawn in the same order by sender and receiver. They may be used in any order, from any thread.

    Args:
        device: of this process; its memory is sent and received.
    """

    def __init__(self, device: Any):
        address = _reachable_address()
        self._server = start_transfer_server(
            device.client, _at(address), [_at(address)] * SOCKETS, transfer_size=PART_BYTES
        )
        self._addresses = answers_of_all(self._server.address())
        self._connections: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._sent, self._received = Counter[int](), Counter[int]()

    def ticket_to(self, process: int) -> Ticket:
        """Numbers the next message to a process."""
        self._sent[process] += 1
        return Ticket(process, process << PROCESS_BITS | self._sent[process])

    def ticket_from(self, process: int) -> Ticket:
        """Numbers the next message from a process."""
        self._received[process] += 1
        return Ticket(process, jax.process_index() << PROCESS_BITS | self._received[process])

    def send(self, ticket: Ticket, arrays: Sequence[jax.Array]) -> None:
        """Offers arrays of one device each, which must not be donated later. Returns at once."""
        if arrays:
            self._server.await_pull(ticket.number, list(arrays))

    def receive(self, ticket: Ticket, like: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Returns the arrays that the other process sends. Returns at once.

        Args:
            like: their shapes, dtypes and devices here.
        """
        if not like:
            return []
        return self._connection(ticket.process).pull(ticket.number, list(like))

    def _connection(self, process: int) -> Any:
        with self._lock:
            if process not in self._connections:
                self._connections[process] = self._server.connect(self._addresses[process])
            return self._connections[process]


def _reachable_address() -> str:
    """Returns an address of this host at which the other processes reach it. Collective."""
    host, _, port = coordinator_address().rpartition(":")
    address = _local_address(host.strip("[]"), int(port))
    addresses = answers_of_all(address)
    return _local_address(addresses[-1], int(port)) if jax.process_index() == 0 else address


def _local_address(host: str, port: int) -> str:
    """Returns the address from which this host would reach another; nothing is sent."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def _at(address: str) -> str:
    return f"[{address}]:0" if ":" in address else f"{address}:0"


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
        apart: whether stages of a replica are in different processes.
    """

    def __init__(self, meshes: Sequence[StageMesh]):
        self._meshes, self._wire, self._host_wire = tuple(meshes), None, None
        self.local = [stage for stage, mesh in enumerate(meshes) if is_alone() or mesh.is_local]
        self.apart = len(self.local) < len(self._meshes)
        if not self.apart:
            return
        local_mesh = meshes[self.local[0]]
        # Any of its replicas will do: the processes of a row hold the same ones.
        replica = local_mesh.local_replicas[0]
        self._holders = [mesh.processes[replica] for mesh in meshes]  # of each stage, in this row
        self._others = sorted({*self._holders} - {jax.process_index()})
        self._device = local_mesh.mesh.local_devices[0]
        self._wire = Wire(self._device)
        self._host_wire = Wire(_host_device())

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
        """Draws the next announcement of a stage. Only where stages are apart: otherwise there is nobody to tell."""
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
