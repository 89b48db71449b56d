"""Random sequences of commands against one run, and what must be true of the run at their end.

A sequence is drawn from a seed. It trains, stops, kills, resumes on other meshes, adds, extends, pauses, continues,
finishes, cancels, weights and drops adapters, and damages one file. At its end the run is resumed until nothing is left.
Then every adapter must be where it would be undisturbed: each step once, with the same number, up to its end.
"""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_jobs
import typer
import yaml
from campaigns.disk import Disk, Killed
from campaigns.quick_session import MODULUS, WEIGHTS, QuickExecutor, QuickSession, alone, export

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.requests import request_files
from lorafusion_jax.checkpoint.saved_states import read_position
from lorafusion_jax.checkpoint.verify_folder import verify_folder
from lorafusion_jax.cli.main import run as lorafusion
from lorafusion_jax.cli.status import run_numbers
from lorafusion_jax.config import load_config
from lorafusion_jax.config.join import in_force
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.optim.schedules import learning_rates
from lorafusion_jax.report.recorder import Recorder
from lorafusion_jax.training import job, launch
from lorafusion_jax.training.adapter_writer import AdapterWriter

NAMES = ("ask", "law", "med", "tax", "geo")
MESHES = ((1, 1), (1, 2), (2, 1), (2, 2))  # stages, replicas
ENDED = ("done", "cancelled", "failed")
MOST_RESUMES = 25
MOST_CALLS = 120  # of a run that is killed at a call
OPTIM = {"lr": 1e-3, "schedule": "cosine", "warmup": 0.0}
CODE = re.compile(r"error\[([\w.-]+)\]")


@contextmanager
def quick_runs() -> Iterator[pytest.MonkeyPatch]:
    """Runs of this process need no devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "Session", QuickSession)
        patch.setattr(AdapterWriter, "_export", export)
        patch.setattr(yaml, "SafeLoader", yaml.CSafeLoader)  # this and what follows is nearly all time of a tiny run
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        patch.setattr(job, "learning_rates", _kept(learning_rates))
        yield patch


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function once for equal arguments, which need not be hashable."""
    found: dict[str, Any] = {}

    def call(*arguments: Any) -> Any:
        key = repr(arguments)
        if key not in found:
            found[key] = function(*arguments)
        return found[key]

    return call


@dataclass(slots=True)
class Listening:
    """Passes every event of a run to `heard`, after it is written."""

    heard: Callable[[Any], None] | None = None

    def install(self, patch: pytest.MonkeyPatch) -> None:
        record = Recorder.__call__

        def call(recorder: Recorder, event: Any) -> None:
            record(recorder, event)
            if self.heard is not None:
                self.heard(event)

        patch.setattr(Recorder, "__call__", call)


@dataclass(frozen=True, slots=True)
class Said:
    """What a command came to."""

    code: int
    text: str

    @property
    def error(self) -> str:
        found = CODE.search(self.text)
        return found[1] if found else ""


def command(*arguments: object) -> Said:
    """Runs a command of the command line in this process."""
    heard = io.StringIO()
    with redirect_stdout(heard), redirect_stderr(heard):
        code = lorafusion([str(each) for each in arguments])
    return Said(code, heard.getvalue())


class Lost(AssertionError):
    """Something was lost, or the run cannot go on."""


