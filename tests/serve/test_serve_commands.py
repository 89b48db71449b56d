"""lorafusion jobs, keys and serve, against a service in this process."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from small_jobs import write_job, write_rows

from lorafusion_jax.cli.main import run
from lorafusion_jax.config.load import load_config
from lorafusion_jax.errors import ConfigError, LoraFusionError
from lorafusion_jax.planning import prediction
from lorafusion_jax.serve import demo, server
from lorafusion_jax.serve.cli.jobs import _service, job_of
from lorafusion_jax.serve.cli.serve import read_places, read_sampler_places
from lorafusion_jax.serve.client import Client, Job, ServiceError
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.store.jobs import Jobs
from lorafusion_jax.serve.store.keys import KEY, list_keys


@pytest.fixture
def call(running, tmp_path, capsys):
    """call(*arguments) → (exit code, output, errors) of `lorafusion jobs` as ana."""
    file = tmp_path / "key"
    file.write_text(running.keys["ana"] + "\n")

    def made(*arguments: str) -> tuple[int, str, str]:
        code = run(["jobs", *arguments, "--url", running.url, "--key-file", str(file)])
        return code, *capsys.readouterr()

    return made


def test_a_job_file_says_the_priority_of_its_jobs(tmp_path):
    file = tmp_path / "jobs.yaml"
    adapters = "[{name: a, priority: -4, data: {train: a.jsonl}}, {name: b, data: {train: b.jsonl}}]"
    file.write_text(f"base: {{model: some/model}}\npriority: 7\nadapters: {adapters}\n")
    config = load_config(file)
    assert [job_of(config, adapter, None)["priority"] for adapter in config.adapters] == [-4, 7]


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
    assert "new -> checking  (submit by ana)" in call("log", job)[1].splitlines()[0]
    assert "-> cancelled" in call("log", job, "--tail", "1")[1]
    assert "deleted" in call("delete", job)[1]
    assert job not in call("ls")[1]
    assert call("show", other)[0] == 0


def test_what_the_service_refuses_is_an_error_of_the_command(call, tmp_path):
    code, _, errors = call("cancel", "job-000000000000")
    assert code == 2
    assert "error[api.not-found]" in errors
    assert "fix: lorafusion jobs ls\n" in errors
    code, _, errors = call("download", "job-000000000000", "--to", str(tmp_path / "new"))
    assert code == 2


def test_refusals_have_fixes_that_a_command_line_takes(call, tmp_path, tiny_base):
    entry = {"name": "law", "data": {"train": write_rows(tmp_path, "law", 9, longest=8)}, "lora": {"rank": 2}}
    code, _, errors = call("submit", str(write_job(tmp_path, tiny_base, [entry])), "--base", "huge")
    assert (code, "error[job.base] there is no base 'huge'" in errors) == (2, True)
    assert "fix: --base NAME, one of: " in errors


def test_all_refusals_of_a_request_are_shown():
    refusals = [{"code": f"job.{name}", "what": f"{name}.", "fix": f"mend {name}"} for name in ("rank", "kind")]
    with pytest.raises(LoraFusionError) as shown, _service("http://127.0.0.1:1", None):
        raise ServiceError(422, refusals)
    assert all(f"fix: mend {name}" in str(shown.value) for name in ("rank", "kind"))


def test_who_sends_no_key_is_told_where_it_goes(running, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(["jobs", "ls", "--url", running.url]) == 2
    told = capsys.readouterr().err
    assert "error[api.key]" in told
    assert "to ~/.config/lorafusion/key, or --key-file FILE" in told
    (tmp_path / ".config" / "lorafusion").mkdir(parents=True)
    (tmp_path / ".config" / "lorafusion" / "key").write_text(running.keys["ana"])
    assert run(["jobs", "ls", "--url", running.url]) == 0


def test_no_service_is_one_line(capsys):
    assert run(["jobs", "ls", "--url", "http://127.0.0.1:9"]) == 1
    assert "error[jobs.no-service] no service answers at http://127.0.0.1:9." in capsys.readouterr().err


@pytest.fixture
def stranger():
    """URL of another program's server."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<h1>hello</h1>")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("127.0.0.1:7070", "jobs.url"),
        ("http://127.0.0.1:99999", "jobs.url"),
        ("http://[::1", "jobs.url"),
        ("http://a b:1", "jobs.url"),
        ("ftp://127.0.0.1", "jobs.url"),
        ("http://nowhere.invalid", "jobs.no-service"),
        ("STRANGER", "http.answer"),
    ],
)
@pytest.mark.parametrize("command", [("ls",), ("watch", "job-0123456789ab")])
def test_a_wrong_address_is_one_error(stranger, capsys, url, code, command):
    assert run(["jobs", *command, "--url", stranger if url == "STRANGER" else url]) in (1, 2)
    told = capsys.readouterr().err
    assert f"error[{code}]" in told
    assert "fix:" in told


