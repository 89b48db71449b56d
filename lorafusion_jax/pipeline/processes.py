"""What several processes of one run must decide together."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count as counting

import jax
from jax._src import distributed  # no public way to its client; tests with several processes hold it in place

from lorafusion_jax.errors import RunError
from lorafusion_jax.pipeline.coordinator import LostCoordinator

LEAVE_S = 60  # one that fails waits so long for the others at its end; then all of them end (jax: 5 minutes)
SILENT_S = 5  # then a process says that it waits for the others
PATIENCE_MS = 30 * 60 * 1000  # another process may still be compiling
_PREFIX = "lorafusion/any"
_LEFT, _FAILED = "lorafusion/left", "lorafusion/failed"
GRACE_S = 5  # so long the first process, if it fails, waits for others that fail alike
_questions = counting()
_lost: list[LostCoordinator] = []  # of this process, if it is not the first


def join(
    devices: int, *, coordinator: str | None = None, num_processes: int | None = None, process: int | None = None
) -> None:
    """Makes this process one of a run; before anything touches a device.

    Args:
        devices: of the whole run.
        coordinator: host:port of the first process.
        num_processes, process: how many there are, number of this one; where absent, jax asks SLURM or Open MPI.

    Raises:
        RunError: `processes.join`, nobody tells where the others are, or they do not come.
    """
    try:
        if coordinator is not None and not coordinator.rpartition(":")[2].isdecimal():
            raise ValueError(f"{coordinator} names no port")
        with _waiting():
            jax.distributed.initialize(coordinator, num_processes, process, shutdown_timeout_seconds=LEAVE_S)
    except (ValueError, RuntimeError) as problem:
        raise RunError(
            "processes.join",
            "this process cannot join the others.",
            why=str(problem).splitlines()[0][:300],
            fix="start with srun or mpirun, or give --coordinator host:port --num-processes N --process-id I",
        ) from None
    state = distributed.global_state
    if state.process_id:
        _lost.append(LostCoordinator(str(state.coordinator_address)))
        _lost[-1].watch()
    if devices > state.num_processes:
        # Under SLURM and MPI jax takes one GPU per process, which is right where a process has one stage. One with
        # several owns all that its launcher lets it see: one process per host, or --gpus-per-task.
        jax.config.update("jax_cuda_visible_devices", "all")


@contextmanager
def _waiting() -> Iterator[None]:
    """Tells of a long wait, and lets signals end it: jax waits five minutes in C++, where no handler of Python runs."""
    note = threading.Timer(
        SILENT_S, print, ["waiting for the other processes, 5 minutes at most …"], {"file": sys.stderr}
    )
    note.daemon = True
    note.start()
    in_main = threading.current_thread() is threading.main_thread()  # only there can handlers be set
    numbers = (signal.SIGINT, signal.SIGTERM) if in_main else ()
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        yield
    finally:
        note.cancel()
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python


def any_process(flag: bool) -> bool:
    """True on every process if it is true on any; all processes must call it equally often.

    Hosts ask each other through jax's coordination service. A collective on the devices would queue behind the
    microbatches under way and drain the pipeline with every question.
    """
    if is_alone():
        return flag
    count = jax.process_count()
    client, number = distributed.global_state.client, next(_questions)
    assert client is not None
    client.key_value_set(f"{_PREFIX}/{number}/{jax.process_index()}", str(int(flag)))
    answers = [client.blocking_key_value_get(f"{_PREFIX}/{number}/{process}", PATIENCE_MS) for process in range(count)]
    return "1" in answers


def is_alone() -> bool:
    """Whether the run has this process only; starts no backend if so."""
    return not jax.distributed.is_initialized() or jax.process_count() == 1


def is_first() -> bool:
    """Whether this process writes the run folder; starts no backend where it is the only one."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def exit_after_peer_loss(code: int) -> None:
    """At its end this process will not wait for the others, of which one is lost.

    jax would wait `LEAVE_S` for the lost one and then abort: another code, and its stack trace after our message. The
    first process, without which jax ends the others at once, stays until they have left, for `LEAVE_S` at most.

    Args:
        code: with which the process ends.
    """
    for coordinator in _lost:
        coordinator.told.set()
    if jax.distributed.is_initialized():
        atexit.register(_exit, code)  # runs before what jax registered


def exit_after_failure(code: int) -> None:
    """At its end this process, which failed, will not wait for the others.

    They are in the middle of something that wants it. Once it is gone their transport says so, and they know; waiting
    for them as jax does would be in vain, for `LEAVE_S`, and then all abort without a word of what happened.

    Args:
        code: with which the process ends.
    """
    if jax.distributed.is_initialized():
        atexit.register(_exit, code, failed=True)


def _exit(code: int, *, failed: bool = False) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    state = distributed.global_state
    assert state.client is not None
    if state.process_id:
        with suppress(RuntimeError):  # the first process is gone
            if failed:
                state.client.key_value_set(f"{_FAILED}/{state.process_id}", "")
            state.client.key_value_set(f"{_LEFT}/{state.process_id}", "")
    else:
        end = time.monotonic() + (GRACE_S if failed else LEAVE_S)
        while len(state.client.key_value_dir_get(_LEFT)) < _still_leaving(failed) and time.monotonic() < end:
            time.sleep(0.1)
    os._exit(code)


def _still_leaving(failed: bool) -> int:
    """How many others say that they leave: all, but one that was killed says nothing."""
    state = distributed.global_state
    assert state.client is not None
    return (state.num_processes or 1) - (1 if failed or state.client.key_value_dir_get(_FAILED) else 2)


def barrier(name: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
