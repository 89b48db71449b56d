"""Joins the processes of a run, lets them agree, and ends them together."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count as counting

import jax
from jax._src import distributed  # its client has no public access; tests with several processes check it

from lorafusion_jax.errors import RunError
from lorafusion_jax.session.failures import PROCESS_LOST
from lorafusion_jax.signals import INTERRUPTED

# Ends a process that has lost its coordinator with our own error and exit code.
#
# The first process of a run is jax's coordinator. When it ends, jax's client aborts all others from a C++ thread, with
# a stack trace and exit code 134. No exception reaches Python, so we handle SIGABRT.

CONNECT_S = 1.0  # a running coordinator on another host answers sooner
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


class LostCoordinator:
    """Handles the abort of this process.

    Args:
        address: host:port of the coordinator.

    Attributes:
        reported: set once this process has reported that another one is lost.
    """

    def __init__(self, address: str):
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self.reported = threading.Event()
        self._handler = _HANDLER(self._on_abort)  # must live as long as the process

    def watch(self) -> None:
        """Replaces the C handler of SIGABRT. Handlers of Python would run only after the process has ended."""
        libc = ctypes.CDLL(None)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(int(signal.SIGABRT), self._handler)

    def _on_abort(self, number: int) -> None:
        if self._coordinator_answers():  # the abort has another reason: let it continue
            return
        if not self.reported.is_set():
            os.write(2, f"{self.error()}\n".encode())
        os._exit(RunError.exit_code)

    def _coordinator_answers(self) -> bool:
        try:
            with socket.create_connection((self._host.strip("[]"), self._port), CONNECT_S):
                return True
        except OSError:
            return False

    def error(self) -> RunError:
        """Returns the error to report."""
        return RunError(
            PROCESS_LOST,
            "the first process of this run is lost, or the network to it.",
            why=f"its coordinator at {self._host}:{self._port} does not answer",
            fix="read the end of that process's own output or log for the reason. Then lorafusion resume RUN in all "
            "processes continues from the last checkpoint, which is intact",
        )


LEAVE_S = 60  # how long a process waits for the others at its end, before all of them end (jax: 5 minutes)
SILENT_S = 5  # after this time a process says that it waits for the others
PATIENCE_MS = 30 * 60 * 1000  # another process may still be compiling
_PREFIX = "lorafusion/any"
_LEFT, _FAILED, _STOP = "lorafusion/left", "lorafusion/failed", "lorafusion/stop"
STOP_EVERY_S = 0.5
GRACE_S = 5  # how long the first process, if it fails, waits for others that fail in the same way
_questions = counting()
_lost: list[LostCoordinator] = []  # handler of this process, if it is not the first


def join(
    devices: int, *, coordinator: str | None = None, num_processes: int | None = None, process: int | None = None
) -> None:
    """Joins this process to the others of a run. Call it before any use of a device.

    Args:
        devices: number of devices of the whole run.
        coordinator: host:port of the first process.
        num_processes, process: number of processes and index of this one (None: jax asks SLURM or Open MPI).

    Raises:
        RunError: `processes.join`, the other processes are unknown or do not arrive.
    """
    try:
        if coordinator is not None and not coordinator.rpartition(":")[2].isdecimal():
            raise ValueError(f"{coordinator} has no port")
        with _announce_wait():
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
    atexit.register(watch_stops())
    if devices > state.num_processes:
        # Under SLURM and MPI jax takes one GPU per process, which is right for one stage. With several stages a process
        # uses all GPUs that its launcher shows it: one process per host, or --gpus-per-task.
        jax.config.update("jax_cuda_visible_devices", "all")


@contextmanager
def _announce_wait() -> Iterator[None]:
    """Reports a long wait, and lets signals end it: jax waits in C++ for 5 minutes, where no Python handler runs."""
    note = threading.Timer(
        SILENT_S, print, ["waiting for the other processes, 5 minutes at most …"], {"file": sys.stderr}
    )
    note.daemon = True
    note.start()
    in_main = threading.current_thread() is threading.main_thread()  # only the main thread can set handlers
    numbers = (signal.SIGINT, signal.SIGTERM) if in_main else ()
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        yield
    finally:
        note.cancel()
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python


def any_process(flag: bool) -> bool:
    """Returns True on every process if the flag is True on any. Collective: call it equally often on all processes."""
    return flag if is_alone() else "1" in answers_of_all(str(int(flag)))


def same_on_all(text: str) -> bool:
    """Whether all processes hold the same text. Collective, as `any_process`."""
    return is_alone() or len(set(answers_of_all(text))) == 1


def text_of_first(text: str) -> str:
    """Returns the text of the first process on every process. Collective, as `any_process`."""
    return text if is_alone() else answers_of_all(text)[0]


def answers_of_all(answer: str) -> list[str]:
    """Returns the answer of every process, in order. Collective, as `any_process`; only with several processes.

    It uses jax's coordination service. A collective on the devices would queue after the microbatches in flight, and
    every call would drain the pipeline.
    """
    client, number = distributed.global_state.client, next(_questions)
    assert client is not None
    client.key_value_set(f"{_PREFIX}/{number}/{jax.process_index()}", answer)
    every = range(jax.process_count())
    return [client.blocking_key_value_get(f"{_PREFIX}/{number}/{process}", PATIENCE_MS) for process in every]


def is_alone() -> bool:
    """Whether this is the only process of the run. Does not start a backend if so."""
    return not jax.distributed.is_initialized() or jax.process_count() == 1


def is_first() -> bool:
    """Whether this process writes the run folder. Does not start a backend if it is the only process."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def coordinator_address() -> str:
    """Returns host:port of the first process, as this one reaches it."""
    return str(distributed.global_state.coordinator_address)


