"""`lorafusion handover` against stubs with the routes of vLLM, SGLang and Ollama."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lorafusion_jax.config import load_config
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.layout.layer import EXPERTS
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.report.events import AdapterDone, RunFinished
from lorafusion_jax.report.trackers import trackers


class Stub(BaseHTTPRequestHandler):
    """Answers as the servers do; what it loaded is `server.adapters`."""

    def do_GET(self):
        self.answer(200, {"data": [{"id": name} for name in ("base", *self.server.adapters)]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        loaded = self.server.adapters
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.answer(401, {"error": "Unauthorized"})
        elif self.path not in self.server.routes:
            self.answer(404, {"detail": "Not Found"})
        elif self.path.endswith("/load_lora_adapter"):
            if not (Path(body["lora_path"]) / "adapter_config.json").is_file():
                why = f"No adapter found for {body['lora_path']}"
                self.answer(400, {"error": {"message": why}, "success": False, "error_message": why})
            else:
                loaded[body["lora_name"]] = body["lora_path"]
                self.server.last_load = body
                text = {"success": True} if self.path == "/load_lora_adapter" else "Success: added successfully."
                self.answer(200, text)
        elif self.path == "/generate":
            self.answer(200, {"text": f"{body['lora_path']} says {body['text']}"})
        else:
            self.answer(200, {"choices": [{"text": f"{body['model']} says {body['prompt']}"}]})

    def answer(self, code, value):
        content = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *args):
        pass


VLLM = ("/v1/load_lora_adapter", "/v1/completions")
SGLANG = ("/load_lora_adapter", "/generate")


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        server.adapters, server.routes, server.key = {}, (*VLLM, *SGLANG), ""
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", ["--vllm", "--sglang"])
def test_an_adapter_is_loaded_and_asked(lorafusion, finished, server, kind):
    _, run = finished
    url = server.url + ("/v1/" if kind == "--vllm" else "")
    outcome = lorafusion("handover", run, "law", kind, url, "--as", "law-2", "--prompt", "Who?")
    assert outcome.code == 0, outcome.err
    assert "law-2 says Who?" in outcome.out
    loaded = Path(server.adapters["law-2"])
    assert loaded.is_absolute()
    assert loaded.parent == (run / "adapters" / "law").resolve()


@pytest.mark.parametrize("kind", ["--vllm", "--sglang"])
def test_what_servers_refuse_has_a_fix(lorafusion, finished, server, tmp_path, kind):
    _, run = finished
    arguments = ("handover", run, "law", kind, server.url)
    elsewhere = lorafusion(*arguments, "--path", tmp_path)
    assert (elsewhere.code, elsewhere.errors) == (1, ["handover.refused"])
    assert "No adapter found for" in elsewhere.err
    server.routes = ()
    off = lorafusion(*arguments)
    assert off.errors == ["handover.refused"]
    assert "--enable-lora --max-lora-rank 8" in off.err
    server.key = "secret"
    (tmp_path / "key").write_text("secret\n")
    assert "--key-file" in lorafusion(*arguments).err
    server.routes = (*VLLM, *SGLANG)
    assert lorafusion(*arguments, "--key-file", tmp_path / "key").code == 0


def test_vllms_rule_of_experts_is_not_sglangs(lorafusion, finished, server, monkeypatch):
    """The run's base is of no family whose experts vLLM takes."""
    _, run = finished
    on_experts = lambda spec: replace(spec, targets=tuple(EXPERTS), dropout=0.0)  # noqa: E731
    monkeypatch.setattr("lorafusion_jax.peft.leaves.exported_spec", on_experts)
    assert lorafusion("handover", run, "law", "--vllm", server.url).errors == ["handover.form"]
    assert server.adapters == {}
    assert lorafusion("handover", run, "law", "--sglang", server.url).code == 0
    monkeypatch.setattr("lorafusion_jax.report.servers.type_of", lambda base: "qwen3_moe")
    assert lorafusion("handover", run, "law", "--vllm", server.url, "--as", "experts").code == 0
    assert server.last_load == {
        "lora_name": "experts", "lora_path": server.adapters["experts"], "is_3d_lora_weight": True,
    }  # fmt: skip


