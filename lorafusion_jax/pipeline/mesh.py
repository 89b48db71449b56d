"""Assigns devices to stages and replicas.

The device grid has the axes (stage, data, fsdp). Each stage has its own mesh with the axes (data, fsdp). Every device
of a stage is a replica with its own microbatch. The frozen base is split along `fsdp`.
R replicas = data · fsdp
"""

from __future__ import annotations

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
    def local_replicas(self) -> list[int]:
        """Replicas whose microbatch this process provides."""
        mine = jax.process_index()
        return [number for number, device in enumerate(self.mesh.devices.flat) if device.process_index == mine]

    def weight(self, shape: Sequence[int]) -> NamedSharding:
        """Sharding of a frozen tensor: split over fsdp along its first divisible axis, otherwise replicated."""
        return NamedSharding(self.mesh, P(*self.split(shape)))

    def split(self, shape: Sequence[int]) -> tuple[str | None, ...]:
        if self.fsdp == 1 or len(shape) < 2:
            return ()
        axis = next((number for number, size in enumerate(shape) if size % self.fsdp == 0), None)
        return () if axis is None else (None,) * axis + ("fsdp",)


def stage_meshes(stages: int = 1, data: int = 1, fsdp: int = 1) -> list[StageMesh]:
    """Uses the first stages · data · fsdp devices. With several processes, each has all stages of its replicas.

    Raises:
        ConfigError: `mesh.devices`, there are fewer devices; `mesh.processes`, replicas do not divide evenly.
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
    if data % processes:
        raise ConfigError(
            "mesh.processes",
            f"{processes} processes cannot share mesh.data={data} equally.",
            why="activations move between stages inside a process, so every process holds whole replicas",
            fix=f"mesh.data: {processes}, or a multiple of it",
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
    grid = np.array(chosen, dtype=object).reshape(data, stages, fsdp).swapaxes(0, 1)
    return [StageMesh(mesh=Mesh(grid[stage], REPLICAS)) for stage in range(stages)]
