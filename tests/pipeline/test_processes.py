"""Several processes on this host, each with simulated devices of its own: the run of one device."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from campaigns import disk_calls
from forked_commands import Command
from mixed import assert_equal, read_trained, write_mixed_job
from more_cases import nightly

from lorafusion_jax.api.status import run_numbers
from lorafusion_jax.checkpoint.requests import write_addition, write_request
from lorafusion_jax.config import load_config
from lorafusion_jax.config.join import read_joining
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.session import executor
from lorafusion_jax.session.batch_end import BatchEnds
from lorafusion_jax.session.processes import LEAVE_S
from lorafusion_jax.training import RunFolder, resume, train
from scheduling.pipeline import Event

TOLERANCE = 1e-5  # as in test_layouts
BITWISE = 0.0  # on one mesh, whichever processes it is spread over
TIME_LIMIT_S = 240  # all processes start jax and compile on the cores of one
MIXED = ("law", "chat")  # one ends before the other
FIRST_PORT = 2**16 - 2**12  # of those from which jax picks by a job's number
EQUAL = (  # to law, so that they share programs
    "adapters.chat.lora.rank=4",
    "adapters.chat.lora.targets=[q_proj, down_proj]",
    "adapters.chat.optim.name=adamw",
)
GLOO = re.compile(r"\[Gloo\]|peer ranks")  # its threads write into each other's lines


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_base) -> Path:
    return write_equals(tmp_path_factory.mktemp("job"), tiny_base)


def write_equals(folder: Path, base: Path) -> Path:
    """Every process compiles the programs of every stage, so both adapters share theirs, see `EQUAL`."""
    sections = {"save": {"every_steps": 10}, "batch": {"capacity_tokens": 128}}
    return write_mixed_job(folder, base, MIXED, (), **sections)


@dataclass(frozen=True, slots=True)
class Left:
    """What a process left."""

    code: int
    out: str
    err: str


def plain(process: int, count: int, port: int) -> dict[str, str]:
    """What a user sets who has no launcher."""
    return {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(process),
    }


def slurm(process: int, count: int, port: int) -> dict[str, str]:
    """What srun sets; jax makes a port of the job's number."""
    names = {"JOB_ID": port - FIRST_PORT, "NTASKS": count, "PROCID": process, "LOCALID": process}
    return {"SLURM_STEP_NODELIST": "localhost"} | {f"SLURM_{name}": str(value) for name, value in names.items()}


def open_mpi(process: int, count: int, port: int) -> dict[str, str]:
    """What mpirun of Open MPI 4 sets; jax makes a port of the job's number, which is a multiple of 4096."""
    names = {"SIZE": count, "RANK": process, "LOCAL_RANK": process}
    job = (port - FIRST_PORT) * 4096
    return {"OMPI_MCA_orte_hnp_uri": f"{job}.0;tcp://127.0.0.1:34911", "OMPI_VERSION": "4.1.6"} | {
        f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()
    }