@pytest.mark.parametrize("content", ["KEY\nKEY", "KEY\n# mine", "", "kéy", "\x00\xff", "Bearer KEY"])
def test_a_file_that_holds_no_key_is_an_error_that_does_not_show_it(running, tmp_path, capsys, content):
    file = tmp_path / "key"
    file.write_text(content.replace("KEY", running.keys["ana"]))
    for command in (["ls"], ["show", "job-0123456789ab"]):
        assert run(["jobs", *command, "--url", running.url, "--key-file", str(file)]) == 2
        told = "".join(capsys.readouterr())
        assert "error[jobs.key]" in told
        assert running.keys["ana"][-20:] not in told


@pytest.mark.parametrize(("ends", "encoding"), [("\r\n", "utf-8-sig"), ("\n\n", "utf-8"), ("\r\n", "utf-16")])
def test_a_key_that_a_shell_of_windows_wrote_is_one_or_is_told_how_to_convert_it(
    running, tmp_path, capsys, ends, encoding
):
    file = tmp_path / "key"
    file.write_bytes(f"{running.keys['ana']}{ends}".encode(encoding))
    code = run(["jobs", "ls", "--url", running.url, "--key-file", str(file)])
    told = capsys.readouterr().err
    assert (code, "fix: iconv -f utf-16" in told) == ((2, True) if encoding == "utf-16" else (0, False))


@pytest.mark.parametrize("job", ["a b", "ö", "../../healthz", "%2e", "?x", "#", "a\nb"])
@pytest.mark.parametrize("command", ["show", "cancel", "watch", "log", "metrics", "delete"])
def test_an_id_is_a_name_whatever_its_signs_are(call, job, command):
    code, _, told = call(command, job)
    assert (code, "error[api." in told) == (2, True)


@pytest.mark.parametrize("command", ["weight", "priority"])
def test_what_changes_a_job_takes_its_id_as_a_name(call, command):
    code, _, told = call(command, "?x", "3")
    assert (code, "error[api." in told) == (2, True)


def test_a_weight_below_zero_is_refused_by_its_rule(call):
    code, _, told = call("weight", "job-0123456789ab", "-1")
    assert code == 2
    assert "No such option" not in told


