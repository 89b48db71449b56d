"""Assigns devices to stages and replicas.

The device grid has the axes (stage, data, fsdp, tensor). Each stage has its own mesh with the other axes. Every replica
has its own microbatch, and the devices along `tensor` compute it together. The frozen base is split along `fsdp` and
`tensor`.
R replicas = data · fsdp
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules.tensor_sums import TENSOR
from lorafusion_jax.planning.network import sharing

REPLICAS = ("data", "fsdp")
AXES = (*REPLICAS, TENSOR)
VOCABULARY = 0  # axis of the tables [V, D] that is split over `tensor`


@dataclass(frozen=True, kw_only=True)
class StageMesh:
    """The devices of one stage.

    Attributes:
        mesh: axes (data, fsdp, tensor).
    """

    mesh: Mesh

    # Properties of every step are computed once: a mesh does not change.

    @cached_property
    def replicas(self) -> int:
        return self.mesh.size // self.tensor

    @property
    def tensor(self) -> int:
        """Devices of a replica."""
        return self.mesh.shape[TENSOR]

    @property
    def fsdp(self) -> int:
        return self.mesh.shape["fsdp"]

    @cached_property
    def everywhere(self) -> NamedSharding:
        """Replicated on every device."""
        return NamedSharding(self.mesh, P())

    @cached_property
    def by_replica(self) -> NamedSharding:
        """Leading axis split over replicas."""
        return self._rows(REPLICAS)

    @cached_property
    def by_device(self) -> NamedSharding:
        """Leading axis split over all devices."""
        return self._rows(AXES)

    def _rows(self, axes: tuple[str, ...]) -> NamedSharding:
        """Omits axes of size one, as in the outputs of programs: two names for one layout would compile twice."""
        axes = tuple(name for name in axes if self.mesh.shape[name] > 1)
        return NamedSharding(self.mesh, P(axes) if axes else P())

    @property
    def processes(self) -> list[int]:
        """The process that holds each replica."""
        return [device.process_index for device in self.mesh.devices[..., 0].flat]

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
        this_process = jax.process_index()
        return [replica for replica, process in enumerate(self.processes) if process == this_process]

    @property
    def local_devices(self) -> list[int]:
        """Devices of this process, counted in the order of `by_device`."""
        return [self.tensor * replica + number for replica in self.local_replicas for number in range(self.tensor)]

    def weight(self, shape: Sequence[int], axis: int | None = None) -> NamedSharding:
        """Sharding of a frozen tensor, see `split`."""
        return NamedSharding(self.mesh, self.split(shape, axis))

    def columns(self, shape: Sequence[int]) -> NamedSharding:
        """Sharding of a table whose columns are split over `fsdp`; copies where they do not divide."""
        return NamedSharding(self.mesh, P(None, "fsdp") if self.fsdp > 1 and shape[1] % self.fsdp == 0 else P())

    def split(self, shape: Sequence[int], axis: int | None = None) -> P:
        """Splits a frozen tensor over `tensor` along `axis`, and over `fsdp` along its first other axis that divides.

        Where a size does not divide, devices have copies.
        """
        parts: list[str | None] = [None] * len(shape)
        if axis is not None and self.tensor > 1 and shape[axis] % self.tensor == 0:
            parts[axis] = TENSOR
        if self.fsdp > 1 and len(shape) > 1:
            free = (n for n, size in enumerate(shape) if parts[n] is None and size % self.fsdp == 0)
            if (first := next(free, None)) is not None:
                parts[first] = "fsdp"
        while parts and parts[-1] is None:
            parts.pop()
        return P(*parts)


def stage_meshes(stages: int = 1, data: int = 1, fsdp: int = 1, tensor: int = 1) -> list[StageMesh]:
    """Uses the first stages · data · fsdp · tensor devices.

    Several processes share them as `planning.network.sharing` says.

    Raises:
        ConfigError: `mesh.devices`, there are fewer devices; `mesh.processes`, processes cannot share the mesh evenly.
    """
    processes, num_devices = jax.process_count(), stages * data * fsdp * tensor
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if num_devices > len(devices):
        raise ConfigError(
            "mesh.devices",
            f"the mesh needs {num_devices} devices ({stages} stages × {data} data × {fsdp} fsdp"
            f"{f' × {tensor} tensor' if tensor > 1 else ''}), but there "
            f"{'is one' if len(devices) == 1 else f'are {len(devices)}'}.",
            why=f"{devices[0].device_kind}, {processes} process{'es' if processes > 1 else ''}",
            fix="lower mesh.stages, mesh.data, mesh.fsdp or mesh.tensor, or start more processes"
            + f"; to try it on a CPU: JAX_NUM_CPU_DEVICES={num_devices} lorafusion …" * (devices[0].platform == "cpu"),
        )
    by_data, by_stage = sharing(processes, stages=stages, data=data, tensor=tensor)
    per_process = num_devices // processes
    mesh_devices: list = []
    for process in range(processes):
        local = [device for device in devices if device.process_index == process]
        if len(local) < per_process:
            raise ConfigError(
                "mesh.processes",
                f"process {process} has {len(local)} devices, but needs {per_process}.",
                fix="start every process with the same number of devices",
            )
        mesh_devices += local[:per_process]
    # Neighbouring processes, which are often on one host, exchange activations.
    grid = np.array(mesh_devices, dtype=object).reshape(
        by_data, by_stage, data // by_data, stages // by_stage, fsdp, tensor
    )
    grid = grid.transpose(1, 3, 0, 2, 4, 5).reshape(stages, data, fsdp, tensor)
    return [StageMesh(mesh=Mesh(grid[stage], AXES)) for stage in range(stages)]