def free_port() -> int:
    for port in random.SystemRandom().sample(range(FIRST_PORT, 2**16), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", port))
            return port
    raise RuntimeError("no port is free")


def start(count: int, devices: int, *arguments: str, launcher=plain, program=("-m", "lorafusion_jax")) -> list[Command]:
    """Starts the command once per process; they find each other by the variables of a launcher."""
    port = free_port()
    same = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    return [
        Command([*program, *arguments, "--distributed"], os.environ | same | launcher(process, count, port))
        for process in range(count)
    ]


def wait(processes: list[Command]) -> list[Left]:
    """Waits for all; whoever is too late is killed, and the test fails."""
    try:
        deadline = time.monotonic() + TIME_LIMIT_S
        return [Left(process.wait(), *streams) for process in processes for streams in [finish(process, deadline)]]
    finally:
        for process in processes:
            process.kill()


def finish(process: Command, deadline: float) -> tuple[str, str]:
    return process.communicate(timeout=max(1.0, deadline - time.monotonic()))


def steps_of(run: Path) -> list[dict]:
    return [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "step"]


def signal_under_way(processes: list[Command], run: Path, number: signal.Signals, to: int = -1, after: int = 0) -> None:
    """Sends a signal to a process once the run has made a step, or more than so many."""
    deadline = time.monotonic() + TIME_LIMIT_S
    try:
        while len(steps_of(run)) <= after:
            assert all(process.poll() is None for process in processes), processes[0].stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        processes[to].send_signal(number)
    except BaseException:
        for process in processes:
            process.kill()
        raise


SETTINGS = ("mesh.data=2", "epochs=10", *EQUAL)  # a signal finds it under way
STAGES = ("mesh.stages=2", *SETTINGS)  # one for each process
EVALUATED = "adapters.law.data.eval=law_eval.jsonl"  # where little else is computed


@pytest.fixture(scope="module")
def uncut(job, kept_programs, tmp_path_factory):
    """What one process with two devices trains."""
    folder = tmp_path_factory.mktemp("uncut") / "run"
    assert train(load_config(job, (*SETTINGS, EVALUATED)), folder).exit_code == 0
    return read_trained(folder)


@pytest.mark.nightly
def test_every_axis_at_once_does_not_change_the_run(job, uncut, tmp_path):
    settings = (*STAGES, "mesh.fsdp=2", EVALUATED)
    left = wait(start(2, 4, "train", str(job), "--out", str(tmp_path / "run"), *settings, launcher=slurm))
    assert [process.code for process in left] == [0, 0], left[0].err + left[1].err
    assert_equal(uncut, read_trained(tmp_path / "run"), TOLERANCE)


@pytest.mark.nightly
def test_adapters_take_turns_in_the_places_of_all_processes(job, uncut, tmp_path):
    settings = (*STAGES, EVALUATED, "train.resident=1")
    left = wait(start(2, 2, "train", str(job), "--out", str(tmp_path / "run"), *settings))
    assert [process.code for process in left] == [0, 0], left[0].err + left[1].err
    assert_equal(uncut, read_trained(tmp_path / "run"), TOLERANCE)


@pytest.mark.parametrize("joins", [False, nightly(True)])  # whoever joins compiles another loss in every process
def test_processes_do_not_change_the_run_and_carry_out_requests(joins, job, uncut, tmp_path):
    run = tmp_path / "run"
    settings = (*STAGES, EVALUATED)
    processes = start(2, 2, "train", str(job), "--out", str(run), *settings, launcher=slurm)
    signal_under_way(processes, run, signal.SIGCONT)  # changes nothing
    write_request(run, "cancel", "chat")
    if joins:
        write_addition(run, read_joining(write_late(job), load_config(job, settings)))
    left = wait(processes)
    assert [process.code for process in left] == [0, 0], left[0].err + left[1].err
    assert "next: lorafusion export" in left[0].out
    screens = [{line for line in process.out.splitlines() if line and not GLOO.search(line)} for process in left]
    assert all(screens[0].isdisjoint(other) for other in screens[1:]), "one process shows the run"
    adapters = run_numbers(run)["adapters"]
    assert {name: process["status"] for name, process in adapters.items()} == {
        "law": "done",
        "chat": "cancelled",
    } | ({"late": "done"} if joins else {})
    steps = steps_of(run)
    for name in adapters:
        told = [row["step"] for row in steps if row["adapter"] == name]
        assert told == [*range(1, adapters[name]["step"] + 1)], "one process writes the run"
    assert adapters["law"]["step"] == adapters["law"]["steps"]
    assert 0 < adapters["chat"]["step"] < adapters["chat"]["steps"]
    assert RunFolder(run).adapter_step("chat", adapters["chat"]["step"]).is_dir()
    assert_equal(uncut.of(("law",)), read_trained(run).of(("law",)), TOLERANCE)
    if joins:
        assert_reference_beside(run, next(row for row in steps if row["adapter"] == "late"))


def write_late(job: Path) -> Path:
    """A job of an adapter that joins with a reference, which all processes compute while the others train."""
    pairs = [{"prompt": "a b c", "chosen": f"d e {n}", "rejected": f"{n} f g h"} for n in range(6)]
    (job.parent / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    content = json.loads(job.read_text())
    law = next(adapter for adapter in content["adapters"] if adapter["name"] == "law")
    data = {"data": {"train": "pairs.jsonl"}, "objective": {"name": "dpo"}}
    joining = job.with_name("late.yaml")
    joining.write_text(json.dumps(content | {"adapters": [law | data | {"name": "late", "seed": 5, "epochs": 1}]}))
    return joining


def assert_reference_beside(run: Path, first_step: dict) -> None:
    (computed,) = [row for row in read_rows(run / "events.jsonl") if row["kind"] == "references"]
    assert computed["adapters"] == ["late"]
    assert computed["beside_s"] > 0, "the others waited"
    # it starts as the base, the reference
    assert abs(first_step["rewards/chosen"]) <= TOLERANCE * abs(first_step["logps/chosen"])


@pytest.fixture(scope="module")
def stopped(job, tmp_path_factory):
    """stopped(number, to) → what two processes left that a signal to one of them ended, and the folder."""
    runs = {}

    def make(number, to):
        if (number, to) not in runs:
            run = tmp_path_factory.mktemp("stopped") / "run"
            processes = start(2, 1, "train", str(job), "--out", str(run), *SETTINGS)
            signal_under_way(processes, run, number, to)
            runs[number, to] = wait(processes), run
        return runs[number, to]

    return make


@pytest.mark.parametrize(
    ("number", "to"),
    [(signal.SIGTERM, 1), nightly(signal.SIGTERM, 0), nightly(signal.SIGINT, 0), nightly(signal.SIGINT, 1)],
)
def test_a_signal_to_one_process_stops_all(number, to, stopped):
    left, run = stopped(number, to)
    assert [process.code for process in left] == [130, 130], left[0].err + left[1].err
    assert "the state is saved" in left[0].err
    events = [row["kind"] for row in read_rows(run / "events.jsonl")]
    assert events[-1] == "interrupted"


def assert_lost(left: list[Left], killed: int) -> None:
    """All but the one that was killed say that it is lost, and where to look."""
    for process in left[:killed] + left[killed + 1 :]:
        assert process.code == 1, process.err
        assert process.err.count("error[train.process-lost]") == 1
        assert killed == 0 or "stack trace" not in process.err  # jax prints its own where the first is lost


def test_a_stopped_run_outlives_the_first_process(stopped, uncut, tmp_path):
    """Two processes go on with it, the first is killed, and one process goes on bitwise on the same mesh."""
    run = shutil.copytree(stopped(signal.SIGTERM, 1)[1], tmp_path / "run", symlinks=True)
    processes = start(2, 1, "resume", str(run))
    signal_under_way(processes, run, signal.SIGKILL, to=0, after=len(steps_of(run)))
    began = time.monotonic()
    left = wait(processes)
    assert time.monotonic() - began < LEAVE_S, "the other waited for the lost one"
    assert_lost(left, 0)
    assert resume(run).exit_code == 0
    assert_equal(uncut.without_evaluations(), read_trained(run), BITWISE)


@pytest.mark.nightly
def test_those_who_lose_a_process_end_without_it(job, tmp_path):
    """What they leave goes on bitwise on the same mesh."""
    run, settings = tmp_path / "run", ("mesh.data=3", *SETTINGS[1:])
    processes = start(3, 1, "train", str(job), "--out", str(run), *settings)
    signal_under_way(processes, run, signal.SIGKILL, to=2)
    began = time.monotonic()
    left = wait(processes)
    assert time.monotonic() - began < LEAVE_S, "they waited for the lost one"
    assert_lost(left, 2)
    assert resume(run).exit_code == 0
    assert train(load_config(job, settings), tmp_path / "whole").exit_code == 0
    assert_equal(read_trained(tmp_path / "whole"), read_trained(run), BITWISE)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(("killed", "call"), [*((0, call) for call in range(40, 400, 40)), (1, 1), (1, 4)])
def test_a_kill_before_a_call_of_one_process(killed, call, job, uncut, tmp_path):
    """Of a call that changes a folder or makes a file durable; what is left goes on bitwise."""
    run, library = tmp_path / "run", disk_calls.build(tmp_path / "disk_calls.so")

    def launcher(process: int, count: int, port: int) -> dict[str, str]:
        kill = {"LD_PRELOAD": str(library), "KILL_AT_CALL": str(call)} if process == killed else {}
        return plain(process, count, port) | kill

    left = wait(start(2, 1, "train", str(job), "--out", str(run), *SETTINGS, launcher=launcher))
    codes = [process.code for process in left]
    assert codes in ([0, 0], [-signal.SIGKILL, 1] if killed == 0 else [1, -signal.SIGKILL]), left[1 - killed].err
    if not (run / "plan.json").exists():  # it was killed before the run began
        shutil.rmtree(run, ignore_errors=True)
        assert train(load_config(job, SETTINGS), run).exit_code == 0
    assert resume(run).exit_code == 0
    assert_equal(uncut.without_evaluations(), read_trained(run), BITWISE)


FAILING = """
import os, sys, jax
from lorafusion_jax.cli.main import main
from lorafusion_jax.session.stage import Stage

backward = Stage.backward

def broken(self, slot, dy):
    if slot == 9 and os.environ["JAX_PROCESS_ID"] == "1":
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no 3 GiB")
    return backward(self, slot, dy)

Stage.backward = broken
main()
"""


def test_a_stage_that_fails_in_one_process_ends_all_with_an_error_each(job, tmp_path):
    run, began = tmp_path / "run", time.monotonic()
    processes = start(2, 1, "train", str(job), "--out", str(run), *SETTINGS, program=("-c", FAILING))
    while not any(row["slot"] > 6 for row in read_rows(run / "metrics.jsonl")):
        assert time.monotonic() - began < TIME_LIMIT_S
        time.sleep(0.1)
    failing = time.monotonic()
    left = wait(processes)
    assert time.monotonic() - failing < LEAVE_S, "they waited for each other"
    assert [process.code for process in left] == [1, 1], left[0].err + left[1].err
    assert "error[train.process-lost]" in left[0].err
    message = "error[train.out-of-memory] the device has no memory left at stage 0, slot 9"
    assert any(f"{message} ({names})" in left[1].err for names in (*MIXED, ", ".join(MIXED))), left[1].err
    assert not any("stack trace" in process.err for process in left)
    assert [row["kind"] for row in read_rows(run / "events.jsonl")][-1] == "stopped"


def test_a_stage_stays_inside_a_process(job, tmp_path):
    """Both know the number of processes, which Open MPI tells here."""
    left = wait(start(2, 2, "train", str(job), "--out", str(tmp_path / "run"), "mesh.stages=3", launcher=open_mpi))
    assert [process.code for process in left] == [2, 2]
    assert all("error[mesh.processes]" in process.err and "mesh.stages: 2" in process.err for process in left)
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_a_folder_that_the_first_process_cannot_write_ends_all_at_once(job, tmp_path):
    (tmp_path / "file").touch()
    left = wait(start(2, 1, "train", str(job), "--out", str(tmp_path / "file" / "run"), "mesh.data=2"))
    assert [process.code for process in left] == [2, 2], left[0].err + left[1].err  # jax aborts who waits for another
    assert "error[run.folder]" in left[0].err
    assert "error[run.refused]" in left[1].err


ELSEWHERE = """
import os, sys
from lorafusion_jax.cli.main import main

if os.environ["JAX_PROCESS_ID"] == "1":
    sys.argv.append("adapters.law.data.train=on_another_disk.jsonl")
main()
"""


def test_data_that_one_host_lacks_end_all_at_once(job, tmp_path):
    arguments = ("train", str(job), "--out", str(tmp_path / "run"), "mesh.data=2")
    left = wait(start(2, 1, *arguments, program=("-c", ELSEWHERE)))
    assert [process.code for process in left] == [2, 2], left[0].err + left[1].err  # jax aborts who waits for another
    assert "error[run.refused]" in left[0].err
    assert "on_another_disk.jsonl" in left[1].err
    assert not (tmp_path / "run").exists()


OTHERWISE = """
import os, sys
from lorafusion_jax.cli.main import main

if os.environ["JAX_PROCESS_ID"] == "1":
    sys.argv += ["adapters.law.data.train=other.jsonl", "adapters.law.optim.lr=0.5"]
main()
"""


def test_hosts_that_would_not_train_the_same_end_before_the_first_step(job, tmp_path):
    rows = (job.parent / load_config(job).adapter("law").data.train[0].path).read_text()
    (job.parent / "other.jsonl").write_text(rows.replace('"prompt": "', '"prompt": "other ', 1))
    arguments = ("train", str(job), "--out", str(tmp_path / "run"), "mesh.data=2")
    left = wait(start(2, 1, *arguments, program=("-c", OTHERWISE)))
    assert [process.code for process in left] == [2, 2], left[0].err + left[1].err
    for process in left:
        assert "error[processes.differ]" in process.err
        assert "process 1 on" in process.err
        assert "adapters.law.optim.lr is" in process.err
        assert "the data of law differs between process 0 and process 1" in process.err
    assert not (tmp_path / "run").exists()


def test_a_process_that_nobody_tells_where_the_others_are(job, tmp_path):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "OMPI_", "JAX_"))}
    words = ("-m", "lorafusion_jax", "train", str(job), "--out", str(tmp_path / "run"), "--distributed")
    (left,) = wait([Command(words, clean)])
    assert left.code == 1
    assert "error[processes.join]" in left.err
    assert "--coordinator" in left.err


