"""What a worker saves: rows come before states, and on a full disk the newest state stays."""

from __future__ import annotations

import queue
import threading
import time
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from campaigns.service_process import wait_for

from lorafusion_jax.errors import CheckpointError, RunError
from lorafusion_jax.serve.worker import loading, loop

FULL = RunError("save.no-space", "the disk is full.")
READ_ONLY = RunError("save.failed", "it cannot be written.", why="Read-only file system")


@dataclass
class Adapter:
    """A task and its state in one; writing it fails while the disk is full."""

    name: str
    steps: int
    disk: dict
    step: int = 0
    status: str = "running"
    reason: str = ""
    references: None = None
    num_steps: int = field(init=False)

    def __post_init__(self):
        self.num_steps = self.steps

    def write(self, folder: Path) -> Path:
        assert self.disk["saves"].wait(60)
        if self.disk["full"]:
            raise self.disk["full"]
        return folder


class Bench:
    """A session in which every window is one step of every adapter."""

    has_calls = False

    def __init__(self):
        self.tasks: dict[str, Adapter] = {}
        self.places: dict[str, int] = {}
        self.drained = 0
        self.reading: list[Adapter] = []  # states whose reading has begun
        self.exported: list[Adapter] = []  # those whose weights are read
        self.reads = threading.Event()
        self.reads.set()

    def draw(self, task): ...

    def start(self, place, task, state, first):
        self.tasks[task.name], self.places[task.name] = task, place

    def at(self, place):
        return next((task for name, task in self.tasks.items() if self.places[name] == place), None)

    def plan(self, horizon):
        running = [task for task in self.tasks.values() if task.status == "running"]
        cursors = [SimpleNamespace(is_finished=task.step + 1 == task.steps) for task in running]
        return SimpleNamespace(slots=running, cursors=cursors)

    def run(self, window, listener, pause):
        pause()
        for task in window.slots:
            task.step += 1
            task.status = "done" if task.step == task.steps else "running"
            row = {"adapter": task.name, "kind": "step", "step": task.step}
            listener(SimpleNamespace(kind="step", row=row.copy))
        time.sleep(0.002)
        pause()

    def drain(self):
        self.drained += 1

    def evaluate(self, name): ...

    def read(self, name, *, optimizer=True):
        state, reads = copy(self.tasks[name]), self.reads
        (self.reading if optimizer else self.exported).append(state)

        def read():
            assert reads.wait(60)
            return state

        return read

    def forget(self, name):
        del self.tasks[name]

    def end_training(self, name):
        self.tasks[name].status = "leaving"
        return self.tasks[name].step


