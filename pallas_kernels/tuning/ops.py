"""Times whole ops, forward and backward, by every implementation that runs on this device.

An op is anything that a table row can name: see `op_cases` for linear layers and norms.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from pallas_kernels import config_store
from pallas_kernels.device import device_kind
from pallas_kernels.measured import OpCall, OpRow
from pallas_kernels.tuning import store
from pallas_kernels.tuning.timing import Timing, time_calls
from pallas_kernels.tuning.tune import conditions, existing_table, joined_conditions

REASON = 200  # characters of a compiler message to store
ROUND_S = 0.05

type Timer = Callable[..., Mapping[str, Timing]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """One call of an op.

    Args:
        order: implementations that run where nothing was measured, best first; the last one serves every call.
        implementations: all that may be tried.
        draw: returns the arguments.
        step: returns forward and backward by an implementation, jitted. It raises NotImplementedError, here or when it
            is called, if the implementation does not serve this call.
    """

    call: OpCall
    order: tuple[str, ...]
    implementations: tuple[str, ...]
    draw: Callable[[], tuple[Any, ...]]
    step: Callable[[str], Callable[..., Any]]


def tune_ops(
    cases: Iterable[OpCase],
    path: pathlib.Path,
    *,
    progress: Callable[[OpCase, OpRow | None], None] = lambda case, row: None,
    timer: Timer = time_calls,
) -> store.Table:
    """Measures the missing calls of the table at `path`; rows of another jax version count as missing.

    The table is written, and used by this process, after every call, so that it can be stopped and continued.

    Args:
        progress: called after every call; a row of None means that fewer than two implementations run.
    Raises:
        ValueError: the file at `path` is not a table of this version, or is of another device.
    """
    kind = device_kind()
    table = existing_table(path, kind) or store.Table(device=kind, conditions=conditions())
    for case in cases:
        row = next((row for row in table.ops if row.call == case.call and row.jax == jax.__version__), None)
        if row is None and (row := measure(case, timer=timer)) is not None:
            others = tuple(other for other in table.ops if other.call != case.call)
            table = dataclasses.replace(
                table, conditions=joined_conditions(table.conditions, conditions()), ops=(*others, row)
            )
            store.save(table, path)
            config_store.use(path)
        progress(case, row)
    return table


def measure(case: OpCase, *, timer: Timer = time_calls) -> OpRow | None:
    """Times a call by every implementation, interleaved; None if fewer than two run, so that there is no choice."""
    calls, failed, arguments = {}, {}, case.draw()
    for name in case.implementations:
        try:
            fn = case.step(name)
            jax.block_until_ready(fn(*arguments))
            calls[name] = fn, [arguments]
        except Exception as error:  # not served here, or for example too much shared memory
            failed[name] = reason(error)
    if len(calls) < 2:
        return None
    times = timer(calls, rounds=7, round_s=ROUND_S)
    default = next((name for name in case.order if name in calls), case.order[-1])
    median_us = {name: round(timing.p50_us, 2) for name, timing in times.items()}
    return OpRow(call=case.call, default=default, median_us=median_us, failed=failed, jax=jax.__version__)


def reason(error: Exception) -> str:
    """The first line of a message, without paths: tables are passed on."""
    line = (str(error).splitlines() or [""])[0]
    if not isinstance(error, NotImplementedError):
        line = f"{type(error).__name__}: {line}"
    return re.sub(r"(?<![\w.])(?:[A-Za-z]:)?[/\\~][^\s'\",:;)]+", "(path)", line)[:REASON]
