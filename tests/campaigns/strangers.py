"""What others notice of rude clients: a service without a worker, attacked from a process of its own.

    PYTHONPATH=tests:tests/serve python -m campaigns.strangers --out benchmarks/results/strangers_cpu_DATE

For each attack a row: the latency of `/healthz` and of another owner's `/v1/me` meanwhile, the answers that the attack
got, and the memory of the server with its children above that before. `twin` is a second server that nobody attacks:
its latency is what the load of the machine does to each. `list` is the processor time of the server for a page of 200
of `--jobs` jobs. The bounds that the service promises are for a quiet core; a bound that is passed is printed, and the
exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measured_code import write_measured

P99_S, GROWN_MB, LIST_S = 0.2, 1024, 0.2
ATTACKS = ("idle", "slow", "brackets", "bombs", "previews")
Address = tuple[str, int]


def serve(home: Path, base: Path, jobs: int, link: Any, owners: tuple[str, ...] = ("ana", "ben")) -> None:
    """The process of the server."""
    from local_service import start_service

    from lorafusion_jax.serve.control.spec import JobSpec
    from lorafusion_jax.serve.store import tables as t

    running, end = start_service(home, base, owners=owners)
    spec = JobSpec.model_validate({"name": "law", "base": "gone", "data": {"train": "sha256-" + "0" * 64}, "lora": {}})
    with running.db.write() as connection:
        first = running.service.jobs.submit(connection, "ben", spec.model_dump(mode="json"))
        row = running.service.jobs.get(connection, first["id"]) | {"state": "cancelled", "lengths": [100] * 256}
        rows = [row | {"id": f"job-{number:012x}", "created": float(number)} for number in range(jobs)]
        connection.execute(t.jobs.insert(), rows)
    link.send((running.url, running.keys))
    link.recv()
    end()


def ask(url: str, path: str, key: str, method: str = "GET", body: bytes | None = None, timeout: float = 60) -> int:
    import http.client

    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout)
    headers = {"X-API-Key": key, "Content-Type": "application/json"} if key else {}
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except OSError:
        return 0
    finally:
        connection.close()


def attack(name: str, url: str, key: str, folder: Path, seconds: float, link: Any) -> None:
    """The process of the attackers. Sends the answers by status."""
    host, port = url.removeprefix("http://").split(":")
    statuses, until = Counter[int](), time.monotonic() + seconds
    files: list[bytes] = []
    dataset = ""
    if name == "bombs":
        import pyarrow as pa
        from pyarrow import parquet

        for number in range(20):
            words = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000_000, pa.int32()), [f"{number}" * 1000])
            parquet.write_table(pa.table({"text": words}), folder / "bomb.parquet", compression="zstd")
            files.append((folder / "bomb.parquet").read_bytes())
    if name == "previews":
        from lorafusion_jax.serve.client import Client

        (folder / "rows.jsonl").write_text("".join(f'{{"text": "row {n} of many"}}\n' for n in range(500_000)))
        dataset = Client(url, key).upload(folder / "rows.jsonl")["id"]
    link.send("ready")
    link.recv()

    def hold(text: bytes) -> None:
        with suppress(OSError), socket.create_connection((host, int(port)), 30) as client:
            client.sendall(text)
            while time.monotonic() < until:
                client.sendall(b" ")
                time.sleep(1)

    head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n"
    acts: dict[str, Callable[[int], Any]] = {
        "idle": lambda number: hold(b"GET / HT"),
        "slow": lambda number: hold(
            head + (b"" if number % 2 else f"X-API-Key: {key}\r\n".encode()) + b"\r\n" + b" " * 900_000
        ),
        "brackets": lambda number: ask(url, "/v1/jobs", key if number % 2 else "", "POST", b"[]" * (1 << 19)),
        "bombs": lambda number: ask(url, "/v1/datasets?name=a.parquet", key, "POST", files[number % len(files)]),
        "previews": lambda number: ask(url, f"/v1/datasets/{dataset}/preview?row={number * 997 % 500_000}", key),
    }

    def repeat(number: int) -> None:
        while time.monotonic() < until:
            status = acts[name](number)
            statuses[status or 0] += 1
            number += 100
            time.sleep(0.02)

    count = {"idle": 600, "slow": 400}.get(name, 45 if name == "previews" else 8)
    threads = [threading.Thread(target=repeat, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until + 5 - time.monotonic()))
    link.send(dict(statuses))


def resident_mb(server: psutil.Process) -> float:
    size = 0
    for process in (server, *server.children(recursive=True)):
        with suppress(psutil.Error):
            size += process.memory_info().rss
    return size / 2**20


def watch(server: psutil.Process, url: str, key: str, twin: str, seconds: float) -> dict[str, Any]:
    """Asks as others do, ten times a second."""
    health, mine, beside, peak, until = [], [], [], 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        for address, path, times in ((url, "/healthz", health), (url, "/v1/me", mine), (twin, "/healthz", beside)):
            began = time.monotonic()
            status = ask(address, path, key)
            times.append(time.monotonic() - began if status == 200 else 60.0)
        peak = max(peak, resident_mb(server))
        time.sleep(0.1)
    row: dict[str, Any] = {}
    for name, times in (("healthz", health), ("me", mine), ("twin", beside)):
        times.sort()
        row |= {
            f"{name}_p50_s": round(times[len(times) // 2], 4),
            f"{name}_p99_s": round(times[len(times) * 99 // 100], 4),
        }
    return row | {"asked": len(health), "peak_mb": round(peak)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=30, help="of each attack")
    parser.add_argument("--jobs", type=int, default=10_000, help="in the store")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=ATTACKS)
    options = parser.parse_args()
    from campaigns.tiny_run import write_base

    from benchmarks.csv_rows import append_row

    write_measured(options.out)
    processes, failed = multiprocessing.get_context("spawn"), 0
    with tempfile.TemporaryDirectory(prefix="strangers-") as folder:
        base = write_base(Path(folder) / "base")
        link, other = processes.Pipe()
        server = processes.Process(target=serve, args=(Path(folder) / "home", base, options.jobs, other))
        server.start()
        url, keys = link.recv()
        twin_link, other = processes.Pipe()
        twin = processes.Process(target=serve, args=(Path(folder) / "twin", base, 1, other))
        twin.start()
        twin_url, _ = twin_link.recv()
        seen = psutil.Process(server.pid)
        for name in options.only:
            to_attacker, of_attacker = processes.Pipe()
            values = (name, url, keys["ana"], Path(folder), options.seconds, of_attacker)
            attacker = processes.Process(target=attack, args=values)
            attacker.start()
            to_attacker.recv()
            idle_mb = resident_mb(seen)
            to_attacker.send("go")
            row = {"attack": name} | watch(seen, url, keys["ben"], twin_url, options.seconds)
            statuses = to_attacker.recv()
            attacker.join()
            row |= {"grown_mb": round(row.pop("peak_mb") - idle_mb), "answers": json.dumps(statuses).replace('"', "")}
            bad = row["healthz_p99_s"] > P99_S or row["me_p99_s"] > P99_S or row["grown_mb"] > GROWN_MB
            failed += bad
            append_row(options.out / "strangers.csv", row)
            print("TOO MUCH" if bad else "ok", row, flush=True)
        times = seen.cpu_times()
        for _ in range(10):
            assert ask(url, "/v1/jobs?limit=200", keys["ben"]) == 200
        now = seen.cpu_times()
        list_s = (now.user + now.system - times.user - times.system) / 10
        append_row(options.out / "list.csv", {"jobs": options.jobs, "list_cpu_s": round(list_s, 4)})
        print(f"{options.jobs} jobs: a page takes {list_s:.3f} s of the processor", flush=True)
        failed += list_s > LIST_S
        for pipe, process in ((link, server), (twin_link, twin)):
            pipe.send("end")
            process.join()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