@dataclass(slots=True)
class Sequence:
    """One run and what is done to it."""

    home: Path
    base: Path
    seed: int
    disk: Disk
    listening: Listening
    draw: random.Random = field(init=False)
    log: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    dropped: set[str] = field(default_factory=set)
    damaged: Path | None = None
    logs_damaged: bool = False

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    @property
    def run(self) -> Path:
        return self.home / "run"

    def go(self) -> None:
        """Runs the whole sequence.

        Raises:
            Lost: with everything that was done.
        """
        try:
            self._train()
            for _ in range(self.draw.randint(2, 7)):
                self.draw.choice([self._request, self._request, self._resume, self._resume, self._damage])()
            self._finish()
            self._check()
        except Exception as problem:
            text = "\n".join(self.log)
            raise Lost(f"seed {self.seed}: {type(problem).__name__}: {problem}\n{text}") from problem

    def _train(self) -> None:
        initial = self.draw.sample(NAMES[:3], self.draw.randint(1, 3))
        self.names = set(initial)
        save = {"every_steps": self.draw.randint(1, 4), "keep": self.draw.randint(1, 3)}
        train = {"on_failed": self.draw.choice(["keep", "replan"]), "plan_seconds": 0.01, "log_every_s": 0}
        batch = {"capacity_tokens": 48, "tile_tokens": 16, "global_samples": 2}
        stages, data = self.draw.choice(MESHES)
        jobs = small_jobs.write_job(
            self.home, self.base, [self._entry(name) for name in initial], save=save, batch=batch, optim=OPTIM,
            data={"max_length": 32}, train=train, mesh={"stages": stages, "data": data},
        )  # fmt: skip
        QuickExecutor.sick = {}
        if self.draw.random() < 0.2:
            self._make_sick(load_config(jobs))
        self._disturbed(["train", jobs, "--out", self.run])
        while not self.run.joinpath("plan.json").exists():
            shutil.rmtree(self.run, ignore_errors=True)
            self._said(["train", jobs, "--out", self.run], allowed=(0, 1, 3))

    def _make_sick(self, config: JobConfig) -> None:
        """One adapter fails at one of its steps, however often the run comes to it."""
        adapter = self.draw.choice(config.adapters)
        weights = alone(adapter, prepare(config).adapters[adapter.name])
        QuickExecutor.sick = {adapter.name: self.draw.choice(weights[:-1])}

    def _entry(self, name: str) -> dict[str, Any]:
        entry = {"name": name, "data": {"train": f"{name}.jsonl"}, "seed": NAMES.index(name) + 1}
        entry |= {"epochs": self.draw.randint(1, 2), "batch": {"global_samples": self.draw.randint(1, 3)}}
        if self.draw.random() < 0.3:
            entry["data"]["eval"] = "held.jsonl"
        return entry

    def _disturbed(self, arguments: list[object]) -> None:
        """Runs to its end, or until a signal or a kill; requests come in on the way."""
        moments: dict[int, Callable[[], None]] = {}
        for _ in range(self.draw.randint(0, 2)):
            moments[self.draw.randint(1, 40)] = self._request
        kill_at, kind = 0, self.draw.random()
        if kind < 0.35:
            kill_at = self.draw.randint(1, MOST_CALLS)
        elif kind < 0.6:
            moments[self.draw.randint(1, 40)] = lambda: signal.raise_signal(signal.SIGTERM)
        elif kind < 0.7:
            def kill() -> None:
                self.disk._at = self.disk.calls + 1
            moments[self.draw.randint(1, 40)] = kill
        heard = 0

        def listen(event: Any) -> None:
            nonlocal heard
            heard += event.kind != "phase"
            if (what := moments.pop(heard, None)) is not None:
                what()

        self.listening.heard = listen
        try:
            with self.disk.watch(self.run, kill_at=kill_at):
                self._said(arguments, allowed=(0, 1, 3, 130))
        except Killed:
            self.log.append(f"  killed at call {self.disk.calls}")
        finally:
            self.listening.heard = None

    def _said(self, arguments: list[object], allowed: tuple[int, ...]) -> Said:
        said = command(*arguments)
        shown = " ".join(str(each).replace(str(self.home), "") for each in arguments)
        self.log.append(f"{shown} -> {said.code} {said.error}")
        if said.code not in allowed or (said.code == 1 and said.error):
            raise Lost(f"{shown} ended with {said.code}: {said.text[-1500:]}")
        return said

    def _resume(self) -> None:
        arguments: list[object] = ["resume", self.run]
        if self.draw.random() < 0.5:
            stages, data = self.draw.choice(MESHES)
            arguments += [f"mesh.stages={stages}", f"mesh.data={data}"]
        if self.draw.random() < 0.1:
            name = self.draw.choice(sorted(self.names))
            said = command("resume", self.run, "--drop", name)
            self.log.append(f"resume --drop {name} -> {said.code} {said.error}")
            if said.code in (0, 1, 3) and not said.error:
                self.dropped.add(name)
            elif not said.error.startswith("resume."):
                raise Lost(f"--drop {name} ended with {said.code}: {said.text[-1500:]}")
            return
        self._disturbed(arguments)

    def _request(self) -> None:
        action = self.draw.choice(("pause", "continue", "cancel", "finish", "weight", "extend", "extend", "add", "add"))
        if action == "add":
            left = [name for name in NAMES if name not in self.names]
            if not left:
                return
            name = self.draw.choice(left)
            more = self.home / f"{name}.yaml"
            more.write_text(json.dumps({"adapters": [self._entry(name)], "optim": OPTIM, "data": {"max_length": 32}}))
            said = command("add", self.run, more)
        else:
            name = self.draw.choice(sorted(self.names))
            value = {"weight": ["2.5"], "extend": ["--steps", str(self.draw.randint(1, 3))]}.get(action, [])
            said = command(action, self.run, name, *value)
        self.log.append(f"  {action} {name} -> {said.code} {said.error}")
        if said.code == 0:
            self.asked[action, name] += 1
            self.names |= {name}
        elif not said.error:
            raise Lost(f"{action} {name} ended with {said.code}: {said.text[-1500:]}")

    def _damage(self) -> None:
        """Spoils a file, and resumes; if that is refused, the file is put back, as the message must say."""
        if self.damaged is not None:
            return
        files = [file for file in sorted(self.run.rglob("*")) if file.is_file() and "latest" not in file.parts]
        file = self.damaged = self.draw.choice([file for file in files if file.stat().st_size])
        content = file.read_bytes()
        how = self.draw.choice(("cut", "flip", "remove"))
        if how == "cut":
            file.write_bytes(content[: self.draw.randrange(len(content))])
        elif how == "flip":
            place = self.draw.randrange(len(content))
            file.write_bytes(content[:place] + bytes([content[place] ^ 1 << self.draw.randrange(8)]) + content[place + 1 :])
        else:
            file.unlink()
        self.logs_damaged |= file.suffix == ".jsonl"
        said = command("resume", self.run)
        self.log.append(f"{how} {file.relative_to(self.run)}; resume -> {said.code} {said.error}")
        if said.code == 2 and said.error:
            if "restore" not in said.text and "remove" not in said.text and "lorafusion" not in said.text:
                raise Lost(f"no way on: {said.text[-1500:]}")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        elif said.code not in (0, 1, 3) or said.error:
            raise Lost(f"damage of {file} ended with {said.code}: {said.text[-1500:]}")

    def _finish(self) -> None:
        """Resumes until nothing is left; a run that cannot is lost."""
        for _ in range(MOST_RESUMES):
            self._said(["resume", self.run], allowed=(0, 1, 3))
            rows = run_numbers(self.run)["adapters"]
            paused = [name for name, row in rows.items() if row["status"] == "paused"]
            for name in paused:
                self.asked["continue", name] += 1
                self._said(["continue", self.run, name], allowed=(0,))
            if not paused and all(row["status"] in ENDED for row in rows.values()) and not request_files(self.run):
                return
        raise Lost(f"the run does not end: {run_numbers(self.run)}")

    def _check(self) -> None:
        folder, numbers = RunFolder(self.run), run_numbers(self.run)
        config = in_force(folder.read_config(), folder.read_plan())
        prepared, found = prepare(config), []
        if set(numbers["adapters"]) != self.names:
            found.append(f"adapters {sorted(numbers['adapters'])} instead of {sorted(self.names)}")
        steps: dict[str, dict[int, float]] = {name: {} for name in numbers["adapters"]}
        for row in read_rows(self.run / "metrics.jsonl"):
            if row["kind"] == "step":
                if row["step"] in steps[row["adapter"]]:
                    found.append(f"{row['adapter']} step {row['step']} is there twice")
                steps[row["adapter"]][row["step"]] = row["loss"]
        position = read_position(folder.state) or {}
        for name, row in numbers["adapters"].items():
            weights = alone(config.adapter(name), prepared.adapters[name])
            taken = position["adapters"][name]["step"]
            if not self.logs_damaged and taken != row["step"]:
                found.append(f"{name} is at step {taken}, and status says {row['step']}")
            if row["status"] == "done" and taken != row["steps"]:
                found.append(f"{name} took {taken} of {row['steps']} steps")
            expected = {step: weights[step] / MODULUS for step in range(1, taken + 1)}
            if not self.logs_damaged and steps[name] != expected:
                found.append(f"{name}: its losses are {steps[name]} instead of {expected}")
            latest = folder.latest(name)
            if taken and (latest is None or int(np.load(latest / WEIGHTS)) != weights[taken]):
                found.append(f"{name}: its newest folder {latest} is not that of step {taken}")
        if not self.logs_damaged:
            found += self._unanswered()
        found += [f"{path.relative_to(self.run)} is left over" for path in self.run.rglob(".*")]
        damage = [text for verdict in verify_folder(self.run) for text in verdict.damage]
        found += [text for text in damage if self.damaged is None or self.damaged.name not in text]
        if found:
            raise Lost("; ".join(found))

    def _unanswered(self) -> Iterator[str]:
        """Yields requests that were neither done nor refused."""
        events = read_rows(self.run / "events.jsonl")
        refused = Counter(tuple(row["text"].split(":")[0].split()[:2]) for row in events if row["kind"] == "request-refused")
        done = Counter((row["action"], row["adapter"]) for row in events if row["kind"] == "adapter-changed")
        for (action, name), count in self.asked.items():
            if done[action, name] + refused[action, name] < count and action in ("add", "extend"):
                yield f"{action} {name} was asked {count} times, done {done[action, name]} and refused {refused[action, name]}"
