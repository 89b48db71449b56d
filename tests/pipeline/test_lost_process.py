"""A process that goes away is no device that failed: the others say so, and where to look."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import jax
import pytest

from lorafusion_jax.errors import RunError
from lorafusion_jax.plugins import plugin_fault
from lorafusion_jax.session import processes
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.failures import stage_failed

GLOO = "UNKNOWN: Gloo AllGather failed: [transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:50075"
NCCL = "INTERNAL: NCCL operation async_err failed: remote process exited or there was a network error"
HEARTBEAT = (
    "UNAVAILABLE: Task /job:jax_worker/replica:0/task:3 heartbeat timeout. This indicates that the remote task has "
    "failed, got preempted, or crashed unexpectedly."
)
UNHEALTHY = (
    "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n1\n"
    "The tasks have crashed. Check the task logs for an earlier error."
)
ENDED = "INTERNAL: SocketServer: Connection closed recv() == 0."
GONE = "INTERNAL: Error dispatching computation: errno: 107 err: Transport endpoint is not connected"
ASKED = "DEADLINE_EXCEEDED: GetKeyValue() timed out with key: lorafusion/any/7/1 and duration: 30m"


@pytest.mark.parametrize(
    ("text", "which"),
    [
        (GLOO, " (on 10.0.0.7)"),
        (NCCL, ""),
        (HEARTBEAT, " (process 3)"),
        (UNHEALTHY, " (process 1)"),
        (ASKED, ""),
        (ENDED, ""),
        (GONE, ""),
        ("UNKNOWN: Gloo ReduceScatter failed: [transport/tcp/buffer.cc:72] Read timeout [::1]:38624", ""),
    ],
    ids=["gloo", "nccl", "heartbeat", "heartbeats", "question", "transfer", "transfer to", "gloo waited"],
)
def test_a_lost_process_is_told_from_a_failed_device(text, which):
    problem = stage_failed(jax.errors.JaxRuntimeError(text), 1, 7, ["law"])
    assert problem.code == "train.process-lost"
    assert problem.what.startswith(f"another process of this run{which} is lost")
    assert "stage 1, slot 7 (law)" in problem.what
    assert problem.why == text.splitlines()[0]
    assert "that process's own output or log" in problem.fix
    assert "the last checkpoint, which is intact" in problem.fix


@pytest.mark.parametrize("text", ["INTERNAL: the link is down", "DEADLINE_EXCEEDED: a kernel", ""])
def test_other_failures_are_those_of_a_device(text):
    assert stage_failed(jax.errors.JaxRuntimeError(text), 1, 7, []).code == "train.stage-failed"


def test_a_lost_connection_is_known_in_whatever_it_comes():
    """Gathering arrays of several processes raises a ValueError with the transport's words."""
    with pytest.raises(RunError, match=r"process-lost.*noticed between slots"), Executor([]).blaming(None, None):
        raise ValueError(GLOO)


def test_what_is_described_already_is_not_described_again():
    described = stage_failed(jax.errors.JaxRuntimeError(HEARTBEAT), 0, 3, ["law"])
    with pytest.raises(RunError) as caught, Executor([]).blaming(None, None):
        raise described
    assert caught.value is described


@pytest.mark.parametrize("problem", [ValueError("a bug"), KeyError("law")])
def test_a_bug_stays_what_it_is(problem):
    with pytest.raises(type(problem)) as caught, Executor([]).blaming(0, 3):
        raise problem
    assert caught.value is problem


def test_a_bug_in_a_stage_ends_the_command():
    """The event that failed is its context, and it is the cause of the event: looking for causes must end."""

    def fail(stage: SimpleNamespace) -> None:
        raise error

    error, run = KeyError("a bug"), Executor([SimpleNamespace(remat="nothing", mesh=None)])
    with pytest.raises(KeyError) as caught, run.blaming(None, None):
        run.read_all(fail)
    assert caught.value is error
    assert plugin_fault(error) is None


def test_the_advice_for_a_device_without_memory_is_no_setting_that_it_had():
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3 GiB")
    assert "train.remat=nothing" in stage_failed(full, 1, 7, ["law"], remat="everything").fix
    assert stage_failed(full, 1, 7, ["law"], remat="nothing").fix.startswith("a new run with a lower")


def test_nobody_asks_for_stops_once_the_process_ends(monkeypatch):
    """A question under way while the interpreter ends would abort the process."""
    asked = threading.Semaphore(0)

    def ask() -> bool:
        asked.release()
        return False

    monkeypatch.setattr(processes, "STOP_EVERY_S", 0.0)
    monkeypatch.setattr(processes, "stopped_elsewhere", ask)
    end = processes.watch_stops()
    assert asked.acquire(timeout=60)
    end()
    assert not [thread for thread in threading.enumerate() if thread.name == "stop"]
