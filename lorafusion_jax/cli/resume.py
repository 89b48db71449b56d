"""lorafusion resume: continues a run from its newest checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from lorafusion_jax.cli.common import ProgramCache, RunPath
from lorafusion_jax.cli.processes import Coordinator, Distributed, NumProcesses, ProcessId, Started, join_processes
from lorafusion_jax.errors import quoted
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.report.console import out

Where = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="settings that may change: mesh.stages, mesh.layers, mesh.data, mesh.fsdp, mesh.tensor, train.remat, "
        "train.block_layers, train.parts, train.on_failed, base.cache_quantized, save.*",
    ),
]


def command(
    run: RunPath,
    overrides: Where = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="ADAPTER", help="drop an adapter from the rest; its last good step stays; repeatable"),
    ] = None,
    distributed: Distributed = False,
    coordinator: Coordinator = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
    started: Started = None,
    verify_base: Annotated[
        bool, typer.Option("--verify-base", help="compare every byte of the base model, even above 4 GB")
    ] = False,
    cache: ProgramCache = True,
) -> int:
    """Continues an interrupted run, with the bitwise same result; on another mesh it is equal up to rounding.

    The rest is planned again for another number of stages or replicas (mesh.data · mesh.fsdp), and without dropped
    adapters. Failed adapters need not be dropped: the others continue anyway.

    Example: lorafusion resume runs/exp1

    Example: lorafusion resume runs/exp1 mesh.stages=1 mesh.data=2

    Example: lorafusion resume runs/exp1 --drop law
    """
    from lorafusion_jax.cli.running import follow
    from lorafusion_jax.report.events import Listener
    from lorafusion_jax.training import RunFolder, RunResult, resume
    from lorafusion_jax.training.relayout import apply_resume_overrides

    config = apply_resume_overrides(RunFolder(run).read_config(), overrides or ())
    join_processes(
        config.mesh,
        distributed=distributed,
        coordinator=coordinator,
        num_processes=num_processes,
        process_id=process_id,
        started=started,
    )
    prepare_machine(cache=cache)

    def work(listeners: Sequence[Listener]) -> RunResult:
        return resume(run, overrides or (), drop=drop or (), listeners=listeners, verify_base=verify_base)

    return follow(out(), run, config, work, start=f"lorafusion resume {quoted(run)}")