def test_an_adapter_is_delivered_where_its_base_is_not(lorafusion, finished, server, tmp_path, monkeypatch):
    _, run = finished
    gone = CheckpointError("model.missing", "there is no model directory base.")
    monkeypatch.setattr("lorafusion_jax.checkpoint.base_model.base_directory", raising(gone))
    assert lorafusion("handover", run, "law", "--vllm", server.url).code == 0
    outcome = lorafusion("export", run, "law", "--to", tmp_path / "law")
    assert outcome.code == 0, outcome.err
    assert "is not here" in outcome.out
    assert "no command of vLLM for law: how it names projections depends on the base" in outcome.out
    assert "vllm serve" not in outcome.out
    assert read_adapter(tmp_path / "law")[0].rank == read_adapter(run / "adapters/law/latest")[0].rank
    on_experts = lambda spec: replace(spec, targets=tuple(EXPERTS), dropout=0.0)  # noqa: E731
    monkeypatch.setattr("lorafusion_jax.peft.leaves.exported_spec", on_experts)
    assert lorafusion("handover", run, "law", "--vllm", server.url, "--as", "two").errors == ["model.missing"]
    damaged = CheckpointError("model.bad-config", "config.json cannot be read.")
    monkeypatch.setattr("lorafusion_jax.checkpoint.base_model.base_directory", raising(damaged))
    assert lorafusion("export", run, "law", "--to", tmp_path / "other").errors == ["model.bad-config"]


def raising(problem):
    def raises(config):
        raise problem

    return raises


def test_mistakes_are_named(lorafusion, finished, server):
    _, run = finished
    assert lorafusion("handover", run, "law").errors == ["handover.options"]
    assert lorafusion("handover", run, "law", "--vllm", "gpu:8000").errors == ["handover.options"]
    assert lorafusion("handover", run, "lwa", "--vllm", server.url).errors == ["export.unknown-adapter"]
    server.adapters["law"] = "/there"
    exists = lorafusion("handover", run, "law", "--vllm", server.url)
    assert exists.errors == ["handover.exists"]
    assert "--as law-2" in exists.err
    assert server.adapters == {"law": "/there"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Stub) as closed:
        port = closed.server_port
    assert lorafusion("handover", run, "law", "--vllm", f"http://127.0.0.1:{port}").errors == ["handover.no-server"]


class OllamaStub(Stub):
    """Blobs and models; `server.adapters` is what was made of them. Newer releases take no adapters."""

    def do_GET(self):
        self.answer(200, {"models": [{"name": f"{name}:latest"} for name in self.server.adapters]})

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/api/blobs/"):
            assert self.path == f"/api/blobs/sha256:{hashlib.sha256(content).hexdigest()}"
            self.server.blobs[self.path.rpartition("/")[2]] = content
            self.answer(201, "")
            return
        body = json.loads(content)
        if self.path == "/api/generate":
            self.answer(200, {"response": f"{body['model']} says {body['prompt']}"})
        elif "adapters" in body and not self.server.takes_adapters:
            self.answer(400, {"error": "LoRA adapters are no longer supported"})
        elif not set(body.get("files", body.get("adapters", {})).values()) <= set(self.server.blobs):
            self.answer(400, {"error": "no such blob"})
        else:
            self.server.adapters[body["model"]] = body
            self.answer(200, {"status": "success"})


@pytest.fixture
def ollama(server):
    server.RequestHandlerClass, server.blobs, server.takes_adapters = OllamaStub, {}, True
    return server


