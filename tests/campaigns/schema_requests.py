"""schemathesis against a service without a worker: requests from its OpenAPI description, one by one and in sequences.

    pip install schemathesis    # in any environment
    PYTHONPATH=tests:tests/serve python -m campaigns.schema_requests --program schemathesis \\
        --out benchmarks/results/schemathesis_cpu_DATE --examples 40

The number of requests is bounded by the examples of each operation; with `--minutes` they are repeated with other seeds
until the time is over. Two users and an administrator send them. A row of
each: requests and answers by status, as the server counted them. A defect is printed with a request that shows it.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from benchmarks.measured_code import write_measured

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method,use_after_free,ignored_auth"
)
REFUSALS = (400, 401, 403, 404, 405, 406, 409, 413, 415, 421, 422, 429)


class Counting:
    """Counts answers by status."""

    def __init__(self, app: ASGIApp, statuses: Counter[int]):
        self._app, self._statuses = app, statuses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._statuses[message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted)


def attack(
    running: Any,
    owner: str,
    program: str,
    *,
    examples: int,
    seed: int,
    checks: str = CHECKS,
    limit_s: float | None = None,
) -> int:
    """Runs schemathesis with the key of an owner. Returns its exit code; 0 if its time was over.

    Args:
        running: a `Running` service.
    """
    command = ["run", f"{running.url}/openapi.json", "-H", f"X-API-Key: {running.keys[owner]}"]
    command += ["--phases", "examples,coverage,fuzzing,stateful", "--max-examples", str(examples), "--seed", str(seed)]
    command += ["--checks", checks, "--exclude-path-regex", "events$|^/readyz$", "--suppress-health-check", "all"]
    command += ["--continue-on-failure", "--no-shrink", "--warnings", "off", "--request-timeout", "60"]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as settings:
        settings.write(f"[checks.negative_data_rejection]\nexpected-statuses = {[*REFUSALS]}\n")
        settings.flush()
        try:
            command = [program, "--config-file", settings.name, *command]
            return subprocess.run(command, check=False, timeout=limit_s).returncode
        except subprocess.TimeoutExpired:
            return 0  # the answers were counted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--program", default="schemathesis", help="its command")
    parser.add_argument("--examples", type=int, default=40, help="of each operation, by each user")
    parser.add_argument("--minutes", type=float, help="repeat until so much time is over")
    parser.add_argument("--users", nargs="+", default=["ana", "ben", "admin"])
    parser.add_argument("--checks", default=CHECKS)
    options = parser.parse_args()
    from campaigns.hostile_requests import files
    from campaigns.tiny_run import write_base
    from local_service import start_service

    from benchmarks.csv_rows import append_row

    write_measured(options.out)
    failed, until = 0, None if options.minutes is None else time.monotonic() + 60 * options.minutes
    users = enumerate(options.users if until is None else itertools.cycle(options.users))
    for seed, owner in itertools.takewhile(lambda _: until is None or time.monotonic() < until, users):
        statuses: Counter[int] = Counter()
        with tempfile.TemporaryDirectory(prefix="schema-") as folder:
            home = Path(folder) / "home"
            running, end = start_service(
                home, write_base(Path(folder) / "base"), wrap=lambda app, counts=statuses: Counting(app, counts)
            )
            running.service.limits.take = lambda key: True  # the limit has a test of its own
            before = files(Path(folder)) - files(home)
            try:
                code = attack(
                    running, owner, options.program, examples=options.examples, seed=seed, checks=options.checks,
                    limit_s=None if until is None else max(1.0, until - time.monotonic()),
                )  # fmt: skip
            finally:
                end()
            assert files(Path(folder)) - files(home) == before
        failed += bool(code) or any(status >= 500 and status != 503 for status in statuses)
        row = {"user": owner, "requests": statuses.total()}
        row["statuses"] = " ".join(f"{status}:{count}" for status, count in sorted(statuses.items()))
        append_row(options.out / "schemathesis.csv", row)
        print(row, flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
