"""Compiles what stages run, side by side, by running it on microbatches without samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from functools import partial

from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.session.ahead import Ahead
from lorafusion_jax.session.dry_runs import compile_steps, time_passes, try_evaluation
from lorafusion_jax.session.move import to_stage
from lorafusion_jax.session.stage import Stage

type Progress = Callable[[Sequence[str]], None]  # called with what still compiles
type Blaming = Callable[[int, None], AbstractContextManager[None]]  # see `Executor.blaming`


def compile_stages(
    stages: Mapping[int, Stage],
    num_stages: int,
    rows: Sequence[Microbatch],
    held_out: Sequence[Microbatch],
    *,
    in_turn: bool,
    blaming: Blaming,
    on_progress: Progress,
    ahead: Ahead,
) -> dict[str, tuple[float, float]]:
    """Runs an empty microbatch of each capacity, every kind of step, and an evaluation of each size on each stage.

    A microbatch without samples adds zero to every sum, and steps run on copies, so nothing changes.

    Args:
        stages: those of this process, by number.
        num_stages: of all processes.
        in_turn: all stages have to dispatch in one order.
        ahead: processes that compile programs of layers meanwhile.

    Returns:
        What was compiled → start and end by `time.perf_counter`.
    """
    work: dict[str, tuple[int, Callable[[], None]]] = {}
    for index, stage in stages.items():
        work[f"stage {index}"] = index, partial(_run_training, stage, num_stages, rows, partial(ahead.wait, index))
        if held_out:
            evaluate = partial(_run_evaluation, stage, held_out, partial(ahead.wait, index))
            work[f"evaluation of stage {index}"] = index, evaluate
    times: dict[str, tuple[float, float]] = {}
    with ThreadPoolExecutor(1 if in_turn else len(work), "compile") as threads:
        running = {threads.submit(_time_work, compile_part): name for name, (_, compile_part) in work.items()}
        programs_left = dict.fromkeys(work)
        on_progress(list(programs_left))
        for future in as_completed(running):
            name = running[future]
            with blaming(work[name][0], None):
                times[name] = future.result()
            del programs_left[name]
            on_progress(list(programs_left))
    return times


def _run_training(stage: Stage, num_stages: int, rows: Sequence[Microbatch], wait_for: Callable[..., None]) -> None:
    for microbatch in rows:  # in turn: the sums of a stage go from one pass to the next
        time_passes(stage, to_stage(microbatch, stage.mesh), partial(wait_for, "backward"))
    compile_steps(stage, num_stages)


def _run_evaluation(stage: Stage, rows: Sequence[Microbatch], wait_for: Callable[..., None]) -> None:
    wait_for("evaluate")
    for microbatch in rows:
        try_evaluation(stage, to_stage(microbatch, stage.mesh))


def _time_work(work: Callable[[], None]) -> tuple[float, float]:
    began = time.perf_counter()
    work()
    return began, time.perf_counter()
