"""Options for commands that run as several processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lorafusion_jax.errors import ConfigError

if TYPE_CHECKING:
    from lorafusion_jax.config.schema import MeshSettings

Distributed = Annotated[
    bool,
    typer.Option(
        "--distributed",
        help="join several processes, given by SLURM, Open MPI or the options below",
        rich_help_panel="Several processes",
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        envvar="JAX_COORDINATOR_ADDRESS",
        help="address of the first process",
        rich_help_panel="Several processes",
    ),
]
NumProcesses = Annotated[
    int | None,
    typer.Option(envvar="JAX_NUM_PROCESSES", help="number of processes", rich_help_panel="Several processes"),
]
STARTED = ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"]  # set by srun and mpirun
Started = Annotated[
    int | None,
    typer.Option(
        envvar=STARTED, hidden=True, help="processes that a launcher started", rich_help_panel="Several processes"
    ),
]
ProcessId = Annotated[
    int | None,
    typer.Option(envvar="JAX_PROCESS_ID", help="index of this process, from 0", rich_help_panel="Several processes"),
]


def join_processes(
    mesh: MeshSettings,
    *,
    distributed: bool,
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    started: int | None,
) -> None:
    """Joins the other processes of a run, before any device is used.

    Args:
        started: number of processes that a launcher started; more than one needs --distributed.

    Raises:
        ConfigError: `processes.not-distributed`, there are several processes, and each would train the whole run.
        RunError: `processes.join`, the processes do not find each other.
    """
    if not distributed:
        counts = {"--num-processes or JAX_NUM_PROCESSES": num_processes or 1, " or ".join(STARTED): started or 1}
        where, count = max(counts.items(), key=lambda item: item[1])
        if count > 1:
            raise ConfigError(
                "processes.not-distributed",
                f"this is one of {count} processes, but --distributed is not given.",
                where=where,
                why="each of them would train the whole run",
                fix="--distributed, or start a single process",
            )
        return
    from lorafusion_jax.session.processes import join

    join(mesh.stages * mesh.replicas, coordinator=coordinator, num_processes=num_processes, process=process_id)
