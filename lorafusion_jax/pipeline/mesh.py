"""Assigns devices to stages and replicas.

The device grid has the axes (stage, data, fsdp). Each stage has its own mesh with the axes (data, fsdp). Every device
of a stage is a replica with its own microbatch. The frozen base is split along `fsdp`.
R replicas = data · fsdp
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lorafusion_jax.errors import ConfigError

REPLICAS = ("data", "fsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMesh:
    """The devices of one stage.

    Attributes:
        mesh: axes (data, fsdp).
    """

    mesh: Mesh

    @property
    def replicas(self) -> int:
        return self.mesh.size

    @property
    def fsdp(self) -> int:
        return self.mesh.shape["fsdp"]

    @property
    def everywhere(self) -> NamedSharding:
        """Replicated on every device."""
        return NamedSharding(self.mesh, P())

    @property
    def by_replica(self) -> NamedSharding:
        """Leading axis split over replicas.

        Axes of size one are omitted, as in the outputs of programs: two names for one layout would compile twice.
        """
        axes = tuple(name for name in REPLICAS if self.mesh.shape[name] > 1)
        return NamedSharding(self.mesh, P(axes) if axes else P())

    @property
    def processes(self) -> list[int]:
        """The process that holds each replica."""
        return [device.process_index for device in self.mesh.devices.flat]

    @property
    def is_local(self) -> bool:
        """Whether this process holds a replica of the stage."""
        return jax.process_index() in self.processes

    @property
    def spans_processes(self) -> bool:
        """Whether programs of the stage have collectives across processes."""
        return len(set(self.processes)) > 1

    @property
    def local_replicas(self) -> list[int]:
        """Replicas whose microbatch this process provides."""
        mine = jax.process_index()
        return [replica for replica, process in enumerate(self.processes) if process == mine]

    def weight(self, shape: Sequence[int]) -> NamedSharding:
        """Sharding of a frozen tensor: split over fsdp along its first divisible axis, otherwise replicated."""
        return NamedSharding(self.mesh, P(*self.split(shape)))

    def split(self, shape: Sequence[int]) -> tuple[str | None, ...]:
        if self.fsdp == 1 or len(shape) < 2:
            return ()
        axis = next((number for number, size in enumerate(shape) if size % self.fsdp == 0), None)
        return () if axis is None else (None,) * axis + ("fsdp",)


def stage_meshes(stages: int = 1, data: int = 1, fsdp: int = 1) -> list[StageMesh]:
    """Uses the first stages · data · fsdp devices.

    Several processes share the replicas first, because an all-reduce per step takes less time than activations per
    microbatch, and then the stages. Every process holds the same number of whole replicas of the same number of stages.

    Raises:
        ConfigError: `mesh.devices`, there are fewer devices; `mesh.processes`, processes cannot share the mesh evenly.
    """
    processes, needed = jax.process_count(), stages * data * fsdp
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if needed > len(devices):
        raise ConfigError(
            "mesh.devices",
            f"the mesh needs {needed} devices ({stages} stages × {data} data × {fsdp} fsdp), but there "
            f"{'is one' if len(devices) == 1 else f'are {len(devices)}'}.",
            why=f"{devices[0].device_kind}, {processes} process{'es' if processes > 1 else ''}",
            fix="lower mesh.stages, mesh.data or mesh.fsdp, or start more processes"
            + f"; to try it on a CPU: JAX_NUM_CPU_DEVICES={needed} lorafusion …" * (devices[0].platform == "cpu"),
        )
    by_data = math.gcd(data, processes)  # groups of processes with the same replicas
    by_stage = processes // by_data
    if stages % by_stage:
        raise ConfigError(
            "mesh.processes",
            f"{processes} processes cannot share mesh.stages={stages} and mesh.data={data} equally.",
            why="every process holds the same number of whole stages of the same number of replicas",
            fix=f"mesh.data: {processes} or mesh.stages: {processes}, or multiples whose product {processes} divides",
        )
    per_process = needed // processes
    chosen: list = []
    for process in range(processes):
        local = [device for device in devices if device.process_index == process]
        if len(local) < per_process:
            raise ConfigError(
                "mesh.processes",
                f"process {process} has {len(local)} devices, but needs {per_process}.",
                fix="start every process with the same number of devices",
            )
        chosen += local[:per_process]
    # Neighbouring processes, which are often on one host, exchange activations.
    grid = np.array(chosen, dtype=object).reshape(by_data, by_stage, data // by_data, stages // by_stage, fsdp)
    grid = grid.transpose(1, 3, 0, 2, 4).reshape(stages, data, fsdp)
    return [StageMesh(mesh=Mesh(grid[stage], REPLICAS)) for stage in range(stages)]
