"""`train`, `resume` and `open_run`: a run as an object."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group

from lorafusion_jax.api.arguments import names_unknown
from lorafusion_jax.api.jobs import Job, job_of
from lorafusion_jax.api.plans import JobPlan, read_plan
from lorafusion_jax.api.reports import ReportView
from lorafusion_jax.api.shown import PRE, Curve, Shown, TimelineView, as_html, draw_curves, recording_console
from lorafusion_jax.api.status import run_numbers, status_screen
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.report.console import out as terminal
from lorafusion_jax.report.events import Listener
from lorafusion_jax.report.measured import read_timeline
from lorafusion_jax.report.screen import LINE_EVERY_S, Screen
from scheduling import Plan

REDRAW_EVERY_S = 0.5  # a notebook's front end gets the whole view each time


class NotebookView:
    """Redraws lines and block of a `Screen` in one output of a notebook.

    Args:
        console: recording console of the screen's lines.
        block: returns the block below the lines.
    """

    def __init__(self, console: Console, block: Callable[[], Group]):
        self._console, self._block = console, block
        self._output: Any = None
        self._drawn_at = float("-inf")

    def start(self) -> None:
        from IPython.display import HTML, display

        self._output = display(HTML(self._html()), display_id=True)

    def refresh(self) -> None:
        if time.monotonic() - self._drawn_at >= REDRAW_EVERY_S:
            self._draw()

    def stop(self) -> None:
        self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML

        self._drawn_at = time.monotonic()
        self._output.update(HTML(self._html()))

    def _html(self) -> str:
        lines = self._console.export_html(clear=False, code_format=PRE, inline_styles=True)
        return lines + as_html(lambda console: console.print(self._block()))


def notebook_screen(name: str, _: Console, line_every_s: float = LINE_EVERY_S) -> Screen:
    """Returns the `Screen` of a run in a notebook."""
    console = recording_console()
    return Screen(name, console, line_every_s, live=lambda block: NotebookView(console, block))


def in_notebook() -> bool:
    """Whether the output of this process is a notebook and not a terminal, including one of IPython."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


type Progress = bool | Listener
type Work = Callable[[Sequence[Listener]], Any]


