"""One of two processes of a run is killed before every call that touches the run's folder, and one process goes on.

The run begins, adapters join it and are extended, or it moves to another mesh. The first process writes the folder, so
what a kill of it, or of both, leaves before a call is the folder as it is then: it is copied before every call of an
undisturbed run, and every copy is resumed by one process. The exported weights and all losses must be, bit for bit,
those of one process that was not disturbed. Some kills are real: of the first process before a call, and of the other
at any of its calls about names. Models are real ones, of two layers.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import shutil
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from campaigns import tiny_run
from campaigns.cases import Case, Row, in_any_order
from campaigns.disk_calls import copied, watched
from campaigns.forked import Child
from campaigns.kills import leftovers, outcome
from campaigns.kills_of_changes import contents, resumed
from campaigns.quick_runs import listening

from lorafusion_jax.cli.main import run as lorafusion

BEGIN, ADD, MOVE = "begin, two processes", "add and extend, two processes", "move, two processes"
PARTS = (BEGIN, ADD, MOVE)
COPIES = 20  # of a case
REAL_KILLS = 12  # of each part and process
DATA, STAGES = "mesh.data=2", "mesh.stages=2"
LIMIT_S = 240


class SeveralProcesses:
    name = "several_processes"

    def prepare(self, home: Path) -> None:
        """This process starts no device: those it forks do."""
        _in_one(home, lambda: int(not tiny_run.write_base(home / "base", num_layers=2)))
        _write_jobs(home)
        _in_one(home, lambda: _stop(home))
        for part in PARTS:
            _in_one(home, lambda part=part: _reference(home, part))
        for part in PARTS:
            (into := home / "copies" / part).mkdir(parents=True)
            run = _run_before(home, part, home / "counted")
            codes, calls = _two_processes(home, part, run, into)
            assert codes == [0, 0], (home / "0.log").read_text()[-2000:] + (home / "1.log").read_text()[-2000:]
            assert calls[1] == 0, "the other process writes the folder, too"
            assert calls[0] > 0
            _drop_repeated(into, calls[0])

    def cases(self, home: Path) -> Iterable[Case]:
        cases = []
        for part in PARTS:
            calls = json.loads((home / "copies" / part / "calls.json").read_text(encoding="utf-8"))
            for start in range(1, calls + 1, COPIES):
                numbers = range(start, min(start + COPIES, calls + 1))
                cases.append(Case(name=f"{part} from {start}", run=partial(_resume_copies, home, part, numbers)))
        kills = [
            Case(name=f"{part}: process {process} @ {share}", run=partial(_kill, home, part, process, share))
            for part in PARTS
            for process in (0, 1)
            for share in range(REAL_KILLS)
        ]
        return in_any_order(cases, self.name) + in_any_order(kills, self.name)


def _in_one(home: Path, work: Callable[[], int], devices: int = 2) -> None:
    """In a process of its own with some devices."""
    child = Child(home / "one.log", lambda: (jax.config.update("jax_num_cpu_devices", devices), work())[1])
    if child.wait() != 0:
        raise RuntimeError(child.log.read_text(errors="replace")[-3000:])


def _write_jobs(home: Path) -> None:
    rows = [tiny_run.write_rows(home, name) for name in ("ask", "cards")]
    names = {"ask": rows[0], "cards": rows[1], "late": rows[1]}
    entries = [{"name": name, "data": {"train": file}, "seed": seed} for seed, (name, file) in enumerate(names.items())]
    lora = {"rank": 4, "dropout": 0.1, "targets": ["down_proj"]}
    shared = {"lora": lora, "data": {"max_length": 32}}
    train = {"max_steps": 4, "plan_seconds": 0.01, "log_every_s": 0, "block_layers": 1}
    tiny_run.write_job(home, home / "base", entries[:2], save={"every_steps": 3, "keep": 1}, train=train, **shared)
    (home / "more.yaml").write_text(json.dumps({"adapters": entries[2:], **shared}), encoding="utf-8")


def _stop(home: Path) -> int:
    """A run of one process that stands still after its first step."""

    def stop(event: Any) -> None:
        if event.kind == "step":
            signal.raise_signal(signal.SIGTERM)

    with listening(stop):
        code = lorafusion(["train", str(home / "jobs.yaml"), "--out", str(home / "stopped"), DATA])
    return int(code != 130)


def _run_before(home: Path, part: str, run: Path) -> Path:
    """A new copy of the run before it changes, or the place of one that is to begin."""
    shutil.rmtree(run, ignore_errors=True)
    if part == BEGIN:
        return run
    shutil.copytree(home / "stopped", run, symlinks=True)
    if part == ADD:
        assert lorafusion(["add", str(run), str(home / "more.yaml")]) == 0
        assert lorafusion(["extend", str(run), "ask", "--steps", "2"]) == 0
    return run


def _arguments(home: Path, part: str, run: Path) -> list[str]:
    if part == BEGIN:
        return ["train", str(home / "jobs.yaml"), "--out", str(run), DATA]
    return ["resume", str(run), *(["mesh.data=1", STAGES] if part == MOVE else [])]


def _reference(home: Path, part: str) -> int:
    run = _run_before(home, part, home / "reference")
    code = lorafusion(_arguments(home, part, run))
    (home / f"{part}.pickle").write_bytes(pickle.dumps(outcome(run)))
    return code


def _two_processes(
    home: Path, part: str, run: Path, into: Path | None = None, *, killed: int = -1, call: int = 0
) -> tuple[list[int], list[int]]:
    """Exit codes of both, and how often each touched the folder.

    Args:
        into: for copies of the folder before every call of the first.
        killed: process that is killed before a call; of the other, any call about a name counts.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    arguments = [*_arguments(home, part, run), "--distributed", "--coordinator", f"localhost:{port}"]

    def work(process: int) -> int:
        jax.config.update("jax_num_cpu_devices", 1)
        at = call if process == killed else 0
        disk = watched("" if process == killed == 1 else run, at=at)
        if into is not None and process == 0:
            disk = copied(run, into)
        with disk as seen:
            code = lorafusion([*arguments, "--num-processes", "2", "--process-id", str(process)])
        run.with_name(f"{run.name}.{process}").write_text(str(len(seen.calls)))
        atexit._run_exitfuncs()  # a process that ends without them looks lost
        return code

    children = [Child(run.with_name(f"{process}.log"), partial(work, process)) for process in (0, 1)]
    codes = [child.wait(LIMIT_S) for child in children]
    counts = [run.with_name(f"{run.name}.{process}") for process in (0, 1)]
    return codes, [int(count.read_text()) if count.exists() else 0 for count in counts]


