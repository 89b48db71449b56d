"""Whatever lies in `control/` is read with limits: it is done, or refused and moved away, and the run goes on."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from campaigns.quick_runs import command, damage, losses
from more_cases import mostly_nightly
from watched_runs import events_of

from lorafusion_jax.checkpoint import requests
from lorafusion_jax.checkpoint.requests import request_files
from lorafusion_jax.errors import MOST_SHOWN
from lorafusion_jax.readable import SETTINGS


@pytest.fixture
def run(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "control").mkdir()
    return tmp_path / "run"


def about(action, **more):
    return lambda path: path.write_text(json.dumps({"action": action, "adapter": "law"} | more))


def text(content):
    return lambda path: path.write_text(content)


def tens(count):
    return "1" + "0" * count


def sparse(path):
    with path.open("wb") as file:
        file.truncate(20 * 10**9)


def fifo(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()
    (path / "file").touch()


def loop(path):
    path.symlink_to(path.name)


HOSTILE = {
    "weight 10^400": text(f'{{"action": "weight", "adapter": "law", "weight": {tens(400)}}}'),
    "weight 10^5000": text(f'{{"action": "weight", "adapter": "law", "weight": {tens(5000)}}}'),
    "weight 1e999": text('{"action": "weight", "adapter": "law", "weight": 1e999}'),
    "weight 1e39": about("weight", weight=1e39),
    "weight true": about("weight", weight=True),
    "epochs 2^31": about("extend", epochs=2**31),
    "epochs 2^31-1": about("extend", epochs=2**31 - 1),
    "steps 2^31-1": about("extend", steps=2**31 - 1),
    "steps 10^9": about("extend", steps=10**9),
    "steps 10^400": text(f'{{"action": "extend", "adapter": "law", "steps": {tens(400)}}}'),
    "half a character": about("pause", adapter="la\ud800w"),
    "a name as a path": about("cancel", adapter="../../law"),
    "a name with a line": about("cancel", adapter="law\nlaw"),
    "a long name": about("cancel", adapter="l" * 10**6),
    "no name": about("cancel", adapter=None),
    "action as a list": about(["cancel"]),
    "no adapters": about("add", adapters=[]),
    "adapters as a number": about("add", adapters=7),
    "an adapter that is a text": about("add", adapters=["law"]),
    "an adapter of pipes": about("add", adapters=[{"name": "tax", "data": {"train": "/dev/zero"}}]),
    "an adapter without data": about("add", adapters=[{"name": "tax", "data": {"train": "/nowhere.jsonl"}}]),
    "a rank of 10^9": about("add", adapters=[{"name": "tax", "data": {"train": "law.jsonl"}, "lora": {"rank": 10**9}}]),
    "deep": text("[" * 100_000),
    "a list": text("[1, 2]"),
    "empty": text(""),
    "zeros": lambda path: path.write_bytes(bytes(1000)),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "20 GB": sparse,
    "a pipe": fifo,
    "a folder": folder,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("/nowhere"),
    "a link to itself": loop,
}


ALWAYS = (
    "weight 10^400",
    "epochs 2^31",
    "action as a list",
    "an adapter of pipes",
    "deep",
    "20 GB",
    "a pipe",
    "a folder",
)


@pytest.mark.parametrize("what", mostly_nightly(HOSTILE, ALWAYS))  # all of them at once: below, in every run
def test_it_is_refused_and_the_run_goes_on(what, run):
    HOSTILE[what](run / "control" / "0-evil.json")
    outcome = command("resume", run)
    assert outcome.code == 0, outcome.text
    assert losses(run) + damage(run) == []
    (rejected,) = events_of(run, "request-refused")
    assert len(rejected["text"]) < 2100
    assert "request refused" in outcome.text
    assert request_files(run) == []
    assert os.path.lexists(run / "control" / "refused" / "0-evil.json")
    assert command("status", run).code == 0
    assert command("verify", run).code == 0


def test_all_at_once_and_one_that_is_good(run):
    for number, write in enumerate(HOSTILE.values()):
        write(run / "control" / f"{number:02}.json")
    name = os.fsencode(run / "control") + b"/\xff.json"  # no text in any encoding
    with open(name, "w") as file:
        file.write("{}")
    about("extend", steps=2)(run / "control" / "99.json")
    assert command("resume", run).code == 0
    assert losses(run) + damage(run) == []
    refused = events_of(run, "request-refused")
    assert len(refused) == len(HOSTILE) + 1
    assert max(len(row["text"]) for row in refused) < MOST_SHOWN + 10
    assert [row["action"] for row in events_of(run, "adapter-changed")] == ["extend"]
    assert request_files(run) == []
    put_away = {path.name for path in (run / "control" / "refused").iterdir()}
    assert put_away == {f"{number:02}.json" for number in range(len(HOSTILE))} | {"\udcff.json"}
    assert command("verify", run).code == 0


def test_one_that_cannot_be_moved_away_is_refused_once(run, monkeypatch):
    def refuse(file):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr("lorafusion_jax.training.revisions.put_away", refuse)
    text("{}")(run / "control" / "0.json")
    assert command("resume", run).code == 0
    assert len(events_of(run, "request-refused")) == 1
    assert losses(run) == []


def test_what_was_refused_before_makes_room(tmp_path):
    for content in ("old", "new"):
        (tmp_path / "x.json").mkdir()
        (tmp_path / "x.json" / content).touch()
        requests.put_away(tmp_path / "x.json")
    assert [file.name for file in (tmp_path / "refused" / "x.json").iterdir()] == ["new"]


def test_a_request_may_be_long(run):
    spaces = " " * (SETTINGS - 200)
    text(f'{{"action": "extend", "adapter": "law", "steps": 1}}{spaces}')(run / "control" / "0.json")
    assert command("resume", run).code == 0
    assert [row["action"] for row in events_of(run, "adapter-changed")] == ["extend"]
