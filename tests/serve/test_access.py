"""Who may ask: keys that were revoked, older copies of the database, sessions of the page."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import time

import pytest
from campaigns.service_process import PATIENCE_S
from local_service import Running
from test_api import login, raw, refused

from lorafusion_jax.cli.main import run
from lorafusion_jax.serve.api import streams
from lorafusion_jax.serve.api.access import Access, Service
from lorafusion_jax.serve.api.admin import KeyLimits
from lorafusion_jax.serve.client import Client
from lorafusion_jax.serve.control.spec import JobSpec
from lorafusion_jax.serve.store import keys as k
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import Database


def status(running: Running, path: str = "/v1/me", **headers) -> int:
    return raw(running.url, "GET", path, **headers)[0]


def name_of(key: str) -> str:
    return key.split("_")[1]


def test_a_service_whose_keys_are_revoked_stays_closed(start_service, tmp_path, tiny_base):
    """The first key closes an open service while it runs; to revoke it opens nothing, now or after a start."""
    local = start_service(tmp_path / "home", tiny_base, owners=())
    assert status(local) == 200
    made = Client(local.url).request("POST", "/v1/keys", {"owner": "root", "scopes": ["admin"]})
    assert (status(local), status(local, x_api_key=made["key"])) == (401, 200)
    assert run(["keys", "revoke", made["id"], "--home", str(local.settings.home)]) == 0
    assert [status(local, path) for path in ("/v1/me", "/v1/jobs", "/v1/keys")] == [401] * 3
    assert Access(local.db).find("", "") is None
    with local.db.write() as connection:  # as an operator would who removes what he thinks of as rubbish
        connection.execute(t.keys.delete())
    assert status(local) == 401
    assert Access(local.db).find("", "") is None
    assert Access(Database(tmp_path / "other.db")).find("", "") == k.LOCAL


@pytest.mark.parametrize("copied", ["before the first key", "before the last revocation", "none"])
def test_an_older_database_opens_nothing_and_revives_no_key(tmp_path, copied):
    file, copy = tmp_path / "service.db", tmp_path / "copies" / "service.db"
    db = Database(file)
    if copied == "before the first key":
        db.copy(copy)
    with db.write() as connection:
        leaked, kept = (k.add_key(connection, owner, k.SCOPES)[1] for owner in ("ana", "ben"))
    if copied == "before the last revocation":
        db.copy(copy)
    with db.write() as connection:
        k.revoke_key(connection, name_of(leaked))
    db.close()
    for part in tmp_path.glob("service.db*"):
        part.unlink()
    if copied != "none":
        shutil.copy(copy, file)
    with (tmp_path / k.LOG).open("a") as log:
        log.write('{"key": "cut')  # the power went while a further line was written
    access = Access(Database(file))
    assert access.find("", "") is None
    assert access.find(leaked, "") is None
    assert (access.find(kept, "") is not None) == (copied == "before the last revocation")


def test_owners_are_remembered_until_a_key_changes(tmp_path, monkeypatch):
    """Who asks again costs no look at the database; a key that another process revokes is refused at once."""
    looks: list[None] = []
    glance = Database.glance
    monkeypatch.setattr(Database, "glance", lambda db: looks.append(None) or glance(db))
    db, other = Database(tmp_path / "service.db"), Database(tmp_path / "service.db")
    with db.write() as connection:
        ana, ben = (k.add_key(connection, owner)[1] for owner in ("ana", "ben"))
    access = Access(db)
    os.utime(tmp_path / k.LOG, (0, 0))  # long ago
    for _ in range(3):
        owners = [access.find(key, "") for key in (ana, ben, ana[:-1] + "?", "")]
        assert [owner and owner.name for owner in owners] == ["ana", "ben", None, None]
    assert len(looks) == 3
    with other.write() as connection:
        k.revoke_key(connection, name_of(ana))
        assert access.find(ana, "") is not None  # not yet, and it must not be remembered
    assert access.find(ana, "") is None
    assert access.find(ben, "") is not None
    db.close()
    other.close()


def test_the_last_administrator_is_revoked_on_the_machine_only(start_service, tmp_path, tiny_base):
    running = start_service(tmp_path / "home", tiny_base)
    admin = running.client("admin")
    (name,) = (row["id"] for row in admin.request("GET", "/v1/keys")["items"] if row["owner"] == "root")
    soon = admin.request("POST", "/v1/keys", {"owner": "soon", "scopes": ["admin"], "days": 1e-9})
    time.sleep(0.01)
    problem = refused(lambda: admin.request("DELETE", f"/v1/keys/{name}"))
    assert (problem.status, problem.problems[0]["code"]) == (409, "api.last-admin")
    other = admin.request("POST", "/v1/keys", {"owner": "other", "scopes": ["admin"]})
    admin.request("DELETE", f"/v1/keys/{soon['id']}")
    admin.request("DELETE", f"/v1/keys/{name}")
    assert refused(lambda: admin.request("GET", "/v1/keys")).status == 401
    assert refused(lambda: Client(running.url, other["key"]).request("DELETE", f"/v1/keys/{other['id']}")).status == 409


def test_a_repeated_key_is_made_once_and_stored_nowhere(running):
    headers = {"x_api_key": running.keys["admin"], "content_type": "application/json", "idempotency_key": "again"}
    body = b'{"owner": "dora"}'
    first, second = (json.loads(raw(running.url, "POST", "/v1/keys", body, **headers)[1]) for _ in range(2))
    assert first["id"] == second["id"]
    assert k.KEY.fullmatch(first["key"])
    assert second["key"] == ""


@pytest.mark.parametrize("ended", ["key", "session", "first key"])
def test_a_stream_ends_with_what_opened_it(start_service, tmp_path, tiny_base, monkeypatch, ended):
    """Also while events come all the time."""
    monkeypatch.setattr(streams, "COMMENT_S", 0.3)
    running = start_service(tmp_path / "home", tiny_base, owners=() if ended == "first key" else ("ana",))
    headers: dict[str, str] = {}
    if ended == "key":
        headers = {"X-API-Key": running.keys["ana"]}
    elif ended == "session":
        headers = {"Cookie": login(running, running.keys["ana"])}
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=30)
    connection.request("GET", "/v1/events", headers=headers)
    stream = connection.getresponse()
    assert stream.readline() == b": connected\n"
    if ended == "session":
        cookie = {"cookie": headers["Cookie"], "x_requested_with": "page"}
        assert raw(running.url, "POST", "/v1/logout", b"", **cookie)[0] == 200
    else:
        with running.db.write() as connection_:
            if ended == "key":
                k.revoke_key(connection_, name_of(running.keys["ana"]))
            else:
                k.add_key(connection_, "ana")
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        with running.db.write() as connection_:
            running.db.add_event(connection_, "news", "ana", None, {})
        if not stream.readline():
            break
    else:
        pytest.fail("the stream goes on")
    connection.close()


def test_the_cookie_of_the_page_is_no_key(running):
    cookie = login(running, running.keys["ana"])
    name, _, secret = cookie.partition("=")
    assert secret not in running.keys["ana"]
    assert secret.encode() not in running.settings.database.read_bytes()
    assert status(running, cookie=cookie) == 200
    assert status(running, x_api_key=secret) == 401
    assert status(running, cookie=f"{name}={running.keys['ana']}") == 401
    assert raw(running.url, "POST", "/v1/logout", b"", cookie=cookie)[0] == 403  # another page sends it
    assert status(running, cookie=cookie) == 200
    assert raw(running.url, "POST", "/v1/logout", b"", cookie=cookie, x_requested_with="page")[0] == 200
    assert status(running, cookie=cookie) == 401
    foreign = {"content_type": "application/json", "origin": "http://evil.example"}
    body = json.dumps({"key": running.keys["ana"]}).encode()
    assert raw(running.url, "POST", "/v1/login", body, **foreign)[0] == 403
    secure = {"X-Forwarded-Proto": "https"}  # of the proxy on this machine
    cookie = login(running, running.keys["ana"], **secure)
    assert cookie.startswith("__Host-")
    assert status(running, cookie=cookie, x_forwarded_proto="https") == 200
    assert status(running, cookie=cookie) == 401


@pytest.mark.parametrize("ended", ["expired", "revoked", "too many"])
def test_a_session_of_the_page_ends(running, monkeypatch, ended):
    made = running.client("admin").request("POST", "/v1/keys", {"owner": "eva"})
    cookies = [login(running, made["key"]) for _ in range(2)]
    assert [status(running, cookie=cookie) for cookie in cookies] == [200, 200]
    if ended == "expired":
        with running.db.write() as connection:
            of_eva = t.page_sessions.c.key == made["id"]
            connection.execute(t.page_sessions.update().where(of_eva).values(expires=time.time() - 1))
    elif ended == "revoked":
        running.client("admin").request("DELETE", f"/v1/keys/{made['id']}")
    else:
        monkeypatch.setattr(k, "MOST_SESSIONS", 1)
        login(running, made["key"])
    assert [status(running, cookie=cookie) for cookie in cookies] == [401, 401]


def test_a_restarted_service_keeps_its_sessions(running):
    cookie = login(running, running.keys["ana"]).partition("=")[2]
    again = Service(running.settings, running.db, running.service.controller)
    owner = again.access.find("", cookie)
    assert owner is not None
    assert owner.name == "ana"


@pytest.mark.parametrize("values", [{"priority": False}, {"jobs": "3"}, {"share": True}])
def test_limits_are_numbers(values):
    with pytest.raises(ValueError, match="Input should be a valid"):
        KeyLimits.model_validate(values)
    assert KeyLimits.model_validate({"share": 2, "priority": 3}).share == 2.0


@pytest.mark.parametrize("key", ["priority", "weight", "seed", "steps"])
def test_a_job_takes_no_truth_value_for_a_number(key):
    job = {"name": "law", "base": "tiny", "data": {"train": f"sha256-{'0' * 64}"}, "lora": {"rank": 4}}
    with pytest.raises(ValueError, match="true and false are no numbers"):
        JobSpec.model_validate(job | {key: True})
    assert JobSpec.model_validate(job | {key: 1}).name == "law"
