"""lorafusion jobs, keys and serve, against a service in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_jobs import write_job, write_rows

from lorafusion_jax.cli.main import run
from lorafusion_jax.errors import ConfigError
from lorafusion_serve.cli.serve import read_places
from lorafusion_serve.store.keys import KEY


@pytest.fixture
def call(running, tmp_path, capsys):
    """call(*arguments) → (exit code, output, errors) of `lorafusion jobs` as ana."""
    file = tmp_path / "key"
    file.write_text(running.keys["ana"] + "\n")

    def made(*arguments: str) -> tuple[int, str, str]:
        code = run(["jobs", *arguments, "--url", running.url, "--key-file", str(file)])
        return code, *capsys.readouterr()

    return made


def test_a_job_file_becomes_jobs(call, tmp_path, tiny_base):
    entries = [
        {"name": name, "data": {"train": write_rows(tmp_path, name, 9, longest=8)}, "lora": {"rank": 2}}
        for name in ("Law", "chat-x")
    ]
    jobs = write_job(tmp_path, tiny_base, entries, train={"max_steps": 2})
    code, output, errors = call("submit", str(jobs))
    assert code == 0, errors
    (job, name), (other, second) = (line.split() for line in output.splitlines())
    assert (name, second) == ("Law", "chat-x")
    code, output, _ = call("show", job)
    assert (json.loads(output)["name"], json.loads(output)["spec"]["steps"]) == ("law", 2)
    assert call("weight", job, "2.5")[0] == 0
    listed = {row["id"]: row for row in json.loads(call("ls", "--json")[1])}
    assert listed[job]["weight"] == 2.5
    for job_name in (job, other):
        assert "cancelled" in call("cancel", job_name)[1]
    code, output, _ = call("watch", job)
    assert (code, output.splitlines()[-1]) == (0, "cancelled")
    assert job in call("ls", "--state", "cancelled")[1]


def test_what_the_service_refuses_is_an_error_of_the_command(call, tmp_path):
    code, _, errors = call("cancel", "job-000000000000")
    assert code == 2
    assert "error[api.not-found]" in errors
    code, _, errors = call("download", "job-000000000000", "--to", str(tmp_path / "new"))
    assert code == 2


def test_no_service_is_one_line(capsys):
    assert run(["jobs", "ls", "--url", "http://127.0.0.1:9"]) == 1
    assert "error[jobs.no-service]" in capsys.readouterr().err


def test_keys_are_added_shown_once_and_revoked(tmp_path, capsys):
    home = ["--home", str(tmp_path / "home")]
    assert run(["keys", "ls", *home]) == 2
    assert run(["keys", "add", "ana", *home]) == 0
    key = KEY.fullmatch(capsys.readouterr().out.splitlines()[-1])
    assert key is not None
    assert run(["keys", "ls", *home]) == 0
    output = capsys.readouterr().out
    assert key[1] in output
    assert key[2] not in output
    assert run(["keys", "revoke", key[1], *home]) == 0
    assert run(["keys", "revoke", "zzzzzzzz", *home]) == 2
    assert run(["keys", "add", "../x", *home]) == 2


@pytest.mark.parametrize("text", ["16", "16:0", "0:1", "a:b", "16:1,", "16:1000"])
def test_places_are_ranks_and_numbers(text):
    with pytest.raises(ConfigError, match=r"serve\.places"):
        read_places(text)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], "serve.base"),
        (["--base", "nowhere"], "serve.base"),
        (["--base", "BASE", "lora.rank=4"], "serve.setting"),
        (["--base", "BASE", "--host", "0.0.0.0"], "serve.host"),
    ],
)
def test_a_service_that_cannot_start_says_why(tmp_path, tiny_base, capsys, arguments, code):
    given = [str(tiny_base) if word == "BASE" else word for word in arguments]
    assert run(["serve", *given, "--home", str(tmp_path / "home")]) == 2
    assert f"error[{code}]" in capsys.readouterr().err
    assert not Path(tmp_path / "home" / "control.sock").exists()
