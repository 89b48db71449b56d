"""The REST API: problems, owners, keys, repeated requests, cursors, streams, limits."""

from __future__ import annotations

import http.client
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from campaigns.service_process import PATIENCE_S
from sqlalchemy import select

import lorafusion_jax.serve
from lorafusion_jax.adapters.kind import Leaf
from lorafusion_jax.adapters.table import KINDS
from lorafusion_jax.config.places import Places
from lorafusion_jax.serve.api.app import describe
from lorafusion_jax.serve.api.streams import _events
from lorafusion_jax.serve.client import Client, ServiceError, _parse_events
from lorafusion_jax.serve.control.child_process import _place_problem
from lorafusion_jax.serve.refusals import FIXES, KEYS, WHYS, completed
from lorafusion_jax.serve.store import keys as k
from lorafusion_jax.serve.store import tables as t

ID = "sha256-" + "0" * 64
CODES = r'"((?:adapter|api|data|job|keys|mlora|store)\.[a-z][a-z-]*[a-z])"'


def refused(act) -> ServiceError:
    with pytest.raises(ServiceError) as problem:
        act()
    return problem.value


def raw(url: str, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Sends a request as it is."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    answer = connection.getresponse()
    received = answer.status, answer.read()
    connection.close()
    return received


def login(running, key: str, **headers: str) -> str:
    """Starts a session of the page. Returns its cookie."""
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=120)
    named = {"Content-Type": "application/json"} | headers
    connection.request("POST", "/v1/login", json.dumps({"key": key}), named)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.status == 200, text
    return answer.headers["Set-Cookie"].partition(";")[0]


def wait_state(client: Client, job: str, *states: str) -> dict:
    until = time.monotonic() + PATIENCE_S
    while (shown := client.job(job).show())["state"] not in states:
        assert time.monotonic() < until, shown
        assert shown["state"] != "rejected", shown["problems"]
        time.sleep(0.1)
    return shown


def test_an_administrator_limits_what_a_key_asks_for(running, job, tmp_path):
    """Priority, weight, live jobs and bytes of data; a job that waits says why."""
    with running.service.db.write() as connection:
        name, key = k.add_key(connection, "lim", limits=k.Limits(priority=5, weight=2.0, jobs=1, share=2.0))
    lim, file = Client(running.url, key), tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "some", "completion": " other"}\n' * 12)
    job["data"] |= {"train": lim.upload(file)["id"]}
    assert lim.request("GET", "/v1/me")["limits"]["share"] == 2.0
    for more, where in (({"priority": 6}, "priority"), ({"weight": 3}, "weight")):
        problem = refused(lambda more=more: lim.submit(job | more))
        assert (problem.status, problem.problems[0]["code"]) == (403, "job.over-limit")
        assert problem.problems[0]["where"] == where
    made = lim.submit(job | {"priority": 5})
    assert refused(lambda: lim.submit(job)).problems[0]["code"] == "job.limit"
    shown = wait_state(lim, made.id, "queued")
    waits = lim.request("GET", f"/v1/jobs/{made.id}")["waits"]
    assert waits["position"] == 1
    assert waits["why"]
    assert waits["expected_start"] is None
    assert (shown["priority"], made.set_priority(-100)["priority"]) == (5, -100)
    assert made.set_priority(4)["priority"] == 4
    assert made.set_deadline(4e9)["deadline"] == 4e9
    assert refused(lambda: made.set_priority(6)).problems[0]["code"] == "job.over-limit"
    with running.service.db.write() as connection:
        k.set_limits(connection, name, k.Limits(bytes=0, priority=-100, weight=0.5))
    shown = made.show()
    assert (shown["priority"], shown["weight"]) == (-100, 0.5)  # what it had before is no right
    changed = ({"priority": -100, "weight": 0.5}, "changed")
    with running.db.read() as connection:  # by which the controller sees it
        query = select(t.events.c.data, t.events.c.kind).where(t.events.c.job == made.id)
        assert connection.execute(query.order_by(t.events.c.seq.desc())).first() == changed
    status, _ = raw(running.url, "POST", "/v1/datasets?name=a.jsonl", b"{}", Authorization=f"Bearer {key}")
    assert status == 403
    made.cancel()
    problem = refused(lambda: lim.submit(job | {"max_slowdown": 1.2}))
    assert problem.problems[0]["code"] == "job.max-slowdown"


