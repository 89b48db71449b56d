"""The library that kills at a call, or fails one, sees the calls of Python; and a pool tells what was lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from campaigns import disk_calls
from campaigns.cases import HELD, LOST, Case, shards
from campaigns.kills_of_changes import contents

PATHS = [str(Path(__file__).parents[number]) for number in (1, 2)]  # of tests, and of the checkout

COPIES = -1
PROGRAM = """
import sys
from pathlib import Path
from campaigns.disk_calls import copied, watched
from lorafusion_jax.files import replace_text

folder, at, error = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with watched(sys.argv[4], at=at, error=error) as seen:
    try:
        replace_text(folder / "note.txt", "new")
    except OSError as problem:
        print(problem.errno, problem.filename)
print(seen.calls)
if error < 0:  # copies instead
    (folder / "note.txt").write_text("old")
    with copied(folder, Path(sys.argv[5])):
        replace_text(folder / "note.txt", "new")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    return disk_calls.build(tmp_path_factory.mktemp("library") / "disk_calls.so")


def run(
    library: Path, folder: Path, at: int, error: int = 0, watched: Path | None = None, copies: Path | None = None
) -> subprocess.CompletedProcess:
    environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(PATHS)}
    arguments = [sys.executable, "-c", PROGRAM, str(folder), str(at), str(error), str(watched or folder), str(copies)]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True)


def test_calls_are_counted_failed_and_killed_at(library, tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("old")
    assert run(library, tmp_path, 1, watched=tmp_path / "note").stdout.splitlines() == [""]  # of no folder below it
    counted = run(library, tmp_path, 0)
    assert counted.stdout == "wwsns\n"  # opened, written, synced, renamed, its folder synced
    for call in range(1, 5):
        note.write_text("old")
        (tmp_path / ".note.txt.part").unlink(missing_ok=True)  # of who was killed
        failed = run(library, tmp_path, call, errno.EIO)
        assert failed.stdout.startswith(f"{errno.EIO} {tmp_path}"), failed.stderr  # the error names a file
        assert note.read_text() == "old"
        assert [file.name for file in tmp_path.iterdir()] == ["note.txt"]
        assert run(library, tmp_path, call).returncode == -signal.SIGKILL
        assert note.read_text() == "old"
    assert run(library, tmp_path, 5).returncode == -signal.SIGKILL
    assert note.read_text() == "new"  # it has its name
    assert run(library, tmp_path, 6).returncode == 0


def test_a_copy_before_a_call_is_what_a_kill_leaves(library, tmp_path):
    (folder := tmp_path / "folder").mkdir()
    (copies := tmp_path / "copies").mkdir()
    run(library, folder, 0, COPIES, copies=copies)
    assert contents(folder)["note.txt"] == b"new"
    for call in range(1, 6):
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "note.txt").write_text("old")
        assert run(library, folder, call).returncode == -signal.SIGKILL
        assert contents(copies / str(call)) == contents(folder), call
    assert sorted(path.name for path in copies.iterdir()) == ["1", "2", "3", "4", "5"]


POOL = """
import sys, time
from pathlib import Path
from campaigns.cases import Case, Pool, Rows

def fail(work):
    raise ValueError("it is gone")

def loop(work):
    (work / "file").touch()
    return [{"part": "a"}, {"part": "b"}]

class Small:
    name = "small"
    def prepare(self, home):
        (home / "ready").touch()
    def cases(self, home):
        assert (home / "ready").exists()
        return [Case(name="good", run=loop), Case(name="bad", run=fail)]

out, small = Path(sys.argv[1]), Small()
rows = Rows(out / "rows.jsonl")
pool = Pool(rows, Path(sys.argv[2]), 2)
pool.prepare([small], {"small": Path(sys.argv[2]) / "home"})
pool.run({"small": small.cases(Path(sys.argv[2]) / "home")}, time.monotonic() + 60)
print(len(rows.lost))
"""


def test_a_pool_writes_a_row_for_every_case_and_makes_none_twice(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)}
    for sitting in ("first", "second"):
        (tmp_path / sitting).mkdir()
        arguments = [sys.executable, "-c", POOL, str(tmp_path), str(tmp_path / sitting)]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1:] == ["1"], done.stderr
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        assert sorted((row["case"], row["result"]) for row in rows) == [("bad", LOST), ("good", HELD), ("good", HELD)]
        assert "it is gone" in next(row["text"] for row in rows if row["result"] == LOST)
        assert all(row["cpu_s"] >= 0 and row["peak_mb"] > 0 for row in rows)


def test_shards_are_all_cases_once():
    cases = [Case(name=str(number), run=lambda _: {}) for number in range(7)]
    parts = [case.name for number in (1, 2, 3) for case in shards(cases, number, 3)]
    assert sorted(parts) == [case.name for case in cases]