def test_one_that_waits_for_the_others_says_so_and_can_be_ended(job, tmp_path):
    first, other = start(2, 1, "train", str(job), "--out", str(tmp_path / "run"), "mesh.data=2")
    with first, other:
        other.kill()
        assert first.stderr is not None
        try:
            assert "waiting for the other processes" in first.stderr.readline()
            first.send_signal(signal.SIGTERM)
            assert first.wait(timeout=TIME_LIMIT_S) == -signal.SIGTERM
        finally:
            first.kill()
    assert not (tmp_path / "run").exists()


def test_processes_offer_their_programs_in_one_order(monkeypatch):
    """Two stages that run side by side could wait for each other's partner in the other process."""
    order = []

    class Slow:
        def __init__(self, number):
            self.place, self.mesh = number, SimpleNamespace(spans_processes=True)

        def close_batch(self, number):
            time.sleep(0.05 * (1 - self.place))
            order.append((self.place, number))
            return SimpleNamespace(squares=None), None

    monkeypatch.setattr(executor, "is_alone", lambda: False)
    run = executor.Executor([Slow(0), Slow(1)])
    ends = BatchEnds(run, {"law": 0, "med": 1})
    issued = [(stage, adapter) for adapter in ("law", "med") for stage in (0, 1)]
    for stage, adapter in issued:
        ends.close_batch(Event("update", stage, slot=0), adapter)
    run.wait_dispatched()
    assert [(stage, ["law", "med"][number]) for stage, number in order] == issued
