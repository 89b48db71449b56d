"""Measures the passes of each stage on this machine, and fits the cost model for `plan` and `simulate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from lorafusion_jax.session.assembler import Load
from lorafusion_jax.session.dry_runs import noise, time_passes
from lorafusion_jax.session.failures import is_of_devices, stage_failed
from lorafusion_jax.session.move import to_stage, transfer
from lorafusion_jax.session.stage import Stage
from scheduling import CostModel
from scheduling.cost_model import Measurement, fit_cost_model

WARM_S = 2.0  # warm-up on GPUs: at its power limit a GPU lowers its clock within this time


def profile_stages(stages: Sequence[Stage], loads: Sequence[Load], *, repeats: int = 3, source: str = "") -> CostModel:
    """Times forward and backward of every stage, an optimizer step and a transfer.

    Stages run concurrently, as in a pipeline without waiting. A GPU with idle neighbours would keep a higher clock: for
    70B on four H200s, predictions from stages timed in turn were 2 to 4 % too low. Weights of adapters do not change,
    but their sums and optimizers do: call `StageState.start` before training.

    Args:
        loads: microbatches with different Σ length²; more of them improve the fit.
        repeats: measurements of each, after one warm-up.

    Raises:
        RunError: `train.out-of-memory` or `train.stage-failed`, with the stage.
    """
    threads = 1 if jax.process_count() > 1 else len(stages)  # processes must dispatch programs in one order
    with ThreadPoolExecutor(threads, "profile") as pool:
        under_way = [pool.submit(_passes, number, stage, loads, repeats) for number, stage in enumerate(stages)]
        times = [timing for number, passes in enumerate(under_way) for timing in _result(number, passes)]
    return fit_cost_model(
        times,
        update_s=max(_update_seconds(stage, repeats) for stage in stages),
        transfer_token_s=_transfer_seconds(stages, loads[0], repeats) / loads[0].tokens,
        source=source or f"measured on {len(stages)} × {jax.devices()[0].device_kind}",
    )


def _result(number: int, passes: Future[list[Measurement]]) -> list[Measurement]:
    try:
        return passes.result()
    except Exception as problem:
        if not is_of_devices(problem):
            raise
        raise stage_failed(problem, number, None, ()) from problem


def _passes(number: int, stage: Stage, loads: Sequence[Load], repeats: int) -> list[Measurement]:
    batches = [to_stage(load.rows, stage.mesh) for load in loads]
    # With a time limit, several processes would not dispatch programs equally often.
    warm_s = 0.0 if jax.default_backend() == "cpu" or jax.process_count() > 1 else WARM_S
    until = time.perf_counter() + warm_s
    while time.perf_counter() < until:
        time_passes(stage, batches[0])
    times = []
    for batch, (_, tokens, squares) in zip(batches, loads, strict=True):
        for turn in range(repeats + 1):
            forward, backward = time_passes(stage, batch)
            if turn:
                times.append(Measurement(number, "forward", tokens, squares, forward))
                times.append(Measurement(number, "backward", tokens, squares, backward))
    return times


def _update_seconds(stage: Stage, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats + 1):
        began = time.perf_counter()
        summary, _ = stage.close_batch(0)
        stage.step(0, [summary], stage.unchanging_hyper(0))
        jax.block_until_ready(stage.lora)
        best = min(best, time.perf_counter() - began)
    return best


def _transfer_seconds(stages: Sequence[Stage], load: Load, repeats: int) -> float:
    if len(stages) == 1:
        return 0.0
    x = noise(stages[0], to_stage(load.rows, stages[0].mesh))
    best = float("inf")
    for _ in range(repeats + 1):
        jax.block_until_ready(x)
        began = time.perf_counter()
        jax.block_until_ready(transfer(x, stages[1].mesh))
        best = min(best, time.perf_counter() - began)
    return best