def _drop_repeated(copies: Path, calls: int) -> None:
    """Removes copies that equal the one before, and notes the number of calls."""
    content = None
    for call in range(1, calls + 1):
        if content == (content := contents(copies / str(call))) and call > 1:
            shutil.rmtree(copies / str(call), ignore_errors=True)
            (copies / f"{call}.same").touch()
    (copies / "calls.json").write_text(str(calls), encoding="utf-8")


def _resume_copies(home: Path, part: str, calls: Sequence[int], work: Path) -> list[Row]:
    jax.config.update("jax_num_cpu_devices", 2)
    (copies := work / "copies").mkdir()
    new = [call for call in calls if not (home / "copies" / part / f"{call}.same").exists()]
    for call in new:
        if (saved := home / "copies" / part / str(call)).exists():
            shutil.copytree(saved, copies / str(call), symlinks=True)
    rows = resumed(copies, new, part, lambda left: _assert_bitwise(home, part, left))
    known = {row["call"]: row for row in rows}
    for call in calls:  # what equals a copy of the case before is held or lost there
        if call not in known:
            earlier = known.get(call - 1, {"result": "held"})
            known[call] = earlier | {"part": part, "call": call, "item": f"{part} @ {call}", "resumed": 0, "cpu_s": 0.0}
    return [known[call] for call in calls]


def _assert_bitwise(home: Path, part: str, run: Path) -> str:
    """Resumes a run to its end; returns which undisturbed run it equals: one that has not moved yet may stay."""
    if part == BEGIN and not (run / "plan.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        assert lorafusion(_arguments(home, part, run)) == 0
    assert lorafusion(["resume", str(run)]) == 0
    (result,) = [outcome(run)]
    equal = [
        other
        for other in ((MOVE, BEGIN) if part == MOVE else (part,))
        if pickle.loads((home / f"{other}.pickle").read_bytes()) == result
    ]
    assert equal, "it is not the undisturbed run"
    assert not leftovers(run), leftovers(run)
    return equal[0]


def _kill(home: Path, part: str, process: int, share: int, work: Path) -> Row:
    """Kills a process before one of its calls, at a share of those of the first.

    While the first waits for nobody, JAX itself may end it when it misses the other.
    """
    calls = json.loads((home / "copies" / part / "calls.json").read_text(encoding="utf-8"))
    call = 1 + calls * share // REAL_KILLS if process == 0 else 1 + share
    run = _run_before(home, part, work / "run")
    codes, _ = _two_processes(home, part, run, killed=process, call=call)
    kill = -signal.SIGKILL
    ends = ([0, 0], *([[kill, 1]] if process == 0 else [[1, kill], [-signal.SIGABRT, kill]]))
    logs = "".join((work / f"{number}.log").read_text(errors="replace")[-1500:] for number in (0, 1))
    assert codes in ends, f"{codes}\n{logs}"
    jax.config.update("jax_num_cpu_devices", 2)
    equal = _assert_bitwise(home, part, run)
    return {
        "part": f"{part}, real kills",
        "call": call,
        "code": codes[process],
        "other": codes[1 - process],
        "kind": equal,
        "item": str(os.getpid()),
    }