def test_ollama_is_sent_the_adapter_or_the_merged_model(lorafusion, finished, ollama, tmp_path):
    _, run = finished
    arguments = ("handover", run, "law", "--ollama", ollama.url)
    bare = lorafusion(*arguments)
    assert bare.errors == ["handover.form"]
    assert "convert_lora_to_gguf.py" in bare.err
    assert "--merge" in bare.err
    gguf = tmp_path / "law.gguf"
    assert "convert_hf_to_gguf.py" in lorafusion(*arguments, "--gguf", gguf).err  # there is none
    assert "convert_lora_to_gguf.py" in lorafusion(*arguments, "--gguf", gguf, "--base", "llama3.1").err
    gguf.write_bytes(b"PK" * 500)
    assert "is no GGUF file" in lorafusion(*arguments, "--gguf", gguf).err
    gguf.write_bytes(b"GGUF" + bytes(range(256)) * 40)
    adapter = lorafusion(*arguments, "--gguf", gguf, "--base", "llama3.1", "--prompt", "Who?")
    assert adapter.code == 0, adapter.err
    assert "law says Who?" in adapter.out
    made = ollama.adapters["law"]
    assert made["from"] == "llama3.1"
    assert ollama.blobs[made["adapters"]["law.gguf"]] == gguf.read_bytes()
    assert lorafusion(*arguments, "--gguf", gguf, "--base", "llama3.1").errors == ["handover.exists"]
    ollama.takes_adapters = False
    newer = lorafusion(*arguments, "--gguf", gguf, "--base", "llama3.1", "--as", "law-2")
    assert newer.errors == ["handover.refused"]
    assert "export" in newer.err
    assert lorafusion(*arguments, "--gguf", gguf, "--as", "law-2").code == 0
    assert "from" not in ollama.adapters["law-2"]


def test_options_of_another_server_are_refused(lorafusion, finished, server, tmp_path):
    _, run = finished
    for options in (("--vllm", server.url, "--gguf", "law.gguf"), ("--ollama", server.url, "--path", tmp_path)):
        assert lorafusion("handover", run, "law", *options).errors == ["handover.options"]
    assert server.adapters == {}


def test_a_job_file_hands_its_adapters_over_once_they_are_done(lorafusion, finished, server, tmp_path):
    """The listener of a finished run; trackers of a run get it, see `trackers`."""
    job, run = finished
    (tmp_path / "key").write_text("secret\n")
    server.key, settings = "secret", ("handover.prompt=Who?", f"handover.vllm={server.url}/v1")
    config = load_config(job.path, [*settings, f"handover.key_file={tmp_path / 'key'}"])
    with trackers(config, run) as listeners:
        for event in (AdapterDone(adapter="law", step=6), RunFinished(exit_code=0, seconds=1.0, peak_bytes=None)):
            assert server.adapters == {}
            listeners[-1](event)
    assert sorted(server.adapters) == ["law", "med"]
    assert Path(server.adapters["law"]) == (run / "adapters" / "law" / "latest").resolve()


def test_a_server_that_fails_does_not_end_the_run(finished, server, capsys):
    job, run = finished
    server.routes = ()
    with trackers(load_config(job.path, [f"handover.sglang={server.url}"]), run) as listeners:
        listeners[-1](RunFinished(exit_code=0, seconds=1.0, peak_bytes=None))
    told = " ".join(capsys.readouterr().err.split())
    assert f"law is not handed over: {server.url}/load_lora_adapter refused. 404" in told
    assert f"then lorafusion handover {run} law --sglang {server.url}" in told


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("handover.vllm=gpu:8000", "config.override"),
        ("handover.prompt=Who?", "config.override"),
        ("handover={vllm: http://a, sglang: http://b}", "config.override"),
        ("handover={vllm: http://a, key_file: nowhere}", "handover.options"),
        ("handover={vllm: http://a} lora.kind=dora", "handover.form"),
    ],
)
def test_a_server_that_cannot_be_is_refused_before_the_run(lorafusion, job, setting, code):
    words = setting.split(" lora.kind")
    overrides = [words[0], *(f"lora.kind{rest}" for rest in words[1:])]
    outcome = lorafusion("check", job.path, *overrides)
    assert (outcome.code, outcome.errors) == (2, [code]), outcome.err