class Line:
    """What the server would hear."""

    def __init__(self):
        self.commands, self.events, self.refused, self.silent_s = queue.Queue(), [], "", 0.0

    def emit(self, kind, **data):
        self.events.append((kind, data))

    def of(self, kind):
        return [data for name, data in list(self.events) if name == kind]


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A worker in a thread, its line, and the disk."""
    disk, line = {"full": None}, Line()

    disk["slow"] = threading.Event()
    disk["slow"].set()
    disk["saves"] = threading.Event()
    disk["saves"].set()

    def export(task, state, target, *, name):
        assert disk["slow"].wait(60)
        if disk["full"]:
            raise disk["full"]
        return target

    def read(job, values, state, folder):
        return loading.Loaded(task=Adapter(job, values["steps"], disk), state=None, path=None)

    monkeypatch.setattr(loop, "export_task", export)
    monkeypatch.setattr(loop, "load", read)
    monkeypatch.setattr(loop, "AGAIN_S", 0.05)
    disk["session"] = Bench()
    running = disk["loop"] = loop.WorkerLoop(disk["session"], disk["session"], line, {}, save_s=0.05)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()

    disk["home"] = tmp_path / "home"
    disk["home"].mkdir()

    def start(job: str, steps: int, place: int) -> None:
        values = {"steps": steps}
        folder = disk["home"] / "jobs" / job
        command = {"command": "start", "job": job, "epoch": 1, "name": job, "folder": str(folder)}
        line.commands.put(command | {"place": place, "state": None, "values": values})

    yield start, line, disk
    running.stop.set()
    thread.join(120)
    assert not thread.is_alive()


@pytest.mark.parametrize("why", [FULL, READ_ONLY], ids=["full", "read-only"])
def test_a_job_that_leaves_a_full_disk_keeps_its_newest_state(worker, why):
    start, line, disk = worker
    start("moss", 10**6, 0)
    wait_for(lambda: line.of("saved"))
    disk["full"] = why
    wait_for(lambda: line.of("not-saved"))
    line.commands.put({"command": "stop", "job": "moss", "epoch": 1})
    wait_for(lambda: line.of("stopped"))
    saved, (stopped,) = line.of("saved")[-1], line.of("stopped")
    assert (stopped["step"], stopped["path"]) == (saved["step"], saved["path"])
    assert line.of("failed") == []


@pytest.mark.parametrize("why", [FULL, READ_ONLY], ids=["full", "read-only"])
def test_an_adapter_that_is_done_waits_for_the_disk_while_others_train(worker, why):
    start, line, disk = worker
    disk["full"] = why
    start("fern", 4, 0)
    start("moss", 10**6, 1)
    wait_for(lambda: line.of("not-saved"))
    assert line.of("finished") == []
    disk["full"] = None
    wait_for(lambda: line.of("finished"))
    assert [event["job"] for event in line.of("finished")] == ["fern"]
    assert line.of("failed") == []


def test_a_home_that_was_moved_is_not_made_anew_and_adapters_wait_for_it(worker):
    """One that was made so had the adapters of jobs that were done, and was where the home had to be put back."""
    start, line, disk = worker
    start("moss", 10**6, 1)
    wait_for(lambda: line.of("saved"))
    moved = disk["home"].rename(disk["home"].with_name("moved"))
    time.sleep(0.1)
    saves = len(line.of("saved"))
    start("fern", 4, 0)
    wait_for(lambda: {event["job"] for event in line.of("not-saved")} == {"fern", "moss"})
    assert line.of("finished") == []
    assert len(line.of("saved")) == saves
    assert not disk["home"].exists()
    moved.rename(disk["home"])
    wait_for(lambda: line.of("finished"))
    assert line.of("failed") == []


def test_others_train_without_a_pause_while_jobs_come_and_go(worker):
    """The next job trains in the place of one that is being exported."""
    start, line, disk = worker
    start("moss", 10**6, 1)
    wait_for(lambda: line.of("stepped"))
    disk["slow"].clear()
    before = disk["session"].drained
    start("fern", 3, 0)
    start("reed", 3, 2)
    wait_for(lambda: len(line.of("vacated")) == 2)
    assert sorted(disk["session"].tasks) == ["moss"]
    start("sage", 10**6, 0)
    wait_for(lambda: any(event["job"] == "sage" for event in line.of("stepped")))
    line.commands.put({"command": "stop", "job": "reed", "epoch": 1})  # it ends by itself
    step = disk["session"].at(1).step
    wait_for(lambda: disk["session"].at(1).step > step + 5)
    assert line.of("finished") == []
    disk["slow"].set()
    wait_for(lambda: len(line.of("finished")) == 2)
    assert disk["session"].drained == before
    assert sorted(disk["session"].tasks) == ["moss", "sage"]


def test_adapters_keep_their_places_when_many_wait_for_the_disk(worker, monkeypatch):
    monkeypatch.setattr(loop, "MOST_DEPARTURES", 1)
    start, line, disk = worker
    disk["slow"].clear()
    start("fern", 3, 0)
    wait_for(lambda: line.of("vacated"))
    start("reed", 3, 1)
    start("moss", 10**6, 2)
    wait_for(lambda: disk["session"].at(1) and disk["session"].at(1).status == "done")
    step = disk["session"].at(2).step
    wait_for(lambda: disk["session"].at(2).step > step + 20)
    assert [event["job"] for event in line.of("vacated")] == ["fern"]
    disk["slow"].set()
    wait_for(lambda: len(line.of("finished")) == 2)


@pytest.mark.parametrize("asked", ["job", "worker"])
def test_a_job_that_cannot_be_exported_goes_back_to_its_newest_state(worker, asked):
    start, line, disk = worker
    start("moss", 10**6, 1)
    start("fern", 400, 0)
    wait_for(lambda: any(event["job"] == "fern" for event in line.of("saved")))
    disk["full"] = FULL
    wait_for(lambda: any(event["job"] == "fern" for event in line.of("vacated")))
    wait_for(lambda: any(event["job"] == "fern" for event in line.of("not-saved")))
    if asked == "job":
        line.commands.put({"command": "stop", "job": "fern", "epoch": 1})
    else:
        disk["loop"].stop.set()
    wait_for(lambda: any(event["job"] == "fern" for event in line.of("stopped")))
    (stopped,) = (event for event in line.of("stopped") if event["job"] == "fern")
    saved = [event for event in line.of("saved") if event["job"] == "fern"][-1]
    assert (stopped["step"], stopped["path"]) == (saved["step"], saved["path"])
    assert line.of("finished") == []


def test_a_state_comes_after_the_rows_of_its_steps(worker):
    """A killed worker goes on from the newest state that the server knows: rows of steps before it never come again."""
    start, line, _ = worker
    start("fern", 10**6, 0)
    start("moss", 10**6, 2)
    wait_for(lambda: len(line.of("saved")) > 5)
    reported = {"fern": 0, "moss": 0}
    for kind, data in list(line.events):
        if kind == "stepped":
            assert data["rows"][0]["step"] == reported[data["job"]] + 1
            reported[data["job"]] = data["rows"][-1]["step"]
        elif kind == "saved":
            assert data["step"] <= reported[data["job"]]


def test_jobs_train_while_their_state_is_read(worker):
    """One state at a time is read; what is saved is the state of the step at which reading began."""
    start, line, disk = worker
    session = disk["session"]
    session.reads.clear()
    start("fern", 10**6, 0)
    start("moss", 10**6, 2)
    wait_for(lambda: session.reading)
    (state,) = session.reading
    before = {name: task.step for name, task in session.tasks.items()}
    wait_for(lambda: all(session.tasks[name].step > step + 20 for name, step in before.items()))
    assert session.reading == [state]
    assert line.of("saved") == []
    session.reads.set()
    wait_for(lambda: len({event["job"] for event in line.of("saved")}) == 2)
    first = line.of("saved")[0]
    assert (first["job"], first["step"]) == (state.name, state.step)
    assert Path(first["path"]).name == f"e1-s{state.step}"
    assert not session.drained


def test_adapters_that_are_done_come_before_saves(worker):
    """A done adapter is read once, to be exported: until then it keeps a place that others wait for."""
    start, line, disk = worker
    session = disk["session"]
    session.reads.clear()
    start("moss", 10**6, 3)
    wait_for(lambda: session.reading)
    for place, name in enumerate(("fern", "reed", "sage")):
        start(name, 3, place)
    wait_for(lambda: [task.status for task in session.tasks.values()].count("done") == 3)
    session.reads.set()
    wait_for(lambda: len(line.of("finished")) == 3)
    assert sorted(state.name for state in session.exported) == ["fern", "reed", "sage"]
    assert {state.name for state in session.reading} == {"moss"}


def test_adapters_that_are_done_do_not_wait_for_saves(worker):
    """They are read before any save, and exported while one is being written."""
    start, line, disk = worker
    session = disk["session"]
    disk["saves"].clear()
    start("moss", 10**6, 0)
    wait_for(lambda: session.reading)  # and then it is written, slowly
    for place in range(1, 6):
        start(f"job{place}", 3, place)
    wait_for(lambda: len(line.of("finished")) == 5)
    session.reads.clear()
    start("fern", 3, 1)
    wait_for(lambda: session.at(1) and session.at(1).status == "done")
    disk["saves"].set()
    wait_for(lambda: line.of("saved"))
    step, read = session.at(0).step, len(session.reading)
    wait_for(lambda: session.at(0).step > step + 60)
    assert len(session.reading) == read
    session.reads.set()
    wait_for(lambda: len(line.of("finished")) == 6)
    wait_for(lambda: len(session.reading) > read)


def test_states_of_jobs_are_read_in_turn(worker):
    start, line, disk = worker
    for place in range(4):
        start(f"job{place}", 10**6, place)
    wait_for(lambda: len(line.of("started")) == 4)
    before = len(disk["session"].reading)
    wait_for(lambda: len(line.of("saved")) > before + 12)
    turns = [state.name for state in disk["session"].reading][before : before + 12]
    assert all(len(set(turns[at : at + 4])) == 4 for at in range(9))


def test_a_state_of_a_refused_step_is_not_saved(worker):
    """The devices may refuse a step after its state was copied: nothing of it gets to the disk."""
    start, line, disk = worker
    session = disk["session"]
    session.reads.clear()
    start("fern", 10**6, 0)
    wait_for(lambda: session.reading)
    session.reading[0].step += 10**6  # issued, not taken
    session.reads.set()
    before = session.at(0).step
    wait_for(lambda: session.at(0).step > before + 20)
    session.at(0).status = "failed"
    wait_for(lambda: line.of("failed"))
    assert line.of("saved") == []


def wait_for_others(session) -> None:
    """Waits until the job in place 1 has taken twenty steps more."""
    others = session.at(1).step
    wait_for(lambda: session.at(1).step > others + 20)


def test_others_train_while_a_stopped_job_is_read_and_written(worker):
    """Its place is free once it is read; it has stopped once it is on the disk."""
    start, line, disk = worker
    session = disk["session"]
    start("moss", 10**6, 1)
    start("fern", 10**6, 0)
    wait_for(lambda: session.at(0) and session.at(0).step > 3)
    session.reads.clear()
    disk["saves"].clear()
    before = session.drained
    line.commands.put({"command": "stop", "job": "fern", "epoch": 1})
    wait_for(lambda: session.at(0).status == "leaving")
    step = session.at(0).step
    wait_for_others(session)
    assert line.of("vacated") == []
    session.reads.set()
    wait_for(lambda: line.of("vacated"))
    start("reed", 10**6, 0)
    wait_for(lambda: any(event["job"] == "reed" for event in line.of("stepped")))
    wait_for_others(session)
    assert line.of("stopped") == []
    disk["saves"].set()
    wait_for(lambda: line.of("stopped"))
    (stopped,) = line.of("stopped")
    assert (stopped["job"], stopped["step"], Path(stopped["path"]).name) == ("fern", step, f"e1-s{step}")
    assert session.drained == before


def test_a_stopped_job_whose_last_step_is_refused_fails(worker):
    """The step was issued when the job was stopped, and counts once it was read."""
    start, line, disk = worker
    session = disk["session"]
    start("moss", 10**6, 1)
    start("fern", 10**6, 0)
    wait_for(lambda: session.at(0) and session.at(0).step > 3)
    ahead = session.end_training
    session.end_training = lambda place: ahead(place) + 1
    line.commands.put({"command": "stop", "job": "fern", "epoch": 1})
    wait_for(lambda: session.at(0).status == "leaving")
    wait_for_others(session)
    assert line.of("vacated") == []
    session.end_training = ahead
    session.at(0).status = "failed"
    wait_for(lambda: line.of("failed"))
    assert line.of("stopped") == []


def test_a_placement_starts_once(worker):
    """The server asks again after a reconnection; the job may have ended since, and another one has its place."""
    start, line, _ = worker
    start("fern", 3, 0)
    wait_for(lambda: line.of("finished"))
    start("fern", 3, 0)
    start("moss", 3, 0)
    wait_for(lambda: len(line.of("finished")) == 2)
    assert [event["job"] for event in line.of("started")] == ["fern", "moss"]
    assert line.of("failed") == []


def test_data_that_cannot_be_read_fails_its_job_alone(worker, monkeypatch):
    start, line, _ = worker
    start("moss", 10**6, 1)
    wait_for(lambda: line.of("started"))

    def broken(*_):
        raise ZeroDivisionError("a defect of a reader")

    monkeypatch.setattr(loop, "load", broken)
    start("fern", 3, 0)
    wait_for(lambda: line.of("failed"))
    (failed,) = line.of("failed")
    assert (failed["job"], failed["reason"]) == ("fern", "a defect of a reader")
    before = len(line.of("stepped"))
    wait_for(lambda: len(line.of("stepped")) > before)


def test_a_damaged_state_costs_its_steps_only(tmp_path, monkeypatch):
    """A job starts from the newest state that is whole, else from the beginning."""

    def read(folder, adapter):
        if not (folder / "whole").exists():
            raise CheckpointError("state.damaged", f"{folder.name} is damaged.")
        return folder.name

    for name in ("parse_config", "source_of", "prepare", "read_references"):
        monkeypatch.setattr(loading, name, lambda *_: None)
    monkeypatch.setattr(loading, "Task", SimpleNamespace(of=lambda *_: SimpleNamespace(name="fern", adapter=None)))
    monkeypatch.setattr(loading.AdapterState, "read", staticmethod(read))
    states = tmp_path / "state"
    for name in ("e1-s4", "e1-s12", "e3-s2", "e2-s9"):
        (states / name).mkdir(parents=True)
    loaded = loading.load("fern", {}, states / "e2-s9", tmp_path)
    assert (loaded.state, loaded.path) == (None, None)
    assert "e2-s9 is damaged" in loaded.damage
    (states / "e1-s4" / "whole").touch()
    (states / "e3-s2" / "whole").touch()  # newer than what the server knows
    (states / "e1-s12" / "whole").touch()  # of later steps: there are no rows of those between
    loaded = loading.load("fern", {}, states / "e2-s9", tmp_path)
    assert (loaded.state, loaded.path) == ("e1-s4", states / "e1-s4")