def stop_all() -> None:
    """Ends all processes, after this one was told to stop at once, or before the first step.

    Another process may be blocked in a call that needs this one, where no signal handler runs. So a thread of each
    process watches for this and ends it.
    """
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        client = distributed.global_state.client
        assert client is not None
        client.key_value_set(f"{_STOP}/{jax.process_index()}", "", allow_overwrite=True)
        atexit.register(_leave, INTERRUPTED)  # runs before jax's exit handlers, which would wait


def stopped_elsewhere() -> bool:
    """Whether another process of this run has called `stop_all`."""
    client, me = distributed.global_state.client, distributed.global_state.process_id
    if client is None:
        return False
    with suppress(RuntimeError):  # the coordinator is gone
        return any(not key.endswith(f"/{me}") for key, _ in client.key_value_dir_get(_STOP))
    return False


def watch_stops() -> Callable[[], None]:
    """Starts the thread that looks whether another process has called `stop_all`.

    Returns:
        What ends the thread. The interpreter ends a thread that returns from C++ by an exception that nobody may catch,
        and C++ ends the process for it: exit code 139 instead of 0.
    """
    ended, stops = threading.Event(), threading.Event()
    thread = threading.Thread(target=_watch_stop, args=(ended, stops), name="stop", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        if not stops.is_set():  # else it ends this process, if nothing else does
            thread.join(2 * GRACE_S)  # the coordinator may be gone, and not answer

    return end


def _watch_stop(ended: threading.Event, stops: threading.Event) -> None:
    """Asks this process to stop when another one has called `stop_all`, and ends it if it cannot."""
    while not stopped_elsewhere():
        if ended.wait(STOP_EVERY_S):
            return
    stops.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    print("stopped: another process of this run was asked to stop.", file=sys.stderr)
    _leave(INTERRUPTED)


def _leave(code: int) -> None:
    """Exits at once; the first process waits for the others, because jax ends them when it has gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    state = distributed.global_state
    assert state.client is not None
    with suppress(RuntimeError):
        if state.process_id:
            state.client.key_value_set(f"{_LEFT}/{state.process_id}", "", allow_overwrite=True)
        num_others, end = (state.num_processes or 1) - 1, time.monotonic() + 2 * GRACE_S
        while (
            not state.process_id and len(state.client.key_value_dir_get(_LEFT)) < num_others and time.monotonic() < end
        ):
            time.sleep(0.1)
    os._exit(code)


def exit_after_peer_loss(code: int) -> None:
    """Exits without JAX's shutdown barrier, after another process was lost.

    JAX would wait `LEAVE_S` for the lost process and then abort, with another exit code and a stack trace after our
    message. When the first process ends, JAX ends the others at once, so it waits until they have exited, for `LEAVE_S`
    at most.

    Args:
        code: exit code.
    """
    for coordinator in _lost:
        coordinator.reported.set()
    if jax.distributed.is_initialized():
        atexit.register(_exit, code)  # runs before jax's exit handlers


def exit_after_failure(code: int) -> None:
    """Exits without JAX's shutdown barrier, after this process failed.

    Peers are blocked in a collective with this process. Closing the connection wakes them with an error, while waiting
    would abort all processes after `LEAVE_S` without a message.

    Args:
        code: exit code.
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
        while len(state.client.key_value_dir_get(_LEFT)) < _expected_exits(failed) and time.monotonic() < end:
            time.sleep(0.1)
    os._exit(code)


def _expected_exits(failed: bool) -> int:
    """Returns how many other processes will report that they exit: all, or all but one that was killed."""
    state = distributed.global_state
    assert state.client is not None
    return (state.num_processes or 1) - (1 if failed or state.client.key_value_dir_get(_FAILED) else 2)


def barrier() -> None:
    """Waits until every process is here.

    It asks the coordination service. A collective on CPU devices gives up after 30 s, and another process may be busy
    for longer.
    """
    any_process(False)