def test_a_job_is_checked_and_queued(running, job):
    ana = running.client("ana")
    made = ana.submit(job)
    shown = wait_state(ana, made.id, "queued", "rejected")
    assert (shown["state"], shown["steps"], shown["owner"]) == ("queued", 3, "ana")
    assert [row["after"] for row in shown["transitions"]] == ["checking", "queued"]
    assert made.cancel()["state"] == "cancelled"
    assert made.cancel()["state"] == "cancelled"
    problem = refused(made.pause)
    assert (problem.status, problem.problems[0]["code"]) == (409, "job.state")
    assert ana.request("DELETE", f"/v1/jobs/{made.id}")["state"] == "deleted"
    assert refused(made.show).status == 404


def test_every_problem_is_named_at_once(running, job):
    bad = job | {"name": "../etc", "epochs": 0, "surprise": 1, "lora": {"rank": "many"}}
    problem = refused(lambda: running.client("ana").submit(bad))
    assert problem.status == 422
    assert {entry["where"] for entry in problem.problems} == {"name", "epochs", "surprise", "lora.rank"}
    unknown = job | {"base": "huge", "data": {"train": ID}, "init_from": "adapter-0123456789ab"}
    problem = refused(lambda: running.client("ana").submit(unknown))
    assert [entry["code"] for entry in problem.problems] == ["job.base", "job.dataset", "job.adapter"]
    assert all(entry["what"] and entry["fix"] for entry in problem.problems)


@pytest.mark.parametrize(
    ("changed", "where", "what"),
    [
        ({"lora": {"targets": 5}}, "lora.targets", "a valid string, or: Input should be a valid list"),
        ({"lora": {"exclude": ["a", 5]}}, "lora.exclude.1", "a valid string."),
        ({"optim": {"lr_ratio": -1}}, "optim.lr_ratio", "greater than 0."),
        ({"optim": {"lr_ratio": {"lora_b": "much"}}}, "optim.lr_ratio.lora_b", "a number, not 'much'."),
        ({"optim": {"lr_ratio": []}}, "optim.lr_ratio", "a valid number, or: Input should be a valid dictionary"),
    ],
)
def test_a_value_of_several_kinds_has_one_problem_at_its_place(running, job, changed, where, what):
    (problem,) = refused(lambda: running.client("ana").submit(job | changed)).problems
    assert problem["where"] == where
    assert what in problem["what"]


def test_what_needs_a_run_is_refused_by_its_name(running, job):
    """Tokens: places do not have them, and the job is not accepted first."""
    lora = {"rank": 4, "trainable_tokens": [1]}
    problem = refused(lambda: running.client("ana").submit(job | {"lora": lora, "early_stop": {"patience": 2}}))
    wanted = {"lora.trainable_tokens", "early_stop"}
    assert {entry["where"] for entry in problem.problems if entry["code"] == "job.not-served"} == wanted
    assert all(entry["why"] and "lorafusion train" in entry["fix"] for entry in problem.problems)


def test_a_kind_without_a_form_in_peft_is_refused_at_submission(running, job, monkeypatch):
    """Its download would be a folder that PEFT does not read; one that multiplies the low-rank product is LoRA."""
    leaves = (*KINDS["lora"].leaves, Leaf(name="louder", axes=("N",), init=lambda draw, shape: np.zeros(shape)))
    columns = replace(
        KINDS["lora"], leaves=leaves, column_scale=lambda kernel, its, sizes: 1 + its["louder"], peft=None
    )
    monkeypatch.setitem(KINDS, "columns", columns)
    ana = running.client("ana")
    problem = refused(lambda: ana.submit(job | {"lora": {"rank": 4, "kind": "columns"}}))
    (entry,) = problem.problems
    assert (problem.status, entry["code"], entry["where"]) == (422, "job.not-served", "lora.kind")
    assert "columns" in entry["what"]
    assert "--merge" in entry["fix"]
    monkeypatch.setitem(KINDS, "columns", replace(columns, column_scale=None))
    ana.submit(job | {"lora": {"rank": 4, "kind": "columns"}})