def test_a_download_that_breaks_can_be_repeated(running, tmp_path, monkeypatch):
    class Cut:
        def read(self, size=-1):
            return b""

    job, target = Job(running.client("ana"), "job-0123456789ab"), tmp_path / "law"
    monkeypatch.setattr(Client, "stream", lambda *_: nullcontext(Cut()))
    for _ in range(2):
        with pytest.raises(OSError, match=r"broken off|SHA256SUMS"):
            job.adapter(target)
        assert not target.exists()


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
    assert run(["keys", "limits", "ana", *home]) == 2
    assert f"a key of ana: {key[1]}" in capsys.readouterr().err
    for text in (key[0], f"Bearer {key[0]} ", key[0][:-3]):
        assert run(["keys", "revoke", text, *home]) == 0, "who has the key itself need not know its name"
    assert run(["keys", "revoke", f"{key[1][:-1]}_{key[2]}", *home]) == 2
    shown = capsys.readouterr()
    assert key[2][:-3] not in shown.out + shown.err
    assert run(["keys", "limits", "ana", *home]) == 2
    assert "keys ls" in capsys.readouterr().err
    assert run(["keys", "revoke", "zzzzzzzz", *home]) == 2
    assert run(["keys", "ls", "--home", str(tmp_path / "hoem")]) == 2
    assert f"did you mean '{tmp_path / 'home'}'?" in capsys.readouterr().err
    assert run(["keys", "add", "../x", *home]) == 2


@pytest.mark.parametrize("text", ["16", "16:0", "0:1", "a:b", "16:1,", "16:1000"])
def test_places_are_ranks_and_numbers(text):
    with pytest.raises(ConfigError, match=r"serve\.places"):
        read_places(text)


