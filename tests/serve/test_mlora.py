"""Programs written for mLoRA's server: what its command line sends, and what it reads of the answers."""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from typing import Any

import pytest
from campaigns.service_process import PATIENCE_S

from lorafusion_jax.serve.client import Client

ROWS = [
    {"instruction": f"add {n}", "input": f"{n} + 1", "chosen": f"it is {n + 1}", "reject": f"it is {n}"}
    for n in range(9)
]
PROMPT = (
    "template: |\n  Q: {{ data_point['instruction'] }} {{ data_point['input'] }}\n  A: {{ data_point['chosen'] }}\n"
)
PAIRS = (
    "template: |\n  Q: {{ data_point['instruction'] }}\n  A: {{ data_point['chosen' if is_chosen else 'reject'] }}\n"
)


class CommandLine:
    """Sends the requests of mLoRA's command line."""

    def __init__(self, url: str):
        self.url = url

    def send(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> Any:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": kind}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
            return json.loads(answer.read())

    def upload(self, kind: str, name: str, content: str, file: str) -> str:
        mark = "a7d5c2"
        head = f'--{mark}\r\nContent-Disposition: form-data; name="data_file"; filename="{file}"\r\n\r\n'
        body = f"{head}{content}\r\n--{mark}--\r\n".encode()
        return self.send("POST", f"/{kind}?name={name}", body, f"multipart/form-data; boundary={mark}")["message"]

    def create(self, kind: str, **values: Any) -> str:
        return self.send("POST", f"/{kind}", json.dumps(values).encode())["message"]

    def delete(self, kind: str, name: str) -> str:
        return self.send("DELETE", f"/{kind}?name={urllib.parse.quote(name)}")["message"]

    def table(self, kind: str) -> dict[str, dict[str, Any]]:
        """Rows of `ls`; those of files are objects, the others texts of JSON."""
        rows = self.send("GET", f"/{kind}")
        shown = [row if kind in ("data", "prompt") else json.loads(row) for row in rows]
        return {row["name"]: row for row in shown}


@pytest.fixture(scope="module")
def server(start_service, tmp_path_factory, tiny_base):
    home = tmp_path_factory.mktemp("mlora") / "home"
    return start_service(home, tiny_base, owners=(), mlora_compat=True)


@pytest.fixture(scope="module")
def client(server) -> CommandLine:
    line = CommandLine(server.url)
    assert line.upload("data", "sums", json.dumps(ROWS), "sums.json") == "success"
    assert line.upload("prompt", "ask", PROMPT, "ask.yaml") == "success"
    assert line.upload("prompt", "pairs", PAIRS, "pairs.yaml") == "success"
    return line


def dataset(name: str, prompt: str, kind: str) -> dict[str, str]:
    return {"name": name, "data_name": "sums", "prompt_name": prompt, "prompt_type": kind, "preprocess": "default"}


def adapter(name: str, kind: str = "lora", **more: Any) -> dict[str, Any]:
    modules = {"q_proj": True, "k_proj": False, "down_proj": True}
    values = {"name": name, "type": kind, "optimizer": "adamw", "lr": "3e-4", "r": "4", "alpha": "8", "dropout": "0.05"}
    return values | {"target_modules": modules} | more


def task(name: str, kind: str, data: str, adapter: str, **more: Any) -> dict[str, Any]:
    sizes = {"batch_size": "4", "mini_batch_size": "2", "num_epochs": "3", "cutoff_len": "32", "save_step": "1000"}
    return {"name": name, "type": kind, "dataset": data, "adapter": adapter} | sizes | more


def wait_for_state(client: CommandLine, server: Any, name: str, *states: str) -> dict[str, Any]:
    until = time.monotonic() + PATIENCE_S
    while True:
        jobs = [job for job in Client(server.url).request("GET", "/v1/jobs")["items"] if job["name"] == name]
        if jobs and jobs[0]["state"] in states:
            return jobs[0]
        assert time.monotonic() < until, jobs
        time.sleep(0.05)


def test_a_task_is_a_job(client, server):
    assert client.create("dataset", **dataset("asked", "ask", "instruction")) == "success"
    assert client.send("GET", "/showcase?name=asked")["example"] == ["Q: add 0 0 + 1\nA: it is 1"]
    assert client.create("adapter", **adapter("first", "loraplus", lr_ratio=8.0)) == "success"
    assert client.create("task", **task("sum", "train", "asked", "first")) == "success"
    job = wait_for_state(client, server, "sum", "queued", "rejected")
    assert (job["state"], job["steps"]) == ("queued", 7)
    assert job["spec"]["lora"]["targets"] == ["q_proj", "down_proj"]
    assert job["spec"]["optim"]["lr_ratio"] == 8.0
    assert client.table("task")["sum"]["state"] == "UNK"
    assert client.table("adapter")["first"]["task"] == "sum"
    assert client.send("GET", "/dispatcher")["ready"] == ["sum"]
    assert client.delete("adapter", "first") == "adapter with a task, cannot be delete."
    assert client.delete("task", "sum") == "to terminate the task sum, wait."
    assert client.table("task")["sum"]["state"] == "TERMINATED"
    assert client.delete("task", "sum") == "delete the done task."
    assert client.table("task") == {}


def test_preferences_share_what_both_texts_begin_with(client, server):
    assert client.create("dataset", **dataset("judged", "pairs", "preference")) == "success"
    assert client.create("adapter", **adapter("second", lrscheduler="cosine", eta_min=0.0)) == "success"
    values = {"beta": 0.1, "label_smoothing": 0.0, "loss_type": "sigmoid", "reference": "base"}
    assert client.create("task", **task("prefer", "dpo", "judged", "second", **values)) == "success"
    job = wait_for_state(client, server, "prefer", "queued", "rejected")
    assert job["state"] == "queued", job["problems"]
    objective = job["spec"]["objective"]
    assert (objective["name"], objective["beta"], objective["reference"]) == ("dpo", 0.1, "base")
    rows = (server.settings.datasets / job["spec"]["data"]["train"] / "data.jsonl").read_text().splitlines()
    assert json.loads(rows[3]) == {"prompt": "Q: add 3\nA: it is ", "chosen": "4", "rejected": "3"}
    client.delete("task", "prefer")


def test_a_kind_without_places_fails_its_task(client, server):
    assert client.create("adapter", **adapter("wide", "dora")) == "success"
    assert client.create("task", **task("wide", "train", "asked", "wide")) == "success"
    wait_for_state(client, server, "wide", "rejected")
    assert client.table("task")["wide"]["state"] == "FAILED"


def test_what_it_refuses_is_a_message(client):
    assert client.upload("data", "sums", "[]", "sums.json") == "file already exist"
    assert client.upload("data", "odd", "a,b", "odd.csv") == "unsupport file type"
    assert client.create("dataset", **dataset("none", "nothing", "instruction")) == "error parameters"
    assert client.create("dataset", **dataset("asked", "ask", "instruction")) == "dataset already exist"
    assert client.create("adapter", name="half") == "error parameters: type, r, alpha, target_modules, optimizer, lr"
    assert "not served" in client.create("adapter", **adapter("odd", "prefix"))
    assert client.create("task", **task("odd", "train", "nothing", "first")) == "can not found the dataset"
    values = {"beta": 0.1, "reference": "unknown"}
    assert (
        client.create("task", **task("odd", "dpo", "judged", "second", **values))
        == "can not found the reference adapter"
    )
    assert "not served" in client.create("task", **task("odd", "dpo", "asked", "second", beta=0.1))
    assert client.create("task", **task("odd", "train", "asked", "first") | {"batch_size": "many"}).startswith(
        "invalid"
    )
    assert client.delete("task", "nobody") == "the task not exist"
    assert client.delete("dataset", "nobody") == "the dataset not exist"
    assert client.send("GET", "/showcase?name=nobody")["message"] == "the dataset not exist"
    assert client.send("POST", "/task", b"no json")["message"].startswith("error parameters")
    assert (
        client.upload("prompt", "loop", "template: '{% for a in range(10**9) %}{% endfor %}'", "loop.yaml") == "success"
    )
    assert client.create("dataset", **dataset("loop", "loop", "instruction")) == "success"
    assert "row 0" in client.send("GET", "/showcase?name=loop")["message"]
    assert client.delete("prompt", "loop") == "delete success"
    assert client.delete("prompt", "loop") == "file not exist"
    assert sorted(client.table("data")) == ["sums"]


HALF = "\ud83d"  # half a character


@pytest.mark.parametrize(
    "changed",
    [
        *({key: value} for key in ("type", "optimizer", "name") for value in ([], {}, None, HALF, "", "x" * 101, 1)),
        *({"target_modules": value} for value in (["q_proj"], None, "q_proj", {HALF: True}, {"q_proj": [1]}, {})),
        *({key: value} for key in ("r", "alpha", "lr", "dropout") for value in (float("inf"), "no", None, [], -1)),
        {"r": 10**400},
        {"lrscheduler": "cosine", "eta_min": {}},
        {"extra": HALF},
        {HALF: 1},
    ],
    ids=lambda changed: ascii(changed)[:40],
)
def test_every_value_of_an_adapter_is_answered_with_a_message(client, changed):
    """By its own route, or by that of the task that uses it."""
    values = adapter("strange") | changed
    body = json.dumps(values).replace("Infinity", "1e400").encode()
    assert isinstance(client.send("POST", "/adapter", body)["message"], str)
    made = client.create("task", **task("strange", "train", "asked", "strange"))
    assert made not in ("success", "already exist")
    client.delete("adapter", "strange")


@pytest.mark.parametrize(
    "key", ["type", "dataset", "adapter", "batch_size", "num_epochs", "cutoff_len", "beta", "name"]
)
@pytest.mark.parametrize("value", [[], {}, None, HALF, 1e999, "", 10**400], ids=ascii)
def test_every_value_of_a_task_is_answered_with_a_message(client, key, value):
    body = json.dumps(task("odd", "dpo", "judged", "second", beta=0.1) | {key: value}).replace("Infinity", "1e400")
    made = client.send("POST", "/task", body.encode())["message"]
    assert made != "success"
