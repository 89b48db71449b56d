"""A small job file with its data, and helpers to run commands and read their results."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path

WORDS = (
    "bank",
    "cat",
    "dog",
    "field",
    "gate",
    "hill",
    "ink",
    "jar",
    "key",
    "lamp",
    "moon",
    "nest",
    "oak",
    "pen",
    "quay",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command left on the screen."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return self.out.rstrip("\n").rsplit("\n", 1)[-1]

    @property
    def errors(self) -> list[str]:
        """Codes of the errors, in order."""
        return [line.split("[")[1].split("]")[0] for line in self.err.splitlines() if line.startswith("error[")]


def make_rows(count: int, seed: int) -> list[dict]:
    draw = random.Random(seed)
    return [
        {
            "prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, 8))),
            "completion": " " + " ".join(draw.choices(WORDS, k=draw.randint(1, 8))),
        }
        for _ in range(count)
    ]


def write_rows_to(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job file with its data, free to be spoilt."""

    folder: Path
    values: dict

    @property
    def path(self) -> Path:
        return self.folder / "jobs.yaml"

    def write(self) -> Path:
        self.path.write_text(json.dumps(self.values))  # JSON is YAML
        return self.path

    def adapter(self, name: str) -> dict:
        return next(adapter for adapter in self.values["adapters"] if adapter["name"] == name)


def make_job(folder: Path, base: Path) -> Job:
    """Two adapters, 6 and 4 steps, one with held-out data; a checkpoint after every second step."""
    for number, (name, rows) in enumerate({"law": 12, "law_eval": 4, "med": 12}.items()):
        write_rows_to(folder / f"{name}.jsonl", make_rows(rows, number))
    job = Job(
        folder=folder,
        values={
            "base": {"model": str(base), "dtype": "float32"},
            "data": {"max_length": 48},
            "batch": {"capacity_tokens": 64, "tile_tokens": 16},
            "train": {"log_every_s": 0, "plan_seconds": 0.1, "block_layers": 1},
            "lora": {"rank": 4, "dropout": 0.1, "targets": ["q_proj", "down_proj"]},
            "save": {"every_steps": 2},
            "adapters": [
                {
                    "name": "law",
                    "data": {"train": "law.jsonl", "eval": "law_eval.jsonl"},
                    "batch": {"global_samples": 2},
                },
                {"name": "med", "data": {"train": "med.jsonl"}, "batch": {"global_samples": 3}, "optim": {"lr": 1e-3}},
            ],
        },
    )
    job.write()
    return job


def snapshot(folder: Path) -> dict[str, str]:
    """Path → hash of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def weights(run_folder: Path) -> dict[str, str]:
    """Adapter → hash of its newest weights."""
    return {
        path.parts[-3]: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run_folder.glob("adapters/*/latest/adapter_model.safetensors"))
    }
