"""Sends arrays from a process to another, without collectives: the sender offers them, and the receiver pulls them.

We use jax's transfer server. `receive` returns at once, arrays that become ready when the data has arrived, so programs
on them can be dispatched before. A collective permute over the devices of both processes would hold up the programs of
both: a stage that sends would wait until the other stage runs its part. If a process is lost, its connections close,
and the arrays that others have not received yet raise an error.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.transfer import start_transfer_server

from lorafusion_jax.session.processes import answers_of_all, coordinator_address

SOCKETS = 4  # a transfer is split over these
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
        self._server = start_transfer_server(device.client, _at(address), [_at(address)] * SOCKETS)
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
    others = answers_of_all(address)
    return _local_address(others[-1], int(port)) if jax.process_index() == 0 else address


def _local_address(host: str, port: int) -> str:
    """Returns the address from which this host would reach another; nothing is sent."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def _at(address: str) -> str:
    return f"[{address}]:0" if ":" in address else f"{address}:0"
