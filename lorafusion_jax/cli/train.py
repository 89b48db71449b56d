"""lorafusion train: trains the adapters of a job file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lorafusion_jax.cli.common import JobFile, Overrides, ProgramCache, typed
from lorafusion_jax.cli.processes import Coordinator, Distributed, NumProcesses, ProcessId, Started, join_processes
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.report.console import out, warn


def command(
    jobs: JobFile,
    overrides: Overrides = None,
    out_dir: Annotated[Path, typer.Option("--out", "-o", help="new run folder")] = Path("runs/run"),
    plan: Annotated[Path | None, typer.Option(help="plan to execute, from lorafusion plan -o")] = None,
    distributed: Distributed = False,
    coordinator: Coordinator = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
    started: Started = None,
    cache: ProgramCache = True,
) -> int:
    """Trains all adapters of a job file.

    Several GPUs: mesh.stages=S splits the layers into a pipeline, mesh.data=D trains on D microbatches at once, and
    mesh.fsdp=F does too, with one copy of the base shared by F devices. mesh.tensor=T lets T devices compute a layer.
    Together they use S · D · F · T devices.

    Example: lorafusion train jobs.yaml --out runs/exp1 train.max_steps=20

    Example: lorafusion train jobs.yaml --out runs/exp2 mesh.stages=4 mesh.data=2

    Example: srun lorafusion train jobs.yaml --out runs/exp3 --distributed mesh.stages=4 mesh.data=8
    """
    from lorafusion_jax.cli.running import follow, read_plan
    from lorafusion_jax.config import load_config
    from lorafusion_jax.config.job_checks import ineffective
    from lorafusion_jax.config.load import read_job_file
    from lorafusion_jax.config.overrides import unreached
    from lorafusion_jax.report.events import Listener
    from lorafusion_jax.training import RunResult, train

    config = load_config(jobs, overrides or ())
    console = out()
    warn(console, unreached(read_job_file(jobs), overrides or ()) + ineffective(config))
    join_processes(
        config.mesh,
        distributed=distributed,
        coordinator=coordinator,
        num_processes=num_processes,
        process_id=process_id,
        started=started,
    )
    prepare_machine(cache=cache)
    run_plan = read_plan(plan) if plan else None

    def work(listeners: Sequence[Listener]) -> RunResult:
        return train(config, out_dir, plan=run_plan, listeners=listeners)

    of_plan = ["--plan", str(plan)] if plan else []
    start = f"lorafusion train {typed(jobs, overrides)} {shlex.join([*of_plan, '--out', str(out_dir)])}"
    return follow(console, out_dir, config, work, start=start)
