"""Processes that share a mesh, each on a host of its own, and what sending activations between hosts takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from lorafusion_jax.config.run_sections import MeshSettings
from lorafusion_jax.errors import ConfigError
from scheduling import CostModel, LinkCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The links between the hosts of a run.

    Args:
        processes: of the run, one on each host.
        bytes_per_s: that a host sends, and receives at the same time.
        latency_s: of a message.
    """

    processes: int = 1
    bytes_per_s: float
    latency_s: float


# Not measured: one TCP stream over a port of the Ethernet that hosts of such devices usually have (100, 25, 10 Gbit/s),
# and a request with its answer.
_BYTES: Mapping[str, float] = {"h200": 12.5e9, "h100": 12.5e9, "a100-40gb": 12.5e9, "a100": 12.5e9, "cpu": 1.25e9}
_OTHERS, _LATENCY_S = 3.125e9, 2e-4


def network_of(
    device: str, processes: int, *, gigabytes: float | None = None, microseconds: float | None = None
) -> Network:
    """The network of a device's hosts.

    Args:
        gigabytes: per second of a link, as the user states it (None: by device).
        microseconds: of latency, as the user states it.

    >>> network_of("l40s", 2).bytes_per_s, network_of("l40s", 2, gigabytes=6).bytes_per_s
    (3125000000.0, 6000000000.0)
    """
    return Network(
        processes=processes,
        bytes_per_s=_BYTES.get(device, _OTHERS) if gigabytes is None else gigabytes * 1e9,
        latency_s=_LATENCY_S if microseconds is None else microseconds / 1e6,
    )


class Sharing(NamedTuple):
    """How processes share a mesh: `groups` of them have different replicas, and the `members` of a group its stages."""

    groups: int
    members: int


def sharing(processes: int, *, stages: int, data: int, tensor: int = 1) -> Sharing:
    """Processes share the replicas first, because an all-reduce per step takes less time than activations per
    microbatch, and then the stages. Every process holds the same number of whole replicas of the same number of stages.

    Raises:
        ConfigError: `mesh.processes`, they cannot share the mesh evenly.

    >>> sharing(4, stages=2, data=2)
    Sharing(groups=2, members=2)
    """
    if tensor > 1 and processes > 1:
        raise ConfigError(
            "mesh.processes",
            f"mesh.tensor={tensor} needs a run of one process, and there are {processes}.",
            why="sending what devices of a layer share between processes is not implemented",
            fix="mesh.tensor: 1, with mesh.stages or mesh.fsdp, or one process",
        )
    groups = math.gcd(data, processes)
    members = processes // groups
    if stages % members:
        raise ConfigError(
            "mesh.processes",
            f"{processes} processes cannot share mesh.stages={stages} and mesh.data={data} equally.",
            why="every process holds the same number of whole stages of the same number of replicas",
            fix=f"mesh.data: {processes} or mesh.stages: {processes}, or multiples whose product {processes} divides",
        )
    return Sharing(groups, members)


def with_network(costs: CostModel, mesh: MeshSettings, network: Network | None, *, token_bytes: int) -> CostModel:
    """The same costs, with the links between hosts where neighbouring stages are in different processes.

    The replicas of a process send their microbatches over one link.

    Args:
        network: None: one process.
        token_bytes: of a token's activations.

    Raises:
        ConfigError: `mesh.processes`.
    """
    if network is None or network.processes == 1:
        return costs
    groups, members = sharing(network.processes, stages=mesh.stages, data=mesh.data, tensor=mesh.tensor)
    if members == 1:
        return replace(costs, source=f"{costs.source}, {groups} processes")
    near = LinkCost(fixed_s=costs.transfer_s, token_s=costs.transfer_token_s)
    replicas = mesh.replicas // groups
    far = LinkCost(fixed_s=network.latency_s, token_s=replicas * token_bytes / network.bytes_per_s)
    per_process = mesh.stages // members
    rates = f"{network.bytes_per_s / 1e9:g} GB/s and {1e6 * network.latency_s:g} µs"
    return replace(
        costs,
        links=tuple(far if (stage + 1) % per_process == 0 else near for stage in range(mesh.stages - 1)),
        source=f"{costs.source}, {network.processes} processes with links of {rates} between them",
    )
