"""Random requests from the description of the API: no internal error, nothing written outside of the home."""

from __future__ import annotations

import http.client
import json
import string
from pathlib import Path
from urllib.parse import quote

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorafusion_serve.api.app import describe

CASES = 150
PATHS = [
    (path, method.upper(), operation)
    for path, methods in describe()["paths"].items()
    for method, operation in methods.items()
    if not path.endswith("/events")  # streams do not end
]
NASTY = ["../../etc/passwd", "%2e%2e%2f", "\x00", "a" * 300, "'; DROP TABLE jobs; --", "-1", "NaN", "1e999", "{}", "🦀"]
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(NASTY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("name", "base", "data", "lora", "optim", "batch", "steps", "seed", "weight", "owner", "scopes", "priority")


@st.composite
def requests(draw, job: dict):
    path, method, operation = draw(st.sampled_from(PATHS))
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            words = st.sampled_from([*NASTY, "cancel", "pause", "drain", "g0", "job-0123456789ab"])
            path = path.replace("{" + parameter["name"] + "}", quote(draw(words | st.text(max_size=20)), safe=""))
    names = [parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "query"]
    values = st.sampled_from(NASTY) | st.text(string.printable, max_size=12) | st.integers().map(str)
    query = "&".join(f"{name}={quote(draw(values))}" for name in names if draw(st.booleans()))
    body = None
    if method in ("POST", "PATCH"):
        changed = job | draw(st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=2))
        content = st.just(json.dumps(changed).encode()) | ANY.map(lambda value: json.dumps(value).encode())
        body = draw(content | st.binary(max_size=64))
    return method, path + (f"?{query}" if query else ""), body


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_random_requests_find_no_defect(running, job):
    home, outside = running.settings.home, running.settings.home.parent
    before = files(outside) - files(home)
    host = running.url.removeprefix("http://")

    @settings(max_examples=CASES, suppress_health_check=list(HealthCheck))
    @given(requests(job), st.sampled_from(["ana", "ben", "admin", "nobody"]))
    def run(request, owner):
        method, path, body = request
        running.service.limits.__init__()  # the limit has a test of its own
        connection = http.client.HTTPConnection(host, timeout=60)
        headers = {"X-API-Key": running.keys.get(owner, "tml-lf_wrong"), "Content-Type": "application/json"}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        assert answer.status < 500 or (answer.status == 503 and path.startswith("/readyz")), (request, content)
        assert str(home).encode() not in content
        if answer.status >= 400:
            assert json.loads(content).get("error", {"code": "no worker"})["code"]
        if owner == "nobody" and path.startswith("/v1"):
            assert answer.status in (400, 401, 404, 405, 413, 422)

    run()
    assert files(outside) - files(home) == before
    left = [path.name for path in home.rglob("*") if path.name.startswith(".upload")]
    assert left == []