@pytest.mark.parametrize("text", ["0", "257", "-1", "16:8", "many", "64:0", "64:8:1", ""])
def test_places_of_samplers_are_checked(text):
    with pytest.raises(ConfigError, match="neither a number from 1 to 256 nor 64:NUMBER"):
        read_sampler_places(text, "16:8,64:2")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--jobs-share", "1"], "add --training-api"),
        (["--yield-s", "5", "--policy", "ours"], "the policy ours decides"),
        (["batch.capacity_token=64"], "did you mean 'batch.capacity_tokens'?"),
        (["train.remat"], "fix: train.remat=VALUE"),
        (["train.remat=some"], "'train.remat' must be 'auto', 'everything', 'gemm_inputs' or 'nothing', not 'some'"),
        (["batch.tile_tokens=12"], "batch.tile_tokens"),
        (["base.quantize=auto"], "base.quantize is auto, which looks at the data of a run"),
        (["base.model=models/any"], "fix: --base FOLDER"),
        (["--base", "models/any"], "models/tiny"),
        (["--base", "small=models"], "fix: models/tiny; or a folder with config.json"),
    ],
)
def test_what_a_service_does_not_take_is_refused(options, why, tmp_path, tiny_base, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").touch()
    assert run(["serve", "--home", str(tmp_path / "home"), "--base", str(tiny_base), *options]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--device", "l40s"], "--device has no effect here"),
        (["--memory-gib", "40", "--gpus", "0", "--policy", "ours"], "--gpus 0 plans with the rates of a CPU"),
        (["--gpus", "2", "--device", "tpu"], "there are no rates of tpu"),
        (["--gpus", "2", "mesh.tensor=2"], "the policy ours decides the mesh"),
    ],
)
def test_settings_that_a_policy_cannot_use_are_refused(options, why, tmp_path, tiny_base, capsys):
    assert run(["serve", "--home", str(tmp_path / "home"), "--base", str(tiny_base), *options]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("gpu", "options", "planned"),
    [
        ("NVIDIA L40S", [], ("l40s", 44.0, "this machine has NVIDIA L40S")),
        ("NVIDIA L40S", ["--device", "a100"], ("a100", 79.0, "--device")),
        ("NVIDIA H100 PCIe", ["--memory-gib", "60"], ("h100", 60.0, "this machine has NVIDIA H100 PCIe")),
        ("NVIDIA T4", [], ("h200", 140.0, "NVIDIA T4, whose rates are not known: --device names another one")),
        (None, [], ("h200", 140.0, "this machine has no NVIDIA GPU")),
    ],
)
def test_a_policy_plans_with_the_gpus_of_the_machine(gpu, options, planned, tmp_path, tiny_base, monkeypatch, capsys):
    def start(settings, *, on_start, **_):
        on_start("http://here")
        assert (settings.device, settings.memory_gib) == planned[:2]

    monkeypatch.setattr(server, "run_server", start)
    monkeypatch.setattr(prediction, "machine_gpu", lambda: gpu)
    monkeypatch.setattr(os, "umask", lambda mask: 0)
    home = str(tmp_path / "home")
    assert run(["serve", "--home", home, "--base", str(tiny_base), "--gpus", "2", *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    device, memory_gib, why = planned
    assert f"ours plans with the rates of {device} and {memory_gib:g} GiB a GPU" in said
    assert said.endswith(why)


def test_places_of_samplers_hold_every_model():
    assert [read_sampler_places(text, "16:8,64:2,dora:128:1") for text in ("8", "64:256")] == [8, 256]


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


def test_a_port_that_another_program_has_is_named_before_a_worker_starts(tmp_path, tiny_base, capsys):
    home = tmp_path / "home"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert run(["serve", "--base", str(tiny_base), "--home", str(home), "--port", port]) == 1
    assert "error[serve.address]" in (says := " ".join(capsys.readouterr().err.split()))
    assert f"127.0.0.1:{port}: Address already in use" in says
    assert not (home / "workers").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_all_addresses_of_a_host_have_one_port(host):
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with server.bound(host, 0) as sockets:
        assert len({each.getsockname()[1] for each in sockets}) == 1
    assert server.in_url(host) == ("[::1]" if host == "::1" else host)


def test_a_demo_that_is_stopped_at_once_says_so_in_a_line(tmp_path, tiny_base, capsys, monkeypatch):
    def ends(*_):
        raise ServiceError(503, [{"code": "api.ends", "what": "the service ends."}])

    monkeypatch.setattr(Client, "submit", ends)
    settings = Settings(home=tmp_path / "home", bases={"tiny": tiny_base}, places={4: 1})
    demo.submit_demo("http://127.0.0.1:1", settings)
    assert "ask of ana was not submitted: " in capsys.readouterr().out


def test_a_demo_that_is_started_again_adds_nothing(tmp_path, tiny_base, capsys, monkeypatch):
    submitted = []
    monkeypatch.setattr(Client, "submit", lambda client, job: submitted.append(job) or Job(client, "job-0"))
    settings = Settings(home=tmp_path / "my home", bases={"tiny": tiny_base}, places={4: 1})
    demo.submit_demo("http://127.0.0.1:1", settings)
    assert len(submitted) == 3
    database = server.open_database(settings)
    with database.write() as connection:
        spec = {"name": "ask", "base": "tiny", "weight": 1.0}
        Jobs(database).submit(connection, "ana", spec)
        keys = list_keys(connection)
    assert capsys.readouterr().out.startswith("key of the page: tml-lf_")
    demo.submit_demo("http://127.0.0.1:1", settings)
    assert len(submitted) == 3
    assert f"lorafusion keys add admin --admin --home '{tmp_path}/my home'" in capsys.readouterr().out.replace("\n", "")
    with database.read() as connection:
        assert list_keys(connection) == keys
    database.close()


def test_the_demo_keeps_what_was_given(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(server, "run_server", lambda settings, **_: started.append(settings))
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(tmp_path / "new"))
    monkeypatch.setattr(os, "umask", lambda mask: 0)
    for options in ((), ("--home", str(tmp_path / "mine"), "--places", "32:3", "batch.capacity_tokens=256")):
        assert run(["serve", "--demo", *options]) == 0
    new, second = started
    assert (new.home, new.places, new.batch) == (tmp_path / "new", {"16": 2, "64": 1}, {"capacity_tokens": 512})
    assert (second.home, second.places, second.batch) == (tmp_path / "mine", {"32": 3}, {"capacity_tokens": 256})
    assert new.base == second.base == {"dtype": "float32"}


def test_the_demo_refuses_places_without_room_for_its_jobs(capsys):
    assert run(["serve", "--demo", "--places", "16:4"]) == 2
    assert "rank 32" in capsys.readouterr().err
