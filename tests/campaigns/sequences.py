"""Random sequences of commands against one run.

A sequence is drawn from a seed. It trains, stops, kills, resumes on other meshes, adds, extends, pauses, continues,
finishes, cancels, weights and drops adapters, and damages one file. Then the run is resumed until nothing is left.
Every adapter must be where it would be undisturbed: each step once, with the same number, up to its end.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import small_jobs
from campaigns import tiny_run
from campaigns.cases import Case, Row
from campaigns.disk import Disk, Killed
from campaigns.quick_runs import Said, command, damage, listening, losses, quick_runs, resume_to_the_end
from campaigns.quick_session import QuickExecutor, alone

from lorafusion_jax.api.status import run_numbers
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.verify_folder import verify_folder
from lorafusion_jax.config import load_config
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.log_file import read_rows

NAMES = ("ask", "law", "med", "tax", "geo")
MESHES = ((1, 1), (1, 2), (2, 1), (2, 2))  # stages, replicas
MOST_CALLS = 120  # of a run that is killed at a call
OPTIM = {"lr": 1e-3, "schedule": "cosine", "warmup": 0.0}


class Lost(AssertionError):
    """Something was lost, or the run cannot go on."""


@dataclass(slots=True)
class Sequence:
    """One run and what is done to it."""

    home: Path
    base: Path
    seed: int
    disk: Disk
    draw: random.Random = field(init=False)
    log: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    dropped: set[str] = field(default_factory=set)
    damaged: Path | None = None
    content: bytes = b""  # of the damaged file, before
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

        try:
            with listening(listen), self.disk.watch(self.run, kill_at=kill_at):
                self._said(arguments, allowed=(0, 1, 3, 130))
        except Killed:
            self.log.append(f"  killed at call {self.disk.calls}")

    def _said(self, arguments: list[object], allowed: tuple[int, ...]) -> Said:
        outcome = command(*arguments)
        shown = " ".join(str(argument).replace(str(self.home), "") for argument in arguments)
        self.log.append(f"{shown} -> {outcome.code} {outcome.error}")
        if outcome.code not in allowed or (outcome.code == 1 and outcome.error):
            raise Lost(f"{shown} ended with {outcome.code}: {outcome.text[-1500:]}")
        return outcome

    def _resume(self) -> None:
        arguments: list[object] = ["resume", self.run]
        if self.draw.random() < 0.5:
            stages, data = self.draw.choice(MESHES)
            arguments += [f"mesh.stages={stages}", f"mesh.data={data}"]
        if self.draw.random() < 0.1:
            name = self.draw.choice(sorted(self.names))
            outcome = command("resume", self.run, "--drop", name)
            self.log.append(f"resume --drop {name} -> {outcome.code} {outcome.error}")
            if outcome.code in (0, 1, 3) and not outcome.error:
                self.dropped.add(name)
            elif not outcome.error.startswith("resume."):
                raise Lost(f"--drop {name} ended with {outcome.code}: {outcome.text[-1500:]}")
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
            outcome = command("add", self.run, more)
        else:
            name = self.draw.choice(sorted(self.names))
            value = {"weight": ["2.5"], "extend": ["--steps", str(self.draw.randint(1, 3))]}.get(action, [])
            outcome = command(action, self.run, name, *value)
        self.log.append(f"  {action} {name} -> {outcome.code} {outcome.error}")
        if outcome.code == 0:
            self.asked[action, name] += 1
            self.names |= {name}
        elif not outcome.error:
            raise Lost(f"{action} {name} ended with {outcome.code}: {outcome.text[-1500:]}")

    def _damage(self) -> None:
        """Spoils a file, and resumes; if that is refused, the file is put back, as the message must say."""
        if self.damaged is not None:
            return
        files = [file for file in sorted(self.run.rglob("*")) if file.is_file() and "latest" not in file.parts]
        file = self.damaged = self.draw.choice([file for file in files if file.stat().st_size])
        content = self.content = file.read_bytes()
        how = self.draw.choice(("cut", "flip", "remove"))
        if how == "cut":
            file.write_bytes(content[: self.draw.randrange(len(content))])
        elif how == "flip":
            position = self.draw.randrange(len(content))
            file.write_bytes(
                content[:position] + bytes([content[position] ^ 1 << self.draw.randrange(8)]) + content[position + 1 :]
            )
        else:
            file.unlink()
        self.logs_damaged |= file.suffix == ".jsonl"
        outcome = command("resume", self.run)
        self.log.append(f"{how} {file.relative_to(self.run)}; resume -> {outcome.code} {outcome.error}")
        if outcome.code == 2 and outcome.error:
            if "restore" not in outcome.text and "remove" not in outcome.text and "lorafusion" not in outcome.text:
                raise Lost(f"no way on: {outcome.text[-1500:]}")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        elif outcome.code not in (0, 1, 3) or outcome.error:
            raise Lost(f"damage of {file} ended with {outcome.code}: {outcome.text[-1500:]}")

    def _finish(self) -> None:
        self._restore_if_asked()
        self.asked.update(("continue", name) for name in resume_to_the_end(self.run))
        shortened = [name for action, name in self.asked if action == "finish"]
        problems = losses(self.run, shortened=shortened, spoilt_logs=self.logs_damaged)
        problems += damage(self.run, [self.damaged.name] if self.damaged else [])
        request_lost = self.damaged is not None and self.damaged.parent.name == "control"
        if set(names := run_numbers(self.run)["adapters"]) != self.names and not request_lost:
            problems.append(f"adapters {sorted(names)} instead of {sorted(self.names)}")
        problems += [] if self.logs_damaged or request_lost else self._unanswered()
        if problems:
            raise Lost("; ".join(problems))

    def _restore_if_asked(self) -> None:
        """A run that has ended reads fewer files when it is resumed than other commands do: they may ask for a copy."""
        if self.damaged is None:
            return
        if self.damaged == self.run / "config.yaml" and any(check.damage for check in verify_folder(self.run)):
            self.damaged.write_bytes(self.content)
        try:
            run_numbers(self.run)
            RunFolder(self.run).read_config()
        except LoraFusionError as problem:
            if "restore it" not in problem.fix:
                raise
            self.damaged.write_bytes(self.content)

    def _unanswered(self) -> Iterator[str]:
        """Yields requests that were neither done nor refused; those of an adapter that was dropped since are void."""
        events = read_rows(self.run / "events.jsonl")
        refused = Counter(
            tuple(row["text"].split(":")[0].split()[:2]) for row in events if row["kind"] == "request-refused"
        )
        done = Counter((row["action"], row["adapter"]) for row in events if row["kind"] == "adapter-changed")
        for what, count in self.asked.items():
            if what[1] in self.dropped:
                continue
            if done[what] + refused[what] < count and what[0] in ("add", "extend"):
                yield f"{what} was asked {count} times, done {done[what]} times and refused {refused[what]} times"


class Sequences:
    """
    Attributes:
        seeds: a case each.
    """

    name = "sequences"

    def __init__(self, seeds: Iterable[int]):
        self._seeds = list(seeds)

    def prepare(self, home: Path) -> None:
        prepare_rows(home)
        tiny_run.write_base(home / "base", num_layers=2)

    def cases(self, home: Path) -> Iterable[Case]:
        return [Case(name=str(seed), run=partial(self._go, home, seed)) for seed in self._seeds]

    @staticmethod
    @quick_runs()
    def _go(home: Path, seed: int, work: Path) -> Row:
        link_rows(home, work)
        sequence = Sequence(work, home / "base", seed, Disk())
        sequence.go()
        return {"commands": len(sequence.log)}


def prepare_rows(home: Path) -> None:
    for name, count in zip(NAMES, (7, 5, 9, 6, 4), strict=True):
        small_jobs.write_rows(home, name, count, longest=6)
    small_jobs.write_rows(home, "held", 2, longest=4)


def link_rows(home: Path, folder: Path) -> None:
    for file in home.glob("*.jsonl"):
        os.link(file, folder / file.name)