@pytest.mark.parametrize(
    ("spec", "code", "where"),
    [
        ({"rank": 9}, "job.rank", "lora.rank"),
        ({"kind": "dora"}, "job.kind", "lora.kind"),
        ({"on_experts": True}, "job.kind", "lora.targets"),
        ({"tokens": object()}, "job.not-served", "lora"),
    ],
)
def test_a_refusal_of_places_names_what_to_change(spec, code, where):
    made: Any = SimpleNamespace(**{"kind": "lora", "rank": 4, "on_experts": (), "tokens": None} | spec)
    made.head, made.dropout = None, 0.0
    layout = Places.of({8: 2})
    problem = _place_problem(layout, made, layout.refuses(made))
    assert (problem["code"], problem["where"]) == (code, where)
    assert problem["what"].endswith(".")
    assert problem["fix"]


def test_patterns_are_those_of_a_job_file(running, job):
    """What a place holds is queued; what it never holds is named with its largest rank."""
    ana = running.client("ana")
    lora = {"rank": 2, "rank_pattern": {"1.mlp.down_proj": 7}, "layers_to_transform": [1], "exclude": ["k_proj"]}
    made = ana.submit(job | {"lora": lora})
    assert wait_state(ana, made.id, "queued")["rank"] == 7
    made.cancel()
    over = ana.submit(job | {"lora": lora | {"rank_pattern": {"down_proj": 9}}})
    (problem,) = wait_state(ana, over.id, "rejected")["problems"]
    assert (problem["code"], problem["where"]) == ("job.rank", "lora.rank")
    for wrong in ({"rank_pattern": {"(a+)+": 2}}, {"alpha_pattern": {"q_proj": -1}}, {"layers_to_transform": []}):
        problem = refused(lambda wrong=wrong: ana.submit(job | {"lora": wrong}))
        assert problem.status == 422
        assert all("lora" in entry["where"] + entry["what"] for entry in problem.problems), problem.problems


def test_settings_are_checked_as_in_a_job_file(running, job):
    wrong = job | {"lora": {"rank": 4, "targets": ["q_prjo"]}, "optim": {"name": "adamx"}}
    problem = refused(lambda: running.client("ana").submit(wrong))
    assert problem.status == 422
    assert any("adamx" in entry["what"] for entry in problem.problems)
    wrong = job | {"lora": {"rank": 4, "targets": ["q_prjo"]}}
    problem = refused(lambda: running.client("ana").submit(wrong))
    assert "q_proj" in problem.problems[0]["what"] + problem.problems[0]["fix"]


def test_what_only_the_data_shows_rejects_the_job(running, job):
    ana = running.client("ana")
    made = ana.submit(job | {"lora": {"rank": 64}})
    shown = wait_state(ana, made.id, "queued", "rejected")
    assert (shown["state"], shown["problems"][0]["code"]) == ("rejected", "job.rank")
    assert str(running.settings.home) not in json.dumps(shown)