@dataclass(frozen=True, slots=True, repr=False)
class Run(Shown):
    """A run folder. It prints as `lorafusion status` does; a notebook also shows its loss curves.

    Every access reads the folder again, so it also shows a run that another process trains.
    """

    folder: Path

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers of `lorafusion status --json`."""
        return run_numbers(self.folder)

    @property
    def adapters(self) -> dict[str, dict[str, Any]]:
        """Status, steps and losses of each adapter."""
        return self.numbers["adapters"]

    @property
    def best(self) -> str | None:
        """The best adapter, by `early_stop.metric`, of those with the same held-out data; None without such.

        With several groups of such adapters it is the first group's; `numbers["best"]` has all.
        """
        return next(iter(self.numbers["best"]), None)

    @property
    def losses(self) -> dict[str, Curve]:
        """Training and held-out losses of each adapter."""
        series: dict[str, dict[str, list]] = {
            job.name: {name: [] for name in Curve.__slots__} for job in RunFolder(self.folder).read_plan().jobs
        }
        keys = {"step": ("steps", "loss", "loss"), "eval": ("eval_steps", "eval_loss", "eval_loss")}
        for row in read_rows(self.folder / "metrics.jsonl"):
            if row["kind"] not in keys or row["adapter"] not in series:
                continue
            steps, losses, key = keys[row["kind"]]
            if row.get(key) is not None:
                series[row["adapter"]][steps].append(row["step"])
                series[row["adapter"]][losses].append(row[key])
        return {
            name: Curve(**{key: tuple(values) for key, values in columns.items()}) for name, columns in series.items()
        }

    def adapter(self, name: str, *, best: bool = False) -> Path:
        """Returns the newest PEFT folder of an adapter.

        Args:
            best: rather that of the step with the best held-out result.

        Raises:
            ConfigError: `export.unknown-adapter`, there is none.
        """
        folder = RunFolder(self.folder)
        newest = folder.best(name) if best else folder.latest(name)
        if newest is None:
            raise ConfigError(
                "export.unknown-adapter",
                f"{self.folder} holds no trained adapter '{name}'.",
                fix=f"one of: {', '.join(self.adapters)}",
            )
        return newest

    def timeline(self) -> TimelineView:
        """Returns the measured timeline of the last session.

        Raises:
            CheckpointError: `run.no-timeline`, no session has ended yet.
        """
        return TimelineView(timeline=read_timeline(self.folder))

    def report(self) -> ReportView:
        """Returns the page of `lorafusion report`: curves, table, settings that differ, timeline."""
        return ReportView((self.folder,))

    def _show(self, console: Console) -> None:
        console.print(status_screen(self.numbers))

    def _drawings(self) -> str:
        return draw_curves(self.losses)


@names_unknown
def train(
    job: Job | str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    plan: JobPlan | Plan | str | Path | None = None,
    progress: Progress = True,
    verify_base: bool = False,
) -> Run:
    """Trains all adapters of a job, as `lorafusion train` does.

    Args:
        job: from `load_job`, or an argument of `load_job`.
        out: new run folder (None: `runs/NAME` of the job).
        plan: plan to execute, or the file of one (None: plan the job here).
        progress: True shows the live view, on a terminal or in a notebook; False shows nothing; a function is called
            with every event of `lorafusion_jax.report.events`.
        verify_base: record digests of every byte of the base model, even of a large one.

    Returns:
        The run. A failed adapter raises no exception; see `run.adapters[name]["status"]`.

    Raises:
        LoraFusionError: the errors of `lorafusion train`.
        Interrupted: Ctrl-C, or the notebook's stop button. The state is saved; `resume` continues the run.
    """
    from lorafusion_jax.training import train as run

    job_to_run = job_of(job)
    folder = RunFolder.of(out).path if out is not None else Path("runs") / job_to_run.name
    plan_to_run = read_plan(Path(plan)) if isinstance(plan, str | Path) else plan
    plan_to_run = plan_to_run.plan if isinstance(plan_to_run, JobPlan) else plan_to_run

    def work(listeners: Sequence[Listener]) -> Any:
        return run(job_to_run.config, folder, plan=plan_to_run, listeners=listeners, verify_base=verify_base)

    return _run_with_progress(folder, job_to_run.config, work, progress)


@names_unknown
def resume(
    run: Run | str | Path,
    overrides: str | Sequence[str] = (),
    *,
    drop: str | Sequence[str] = (),
    progress: Progress = True,
    verify_base: bool = False,
) -> Run:
    """Continues a run from its newest checkpoint, as `lorafusion resume` does, with the bitwise same result.

    Args:
        run: run, or run folder.
        overrides: settings that may change, e.g. `["mesh.stages=1", "mesh.data=2"]`.
        drop: adapters to drop from the rest of the run.
        progress: see `train`.
        verify_base: compare every byte of the base model, even of a large one.

    Raises:
        LoraFusionError: the errors of `lorafusion resume`.
    """
    from lorafusion_jax.training import resume as resume_run
    from lorafusion_jax.training.relayout import apply_resume_overrides

    overrides, drop = ([names] if isinstance(names, str) else names for names in (overrides, drop))
    folder = run.folder if isinstance(run, Run) else RunFolder.of(run).path
    config = apply_resume_overrides(RunFolder(folder).read_config(), overrides)

    def work(listeners: Sequence[Listener]) -> Any:
        return resume_run(folder, overrides, drop=drop, listeners=listeners, verify_base=verify_base)

    return _run_with_progress(folder, config, work, progress)


def open_run(folder: str | Path) -> Run:
    """Opens a run folder, finished or not.

    Raises:
        CheckpointError: the folder holds no run.
    """
    RunFolder.of(folder).read_record()
    return Run(Path(folder))


def _run_with_progress(folder: Path, config: JobConfig, work: Work, progress: Progress) -> Run:
    from lorafusion_jax.api.watch import watch
    from lorafusion_jax.report.trackers import trackers
    from lorafusion_jax.training import Interrupted

    prepare_machine()
    try:
        if progress is True:
            watch(terminal(), folder, config, work, **({"view": notebook_screen} if in_notebook() else {}))
        else:
            with trackers(config, folder) as listeners:
                work([*listeners, *([progress] if callable(progress) else [])])
    except Interrupted as problem:
        problem.add_note(f'the state is saved; continue with lorafusion_jax.resume("{folder}")')
        raise
    return Run(folder)
