"""Random requests from the description of the API: no internal error, nothing written outside of the home.

    PYTHONPATH=tests:tests/serve python -m campaigns.hostile_requests --out benchmarks/results/hostile_cpu_DATE \\
        --requests 10000 --shards 16

Each shard attacks a service of its own, with draws of its own. A row of each: requests, seconds, and answers by status.
A shard that finds a defect prints its smallest request and fails.
"""

from __future__ import annotations

import argparse
import http.client
import json
import string
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.measured_code import write_measured
from lorafusion_jax.serve.api.app import describe

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


def attack(running: Any, job: dict, cases: int, *, draws: int | None = None) -> Counter[int]:
    """Sends random requests to a service. Returns the number of answers by status.

    Args:
        running: a `Running` service.
        job: a good job, to be changed.
        draws: seed (None: the same requests each time).
    """
    home, outside = running.settings.home, running.settings.home.parent
    before = files(outside) - files(home)
    host, statuses = running.url.removeprefix("http://"), Counter[int]()

    @settings(
        max_examples=cases,
        derandomize=draws is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(requests(job), st.sampled_from(["ana", "ben", "admin", "nobody"]))
    def run(request: tuple[str, str, bytes | None], owner: str) -> None:
        method, path, body = request
        running.service.limits.__init__()  # the limit has a test of its own
        connection = http.client.HTTPConnection(host, timeout=60)
        headers = {"X-API-Key": running.keys.get(owner, "tml-lf_wrong"), "Content-Type": "application/json"}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        statuses[answer.status] += 1
        assert answer.status < 500 or (answer.status == 503 and path.startswith("/readyz")), (request, content)
        assert str(home).encode() not in content
        if answer.status >= 400:
            assert json.loads(content).get("error", {"code": "no worker"})["code"]
        if owner == "nobody" and path.startswith("/v1"):
            assert answer.status in (400, 401, 404, 405, 413, 422)

    (run if draws is None else seed(draws)(run))()
    assert files(outside) - files(home) == before
    assert [path.name for path in home.rglob("*") if path.name.startswith(".upload")] == []
    return statuses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=10_000, help="in all shards together")
    parser.add_argument("--shards", type=int, default=1, help="side by side; each takes about a core")
    parser.add_argument("--shard", type=int, help="run this one only")
    options = parser.parse_args()
    write_measured(options.out)
    if options.shard is not None:
        return run_shard(options)
    arguments = [sys.executable, "-m", "campaigns.hostile_requests", *sys.argv[1:]]
    shards = [subprocess.Popen([*arguments, "--shard", str(number)]) for number in range(options.shards)]
    failed = sum(shard.wait() != 0 for shard in shards)
    print(f"{options.shards - failed} of {options.shards} shards without a defect", flush=True)
    return int(bool(failed))


def run_shard(options: argparse.Namespace) -> int:
    from campaigns.tiny_run import write_base
    from local_service import start_service

    from benchmarks.csv_rows import append_row

    with tempfile.TemporaryDirectory(prefix=f"hostile-{options.shard}-") as folder:
        work, began = Path(folder), time.monotonic()
        running, end = start_service(work / "home", write_base(work / "base"))
        try:
            (work / "rows.jsonl").write_text('{"prompt": "word", "completion": " other"}\n' * 12)
            dataset = running.client("ana").upload(work / "rows.jsonl")["id"]
            job = {"name": "law", "base": "tiny", "data": {"train": dataset, "max_length": 64}, "lora": {"rank": 4}}
            statuses = attack(running, job, -(-options.requests // options.shards), draws=options.shard)
        finally:
            end()
    row = {"shard": options.shard, "requests": statuses.total(), "seconds": round(time.monotonic() - began, 1)}
    row["statuses"] = " ".join(f"{status}:{count}" for status, count in sorted(statuses.items()))
    append_row(options.out / f"shard-{options.shard:02}.csv", row)
    print(row, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