def test_bad_rows_are_named_by_the_file_that_was_uploaded(running, job, tmp_path):
    file, ana = tmp_path / "verdicts.jsonl", running.client("ana")
    rows = [{"prompt": "a", "completion": answer} for answer in (" b", "", " c")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = job["data"] | {"train": ana.upload(file)["id"], "on_bad": "error"}
    (problem,) = wait_state(ana, ana.submit(job | {"data": data}).id, "rejected")["problems"]
    assert problem["what"] == f"{job['name']}: 1 of 3 rows have no answer."
    assert problem["where"] == "verdicts.jsonl, line 2"


def test_a_file_that_holds_no_rows_is_refused(running, tmp_path):
    file = tmp_path / "broken.jsonl"
    file.write_text('{"prompt": "a"\nnothing\n')
    problem = refused(lambda: running.client("ana").upload(file))
    assert (problem.status, problem.problems[0]["code"]) == (422, "data.bad-json")
    assert str(running.settings.home) not in str(problem)
    assert not [path for path in running.settings.datasets.iterdir() if path.name.startswith(".")]
    for name, code in (("a.txt", "data.unknown-kind"), ("../a.jsonl", "api.value")):
        answer = raw(running.url, "POST", f"/v1/datasets?name={name}", b"x", x_api_key=running.keys["ana"])
        assert (answer[0], json.loads(answer[1])["error"]["code"]) == (422, code)


def test_equal_content_is_stored_once_and_stays_while_it_is_used(running, dataset, job, tmp_path):
    ana, ben = running.client("ana"), running.client("ben")
    file = tmp_path / "rows.jsonl"
    file.write_bytes((running.settings.datasets / dataset / "data.jsonl").read_bytes())
    assert ana.upload(file)["id"] == dataset
    assert refused(lambda: ben.request("GET", f"/v1/datasets/{dataset}")).status == 404
    made = ana.submit(job)
    problem = refused(lambda: ana.request("DELETE", f"/v1/datasets/{dataset}"))
    assert (problem.status, problem.problems[0]["where"]) == (409, made.id)
    made.cancel()


def test_nobody_sees_what_others_own(running, job):
    made = running.client("ana").submit(job)
    ben, admin = running.client("ben"), running.client("admin")
    for act in (lambda: ben.job(made.id).show(), lambda: ben.job(made.id).cancel(), lambda: ben.job(made.id).metrics()):
        assert refused(act).status == 404
    assert refused(lambda: ben.submit(job)).problems[0]["code"] == "job.dataset"
    assert made.id not in [entry["id"] for entry in ben.jobs()]
    assert admin.job(made.id).show()["owner"] == "ana"
    made.cancel()


def test_keys_are_stored_as_digests_and_have_scopes(running, job):
    reader = running.client("reader")
    assert list(reader.jobs()) is not None
    assert refused(lambda: reader.submit(job)).problems[0]["code"] == "api.scope"
    assert refused(lambda: running.client("ana").request("GET", "/v1/keys")).status == 403
    admin = running.client("admin")
    made = admin.request("POST", "/v1/keys", {"owner": "cleo", "scopes": ["jobs:read"]})
    assert k.KEY.fullmatch(made["key"])
    assert made["key"].encode() not in running.settings.database.read_bytes()
    cleo = Client(running.url, made["key"])
    assert cleo.request("GET", "/v1/me")["owner"] == "cleo"
    admin.request("DELETE", f"/v1/keys/{made['id']}")
    for wrong in (made["key"], made["key"][:-1], running.keys["ana"][:-4] + "AAAA", "x", "tml-lf_"):
        assert refused(lambda wrong=wrong: Client(running.url, wrong).request("GET", "/v1/me")).status == 401
    assert refused(lambda: Client(running.url).request("GET", "/v1/jobs")).status == 401


def test_a_repeated_request_acts_once(running, job):
    ana, headers = running.client("ana"), {"x_api_key": running.keys["ana"], "idempotency_key": "one"}
    body = json.dumps(job).encode()
    answers = [raw(running.url, "POST", "/v1/jobs", body, content_type="application/json", **headers) for _ in "ab"]
    assert answers[0] == answers[1]
    assert answers[0][0] == 201
    other = json.dumps(job | {"seed": 7}).encode()
    status, answer = raw(running.url, "POST", "/v1/jobs", other, content_type="application/json", **headers)
    assert (status, json.loads(answer)["error"]["code"]) == (409, "api.idempotency")
    ana.job(json.loads(answers[0][1])["id"]).cancel()


def test_a_repeated_deletion_is_answered_like_the_first(running, job, tmp_path):
    """An answer that was lost is asked for again; nobody else learns what was there."""
    ana = running.client("ana")
    file = tmp_path / "gone.csv"
    file.write_text("prompt,completion\n" + "a,b\n" * 9)
    path = f"/v1/datasets/{ana.upload(file)['id']}"
    headers = {"x_api_key": running.keys["ana"], "idempotency_key": "away"}
    assert [raw(running.url, "DELETE", path, **headers)[0] for _ in "ab"] == [204, 204]
    assert raw(running.url, "DELETE", path, x_api_key=running.keys["ana"])[0] == 404
    assert f"/v1/datasets/{ana.upload(file)['id']}" == path
    assert raw(running.url, "DELETE", path, **headers)[0] == 204  # the old answer: what came since stays
    assert ana.request("GET", path)["name"] == "gone.csv"
    made = ana.submit(job)
    made.cancel()
    wait_state(ana, made.id, "cancelled")
    assert [ana.request("DELETE", f"/v1/jobs/{made.id}")["state"] for _ in "ab"] == ["deleted"] * 2
    assert refused(made.show).status == 404
    assert refused(lambda: running.client("ben").request("DELETE", f"/v1/jobs/{made.id}")).status == 404


def test_an_adapter_that_a_live_job_starts_from_stays(running, job):
    ana, name = running.client("ana"), "adapter-00112233aabb"
    other = ana.submit(job)
    with running.db.write() as connection:
        row = {"id": name, "job": other.id, "owner": "ana", "step": 3, "path": "/nowhere", "sha256": "", "created": 0.0}
        connection.execute(t.artifacts.insert().values(row))
        waits = running.service.jobs.submit(connection, "ana", job | {"init_from": name, "base": "away"})["id"]
    problem = refused(lambda: ana.request("DELETE", f"/v1/adapters/{name}"))
    assert (problem.status, problem.problems[0]["code"]) == (409, "adapter.in-use")
    assert problem.problems[0]["where"] == waits
    ana.job(waits).cancel()
    assert ana.request("DELETE", f"/v1/adapters/{name}") is None
    other.cancel()


def test_pages_follow_cursors(running, job):
    ana = running.client("ana")
    made = [ana.submit(job | {"seed": seed}).id for seed in range(5)]
    listed = [row["id"] for row in ana.jobs(limit=2)]
    assert listed[:5] == made[::-1]
    assert len(set(listed)) == len(listed)
    assert refused(lambda: ana.request("GET", "/v1/jobs?after=zzz")).problems[0]["code"] == "api.cursor"
    for job_id in made:
        ana.job(job_id).cancel()
    assert {row["state"] for row in ana.jobs(state="cancelled")} == {"cancelled"}


def test_keys_say_when_they_were_last_used(running, monkeypatch):
    """The next write of the controller notes it; a wrong key is nobody's."""
    monkeypatch.setattr("lorafusion_jax.serve.control.controller.WRITE_S", 0.0)
    ids = {name: running.client(name).request("GET", "/v1/me")["key"] for name in ("ana", "admin")}
    assert raw(running.url, "GET", "/v1/me", x_api_key=running.keys["ben"][:-1] + "_")[0] == 401
    admin, until, used = running.client("admin"), time.monotonic() + PATIENCE_S, dict[str, float]()
    while not all(used.get(name) for name in ids.values()):
        assert time.monotonic() < until
        time.sleep(0.02)
        used = {row["id"]: row["used"] for row in admin.request("GET", "/v1/keys")["items"]}
    assert all(abs(used[name] - time.time()) < 60 for name in ids.values())


def test_data_sets_and_adapters_come_in_pages(running, tmp_path):
    """Of the owner, newest first; two of one moment are not lost between pages."""
    rows = [
        {"id": f"adapter-{n}", "job": f"job-{n}", "owner": owner, "step": 1, "path": "-", "sha256": "-"}
        for n, owner in enumerate(["ana", "ben"] * 5)
    ]
    spec = {"name": "paged", "base": "tiny", "data": {}}
    with running.db.write() as connection:
        for number, row in enumerate(rows):
            job = running.service.jobs.submit(connection, row["owner"], spec)["id"]
            connection.execute(t.artifacts.insert().values(row | {"job": job, "created": 5e9 + number // 4}))
    files = [tmp_path / f"rows-{number}.jsonl" for number in range(3)]
    for number, file in enumerate(files):
        file.write_text(f'{{"text": "number {number}"}}\n')
    ana = running.client("ana")
    uploaded = [ana.upload(file)["id"] for file in files]
    for path, ids in (("adapters", [row["id"] for row in rows if row["owner"] == "ana"]), ("datasets", uploaded)):
        listed, after = [], ""
        while after is not None:
            page = ana.request("GET", f"/v1/{path}?limit=2{after and f'&after={after}'}")
            listed, after = [*listed, *(row["id"] for row in page["items"])], page["next"]
            assert len(page["items"]) <= 2
        assert listed[: len(ids)] == ids[::-1]
        assert len(set(listed)) == len(listed)
        assert ana.request("GET", f"/v1/{path}?limit=1000")["next"] is None
        assert refused(lambda path=path: ana.request("GET", f"/v1/{path}?after=e30=")).status == 422
    with running.db.write() as connection:
        connection.execute(t.artifacts.delete())


def test_a_stream_resumes_after_the_last_event(running, job, monkeypatch):
    ana = running.client("ana")
    made = ana.submit(job)
    wait_state(ana, made.id, "queued")
    made.cancel()
    events = list(made.events())
    assert [event["after"] for event in events] == ["checking", "queued", "cancelled"]
    assert [event["after"] for event in made.events(after=events[0]["seq"])] == ["queued", "cancelled"]
    with ana.stream("/v1/events", {"Last-Event-ID": str(events[0]["seq"])}) as answer:
        assert next(_parse_events(answer))["seq"] == events[1]["seq"]
    owners = [k.Owner(name=name, scopes=k.USER) for name in ("ana", "ben")]
    seen = [[row["job"] for row in _events(running.service, owner, None, 0)] for owner in owners]
    assert (made.id in seen[0], made.id in seen[1]) == (True, False)
    monkeypatch.setattr("lorafusion_jax.serve.api.streams.AT_ONCE", 2)
    assert [event["after"] for event in made.events()] == ["checking", "queued", "cancelled"]
    assert refused(lambda: list(running.client("ben").job(made.id).events())).status == 404


def test_hosts_bodies_and_writes_of_other_pages_are_refused(running):
    key = {"x_api_key": running.keys["ana"]}
    assert raw(running.url, "GET", "/v1/me", host="evil.example", **key)[0] == 421
    assert raw(running.url, "POST", "/v1/jobs", b"{" * 100, **key)[0] == 422
    assert raw(running.url, "POST", "/v1/jobs", b" " * (2 << 20), **key)[0] == 413
    cookie = login(running, running.keys["ana"])
    assert raw(running.url, "GET", "/v1/me", cookie=cookie)[0] == 200
    assert raw(running.url, "POST", "/v1/jobs/x/cancel", b"", cookie=cookie)[0] == 403
    assert raw(running.url, "POST", "/v1/jobs/x/cancel", b"", cookie=cookie, x_requested_with="page")[0] == 404
    foreign = {"cookie": cookie, "x_requested_with": "page", "origin": "http://evil.example"}
    assert raw(running.url, "POST", "/v1/jobs/x/cancel", b"", **foreign)[0] == 403


def test_no_fix_is_a_setting_that_jobs_do_not_have(running, job):
    """Those of a job file are: the size of a microbatch, and sampled answers for an objective that reads rewards."""
    (problem,) = refused(
        lambda: running.client("ana").submit(job | {"data": job["data"] | {"max_length": 1 << 20}})
    ).problems
    assert problem["code"] == "config.max-length"
    assert re.fullmatch(r"data\.max_length: \d+", problem["fix"])
    ana = running.client("ana")
    shown = wait_state(ana, ana.submit(job | {"objective": {"name": "grpo"}}).id, "rejected")
    (problem,) = shown["problems"]
    assert problem["fix"].startswith("rows with columns that grpo reads")


def test_every_refusal_says_what_to_do(running, job):
    """Codes are stable, and each comes with what is wrong, where, why, and a fix."""
    key = {"x_api_key": running.keys["ana"], "content_type": "application/json"}
    reader = {"x_api_key": running.keys["reader"], "content_type": "application/json"}
    asked = [
        ("GET", "/v1/me", None, {}, "api.key"),
        ("GET", "/v1/nothing", None, key, "api.http-404"),
        ("PUT", "/v1/jobs", None, key, "api.http-405"),
        ("GET", "/v1/jobs/job-0", None, key, "api.not-found"),
        ("GET", "/v1/jobs?limit=0", None, key, "api.value"),
        ("POST", "/v1/jobs", b"{}", key, "api.missing"),
        ("POST", "/v1/jobs", b"{", key, "api.json"),
        ("POST", "/v1/jobs", json.dumps(job | {"lr": 1}).encode(), key, "api.unknown-key"),
        ("POST", "/v1/jobs", json.dumps(job).encode(), reader, "api.scope"),
        ("POST", "/v1/jobs", b"[" * 99, key, "api.depth"),
        ("POST", "/v1/jobs", json.dumps(job).replace('"rank"', '"rank": 2, "rank"').encode(), key, "api.twice"),
        ("POST", "/v1/jobs", b" " * (2 << 20), key, "api.too-large"),
        ("POST", "/v1/datasets?name=a.csv", b"", key, "data.empty-file"),
        ("GET", "/v1/me", None, key | {"host": "evil.example"}, "api.host"),
        ("POST", "/v1/datasets?name=a.xyz", b"a", key, "data.unknown-kind"),
        ("GET", "/v1/jobs?after=x", None, key, "api.cursor"),
        ("POST", "/v1/jobs", json.dumps(job | {"base": "huge"}).encode(), key, "job.base"),
        ("POST", "/v1/jobs", json.dumps(job | {"data": {"train": ID}}).encode(), key, "job.dataset"),
        ("POST", "/v1/jobs", json.dumps(job | {"init_from": "adapter-0123456789ab"}).encode(), key, "job.adapter"),
        ("POST", "/v1/jobs", json.dumps(job | {"early_stop": {}}).encode(), key, "job.not-served"),
        ("POST", "/v1/jobs?dry_run=1", json.dumps(job | {"lora": {"rank": 64}}).encode(), key, "job.rank"),
        ("POST", "/v1/jobs?dry_run=1", json.dumps(job | {"lora": {"kind": "dora"}}).encode(), key, "job.kind"),
        ("POST", "/v1/jobs", json.dumps(job | {"lora": {"kind": "lara"}}).encode(), key, "config.value"),
        ("GET", f"/v1/datasets/{job['data']['train']}/preview?row=999&base=tiny", None, key, "data.row"),
    ]
    status, answer = raw(running.url, "POST", "/v1/jobs", json.dumps(job | {"lora": {"rnk": 4}}).encode(), **key)
    assert json.loads(answer)["error"]["fix"] == "did you mean 'rank'?"
    status, answer = raw(running.url, "POST", "/v1/datasets?name=law.jsonl", '{"prompt": "a"}'.encode("utf-16"), **key)
    assert json.loads(answer)["error"]["fix"] == "iconv -f utf-16 -t utf-8 FILE.jsonl > FILE-utf8.jsonl"
    for method, path, body, headers, code in asked:
        status, answer = raw(running.url, method, path, body, **headers)
        error = json.loads(answer)["error"]
        assert (status >= 400, error["code"]) == (True, code), answer
        assert re.search(r"(?<!\?)\.$|\?$", error["what"]), error["what"]  # one mark: a question has no full stop
        assert all(entry[key] for entry in [error, *json.loads(answer).get("problems", ())] for key in KEYS), answer


def test_every_code_has_a_reason():
    """The table has all codes that the service answers with, and no others."""
    rooms = [
        Path(lorafusion_jax.serve.__file__).with_name(name)
        for name in ("api", "control", "states.py", "store", "tinker")
    ]
    texts = [file.read_text() for room in rooms for file in (room.rglob("*.py") if room.is_dir() else [room])]
    named = {code for text in texts for code in re.findall(CODES, text)} - {"data.jsonl"}  # a file
    assert {code for code in named if not code.startswith("keys.")} == set(WHYS)
    assert set(FIXES) <= set(WHYS)
    for code in WHYS:
        assert all(completed({"code": code, "what": "it is wrong."}, "POST /v1/jobs").values())


def test_a_path_names_all_its_methods(running):
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=120)
    for path, methods in (("/v1/jobs", "GET, POST"), ("/v1/jobs/x", "DELETE, GET, PATCH"), ("/v1/jobs/x/log", "GET")):
        connection.request("OPTIONS", path)
        answer = connection.getresponse()
        answer.read()
        assert (answer.status, answer.headers["Allow"]) == (405, methods)
    connection.close()


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/v1/jobs/..%2f..%2fservice.db", "/v1/datasets/%2e%2e", "//etc"])
def test_paths_reach_no_file(running, path):
    status, answer = raw(running.url, "GET", path, x_api_key=running.keys["ana"])
    assert status == 404
    assert b"root:" not in answer


def test_too_many_requests_wait(running):
    limits = running.service.limits
    assert sum(limits.take("somebody") for _ in range(1000)) in range(200, 320)
    assert limits.take("somebody else")


def test_a_service_without_keys_is_for_this_machine(start_service, tmp_path, tiny_base):
    local = start_service(tmp_path / "home", tiny_base, owners=())
    assert Client(local.url).request("GET", "/v1/me")["owner"] == "local"
    assert raw(local.url, "POST", "/v1/jobs/x/cancel", b"", origin="http://evil.example")[0] == 403
    assert raw(local.url, "GET", "/healthz")[0] == 200
    assert raw(local.url, "GET", "/readyz")[0] == 503
    status, text = raw(local.url, "GET", "/metrics")
    assert status == 200
    assert b"lorafusion_places_free 3.0" in text
    assert b'lorafusion_answers_total{status="403"} 1.0' in text
    assert b'lorafusion_answer_seconds_bucket{le="+Inf"} 4.0' in text
    assert b'lorafusion_child_waiting{lane="count"} 0.0' in text
    status, page = raw(local.url, "GET", "/")
    assert status == 200
    assert b"<title>lorafusion</title>" in page
    assert Path(local.settings.home).stat().st_mode & 0o077 == 0


def test_the_description_names_every_path_and_its_errors():
    paths = describe()["paths"]
    wanted = {
        "/v1/datasets", "/v1/datasets/{dataset}", "/v1/datasets/{dataset}/preview", "/v1/bases", "/v1/jobs",
        "/v1/jobs/{job}", "/v1/jobs/{job}/cancel", "/v1/jobs/{job}/pause",
        "/v1/jobs/{job}/continue", "/v1/jobs/{job}/metrics", "/v1/jobs/{job}/events", "/v1/events",
        "/v1/jobs/{job}/log", "/v1/jobs/{job}/timeline", "/v1/jobs/{job}/adapter", "/v1/adapters",
        "/v1/adapters/{adapter}", "/v1/cluster", "/v1/decisions", "/v1/workers/{worker}/{action}", "/v1/me", "/v1/keys",
        "/v1/keys/{key}", "/v1/keys/{key}/limits", "/healthz", "/readyz", "/metrics",
        "/v1/models", "/v1/models/{model}", "/v1/completions", "/v1/chat/completions",
    }  # fmt: skip
    assert set(paths) == wanted
    for path, methods in paths.items():
        answers = {status for operation in methods.values() for status in operation["responses"]}
        assert answers >= ({"401", "403", "404", "409", "422", "429", "503"} if path.startswith("/v1") else {"200"}), (
            path
        )
    assert all(operation["description"] for methods in paths.values() for operation in methods.values())
