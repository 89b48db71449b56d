"""Does a long run of many adapters, disturbed all the time, lose anything or grow?

    python -m campaigns.soak --work FOLDER --out benchmarks/results/soak_cpu_DATE

trains 64 adapters of a tiny model for 20 000 slots. On the way adapters are paused, continued, cancelled, finished,
extended and weighted, others are added, and the process is killed or asked to stop, and the run resumed. Memory of the
process is written down every second. At the end every job is accounted for: `missing` says what is not as it should be.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns import tiny_run

from benchmarks.conditions import conditions
from benchmarks.csv_rows import append_row, write_rows
from lorafusion_jax.api.status import run_numbers
from lorafusion_jax.checkpoint.folder import RunFolder, step_of
from lorafusion_jax.checkpoint.requests import request_files
from lorafusion_jax.checkpoint.verify_folder import verify_folder
from lorafusion_jax.cli.main import run as lorafusion
from lorafusion_jax.log_file import read_rows

WORDS = [
    "adapter",
    "base",
    "batch",
    "cache",
    "file",
    "graph",
    "kernel",
    "layer",
    "loss",
    "mask",
    "model",
    "plan",
    "row",
]
SAMPLES = 64
SLOTS_A_STEP = 0.62  # of these rows and this capacity, with what is cancelled on the way; measured
CYCLE = ("pause", "cancel", "SIGKILL", "weight", "continue", "add", "finish", "SIGTERM", "extend")
EXTENSION = 20  # steps
ENDED = ("done", "cancelled")
TAIL = 1 << 14  # bytes; a row has less than half of it


@dataclass(slots=True, kw_only=True)
class Interventions:
    """What was asked of the run, and how often it was killed."""

    requests: list[tuple[str, str]] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)

    def of(self, *actions: str) -> set[str]:
        return {adapter for action, adapter in self.requests if action in actions}


def missing(run: Path, interventions: Interventions, first: Sequence[str]) -> list[str]:
    """What is not accounted for in a finished run: adapters, steps, folders, requests; files that should not be there.

    Args:
        first: adapters that the run began with.
    """
    numbers, rows = run_numbers(run), read_rows(run / "metrics.jsonl")
    steps: dict[str, list[int]] = {name: [] for name in numbers["adapters"]}
    for row in rows:
        if row["kind"] == "step":
            steps[row["adapter"]].append(row["step"])
    problems = [] if numbers["state"] == "finished" else [f"the run is {numbers['state']}"]
    problems += [f"{name} is not in the run" for name in {*first, *interventions.of("add")} - steps.keys()]
    for name, adapter_row in numbers["adapters"].items():
        latest = RunFolder(run).latest(name)
        if adapter_row["status"] not in ENDED or (
            adapter_row["status"] == "cancelled" and name not in interventions.of("cancel")
        ):
            problems.append(f"{name} is {adapter_row['status']}")
        if adapter_row["status"] == "done" and adapter_row["step"] != adapter_row["steps"]:
            problems.append(f"{name} took {adapter_row['step']} of {adapter_row['steps']} steps")
        if sorted(steps[name]) != list(range(1, adapter_row["step"] + 1)):
            problems.append(f"{name}: steps in metrics.jsonl are not 1 to {adapter_row['step']}, each once")
        if adapter_row["step"] and (latest is None or step_of(latest) != adapter_row["step"]):
            problems.append(f"{name}: its newest folder is {latest}")
    events = read_rows(run / "events.jsonl")
    answered = Counter((row["action"], row["adapter"]) for row in events if row["kind"] == "adapter-changed")
    refused = " ".join(row["text"] for row in events if row["kind"] == "request-refused")
    for (action, name), count in Counter(interventions.requests).items():
        if answered[action, name] != count and name not in refused:
            problems.append(f"{action} {name} was asked {count} times and done {answered[action, name]} times")
    problems += [f"{file.name} waits" for file in request_files(run)]
    problems += [f"{path.relative_to(run)} is left over" for path in run.rglob(".*")]
    return problems + [text for verdict in verify_folder(run) for text in verdict.damage]


class Soak:
    """One run, the process that trains it, and what is done to it."""

    def __init__(self, work: Path, out: Path, adapters: int, slots: int, moments: int):
        self.work, self.run, self.memory = work.resolve(), work.resolve() / "run", out / "memory.csv"
        self.adapters = [f"a{number:02}" for number in range(adapters)]
        self.slots, self.moments = slots, moments
        self.interventions, self.draw = Interventions(), random.Random(0)
        self.sitting, self.began = 0, time.monotonic()
        self.process: subprocess.Popen | None = None
        self.memory.unlink(missing_ok=True)

    def go(self) -> dict[str, Any]:
        """Trains to the end; returns a row of what happened."""
        self._start(["train", str(self._write_job()), "--out", str(self.run)])
        for number, slot in enumerate(self._slots_of_moments()):
            if not self._wait_until(slot):
                break
            self._intervene(CYCLE[number % len(CYCLE)], number)
        while not self._is_finished():
            self._wait_until(float("inf"))
            for name in self._adapters_in("paused"):
                self._send_request("continue", name)
            if not self._is_finished():
                self._start(["resume", str(self.run)])
        problems = missing(self.run, self.interventions, self.adapters)
        print(*problems, sep="\n")
        numbers = run_numbers(self.run)
        actions = Counter(action for action, _ in self.interventions.requests)
        return {
            "adapters": len(numbers["adapters"]),
            "slots": numbers["slots"],
            "steps": sum(row["step"] for row in numbers["adapters"].values()),
            "seconds": round(time.monotonic() - self.began),
            **{action: actions[action] for action in CYCLE if not action.startswith("SIG")},
            **{kind: self.interventions.kills[kind] for kind in ("SIGKILL", "SIGTERM")},
            "missing": len(problems),
        }

    def _write_job(self) -> Path:
        words = [
            {"prompt": " ".join(self.draw.choices(WORDS, k=self.draw.randint(1, 6))), "completion": f" {word}"}
            for word in self.draw.choices(WORDS, k=SAMPLES)
        ]
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in words))
        base = self.work / "base"
        if not base.exists():
            tiny_run.write_base(base)
        return self._job(self.work, self.adapters, base=base)

    def _job(self, folder: Path, names: Sequence[str], base: Path | None = None) -> Path:
        """Of the run, or of adapters that join it."""
        steps = max(1, round(self.slots / (SLOTS_A_STEP * len(self.adapters))))
        data = {"train": str(self.work / "rows.jsonl")}
        entries = [{"name": name, "data": data, "seed": seed, "epochs": 10**6} for seed, name in enumerate(names)]
        lora = {"rank": 2, "dropout": 0.1, "targets": ["down_proj"]}
        if base is None:
            path = folder / f"{names[0]}.yaml"
            common = {"data": {"max_length": 32}, "lora": lora, "batch": {"global_samples": 2}}
            path.write_text(json.dumps(common | {"adapters": entries}))
            return path
        batch = {"capacity_tokens": 64, "tile_tokens": 16, "global_samples": 2}
        train = {"max_steps": steps, "plan_seconds": 0.1, "log_every_s": 2}
        save = {"every_steps": max(2, steps * len(names) // 25), "keep": 2}
        return tiny_run.write_job(folder, base, entries, batch=batch, lora=lora, train=train, save=save)

    def _slots_of_moments(self) -> Iterator[int]:
        for number in range(1, self.moments + 1):
            yield number * self.slots // (self.moments + 2)

    def _intervene(self, action: str, number: int) -> None:
        print(f"{time.monotonic() - self.began:.0f} s, slot {self._slot()}: {action}", flush=True)
        if action.startswith("SIG"):
            self.interventions.kills[action] += 1
            assert self.process is not None
            self.process.send_signal(signal.Signals[action])
            self._wait_until(float("inf"))
            if not self._is_finished():
                self._start(["resume", str(self.run)])
        elif action == "add":
            name = f"new{number:02}"
            if self._run_command("add", str(self.run), str(self._job(self.work, [name]))):
                self.interventions.requests.append(("add", name))
        elif candidates := self._adapters_in("paused" if action == "continue" else "running"):
            more = {"weight": ["3"], "extend": ["--steps", str(EXTENSION)]}.get(action, [])
            self._send_request(action, self.draw.choice(candidates), *more)

    def _send_request(self, action: str, adapter: str, *more: str) -> None:
        if self._run_command(action, str(self.run), adapter, *more):
            self.interventions.requests.append((action, adapter))

    def _run_command(self, *arguments: str) -> bool:
        """Runs a command in this process. Returns False if its adapter has just ended."""
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            code = lorafusion(list(arguments))
        if code and "error[control.ended]" not in output.getvalue():
            raise RuntimeError(output.getvalue())
        return not code

    def _adapters_in(self, status: str) -> list[str]:
        """Adapters of this status that no request ends."""
        rows = run_numbers(self.run)["adapters"]
        ending = self.interventions.of("cancel", "finish")
        return [name for name in rows if rows[name]["status"] == status and name not in ending]

    def _start(self, arguments: list[str]) -> None:
        self.sitting += 1
        with (self.work / "train.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lorafusion_jax", *arguments],
                stdout=log,
                stderr=log,
                env=os.environ | {"XDG_CACHE_HOME": str(self.work / "cache")},
            )

    def _wait_until(self, slot: float) -> bool:
        """Writes memory down until the run is at a slot; False if its process ended before."""
        assert self.process is not None
        while self.process.poll() is None:
            slot_now = self._slot()
            append_row(
                self.memory,
                {
                    "sitting": self.sitting,
                    "seconds": round(time.monotonic() - self.began),
                    "slot": slot_now,
                    "resident_mb": _resident_mb(self.process.pid),
                },
            )
            if slot_now >= slot:
                return True
            time.sleep(1)
        return False

    def _slot(self) -> int:
        """Of the last whole row of metrics.jsonl; `status` would read the plan as well, every second."""
        file = self.run / "metrics.jsonl"
        if not file.exists():
            return 0
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - TAIL))
            rows = [line for line in stream.read().split(b"\n")[:-1] if line.startswith(b'{"kind"')]
        return json.loads(rows[-1])["slot"] if rows else 0

    def _is_finished(self) -> bool:
        numbers = run_numbers(self.run)
        return numbers["state"] == "finished" and all(row["status"] in ENDED for row in numbers["adapters"].values())


def _resident_mb(process: int) -> float:
    """Memory of a process, 0 if it has just ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((round(int(line.split()[1]) / 1024, 1) for line in lines if line.startswith("VmRSS")), 0.0)


def main() -> int:
    parser = tiny_run.arguments_of_a_run(__doc__, work="new folder for the run")
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--slots", type=int, default=20_000)
    parser.add_argument("--moments", type=int, default=27, help="at which something is done to the run")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    soak = Soak(arguments.work, arguments.out, arguments.adapters, arguments.slots, arguments.moments)
    row = soak.go()
    print(row)
    write_rows(arguments.out / "soak.csv", [row | conditions()])
    return int(row["missing"] > 0)


if __name__ == "__main__":
    sys.exit(main())
