"""lorafusion train: trains the adapters of a job file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorafusion_jax.cli.common import JobFile, Overrides, ProgramCache, typed
from lorafusion_jax.cli.processes import Coordinator, Distributed, NumProcesses, ProcessId, Started, join_processes
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.report.console import out, warn

if TYPE_CHECKING:
    from rich.console import Console

    from lorafusion_jax.checkpoint.begun_folder import StartFile
    from lorafusion_jax.config.schema import JobConfig
    from lorafusion_jax.report.events import Listener
    from lorafusion_jax.training import RunResult


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
    from lorafusion_jax.checkpoint.folder import RunFolder
    from lorafusion_jax.checkpoint.new_run import new_run_folder
    from lorafusion_jax.config import load_config
    from lorafusion_jax.config.job_checks import ineffective
    from lorafusion_jax.config.load import read_job_file
    from lorafusion_jax.config.overrides import unreached

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
    # Importing jax takes seconds, in which other commands are to find the run. Of several processes one claims the
    # folder, which they know once they have joined.
    with nullcontext() if distributed else new_run_folder(RunFolder.of(out_dir), config) as begun:
        return _train(console, config, out_dir, plan, begun, command=typed(jobs, overrides), cache=cache)


def _train(
    console: Console,
    config: JobConfig,
    out_dir: Path,
    plan: Path | None,
    begun: StartFile | None,
    *,
    command: str,
    cache: bool,
) -> int:
    from lorafusion_jax.api.plans import read_plan
    from lorafusion_jax.cli.running import follow
    from lorafusion_jax.training import train

    prepare_machine(cache=cache)
    run_plan = read_plan(plan) if plan else None

    def work(listeners: Sequence[Listener]) -> RunResult:
        return train(config, out_dir, plan=run_plan, listeners=listeners, begun=begun)

    of_plan = ["--plan", str(plan)] if plan else []
    start = f"lorafusion train {command} {shlex.join([*of_plan, '--out', str(out_dir)])}"
    return follow(console, out_dir, config, work, start=start)
