"""Options of a command that may be one of several processes."""

from __future__ import annotations

from typing import Annotated

import typer

from lorafusion_jax.config.schema import MeshSettings
from lorafusion_jax.errors import ConfigError

Distributed = Annotated[
    bool,
    typer.Option("--distributed", help="one of several processes; SLURM, Open MPI or the options below tell which"),
]
Coordinator = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", envvar="JAX_COORDINATOR_ADDRESS", help="where the first process listens"),
]
NumProcesses = Annotated[int | None, typer.Option(envvar="JAX_NUM_PROCESSES", help="processes of the run")]
ProcessId = Annotated[int | None, typer.Option(envvar="JAX_PROCESS_ID", help="number of this process, from 0")]


def join_processes(
    mesh: MeshSettings,
    *,
    distributed: bool,
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
) -> None:
    """Joins the other processes of a run, before anything touches a device.

    Raises:
        ConfigError: `processes.not-distributed`, there are several, and each would train by itself.
        RunError: `processes.join`, they do not find each other.
    """
    if not distributed:
        if num_processes is not None and num_processes > 1:
            raise ConfigError(
                "processes.not-distributed",
                f"this is one of {num_processes} processes, but --distributed is not given.",
                where="--num-processes or JAX_NUM_PROCESSES",
                why="each of them would train the whole run by itself",
                fix="--distributed, or leave the number of processes out",
            )
        return
    from lorafusion_jax.pipeline.processes import join

    join(mesh.stages * mesh.replicas, coordinator=coordinator, num_processes=num_processes, process=process_id)
