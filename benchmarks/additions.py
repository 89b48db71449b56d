"""How long does an adapter take to its first step after `lorafusion add`? With a reserved place, and without.

    python -m benchmarks.additions --out results/additions --small    # in miniature on a CPU, one minute
    python -m benchmarks.additions --out results/additions            # one GPU, eight layers of Llama-3.1-8B's shape

Trains two adapters of a model with random weights, and adds a third after a few steps of the first: in one run
`train.places` has a place for it, in the other none. A row for each: seconds by the clock and of the processor from the
request to the first step of the new adapter, and the programs that were compiled or read from the cache meanwhile.
Checks that the losses of the first adapters agree before the request. No compilation cache is used.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.monitoring

from benchmarks.conditions import conditions
from benchmarks.random_job import SHAPE, SMALL, write_data
from benchmarks.row_file import write_within_budget
from benchmarks.starting import write_base
from lorafusion_jax.checkpoint.requests import write_addition
from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.read import source_of
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.examples import examples_directory
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import train

COMPILED = "/jax/core/compile/backend_compile_duration"
FIRST, ADDED, LAYERS = ("law", "tax"), "med", 8
ASKED_AFTER = 3  # steps of the first adapter


class Watch:
    """Asks for an adapter, and measures until its first step."""

    def __init__(self, run: Path, job: JobConfig):
        self._run, self._job, self._began = run, job, (0.0, 0.0)
        self.programs, self.row = 0, {}

    def __call__(self, event: Any) -> None:
        if event.kind != "step":
            return
        if (event.adapter, event.step) == (FIRST[0], ASKED_AFTER):
            self._began, self.programs = (time.perf_counter(), time.process_time()), 0
            write_addition(self._run, [self._job.adapter(ADDED)])
        if (event.adapter, event.step) == (ADDED, 1):
            passed = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
            self.row = {"seconds": round(passed[0], 3), "cpu_seconds": round(passed[1], 3), "programs": self.programs}

    def count(self, event: str, seconds: float, **labels: Any) -> None:
        self.programs += event == COMPILED


def make_rows(small: bool) -> Iterator[dict[str, Any]]:
    jax.config.update("jax_enable_compilation_cache", False)
    losses = []
    for places in ({}, {"4" if small else "16": 1}):
        with tempfile.TemporaryDirectory(prefix="additions_") as folder:
            run, job = Path(folder) / "run", make_job(Path(folder), places, small)
            watch = Watch(run, job)
            first = job.model_copy(update={"adapters": tuple(job.adapter(name) for name in FIRST)})
            jax.monitoring.register_event_duration_secs_listener(watch.count)
            train(first, run, listeners=[watch])
            jax.monitoring.unregister_event_duration_listener(watch.count)
            losses.append([row["loss"] for row in read_rows(run / "metrics.jsonl") if row["kind"] == "step"][:2])
        yield {"places": places, **watch.row, "small": small, **conditions()}
    assert all(abs(a - b) < 1e-2 for a, b in zip(*losses, strict=True)), losses


def make_job(work: Path, places: dict[str, int], small: bool) -> JobConfig:
    shape = SMALL if small else {**SHAPE, "num_layers": LAYERS}
    write_base(work / "base", shape, shape["num_layers"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(examples_directory() / "base" / name, work / "base" / name)
    mean, spread, rows, longest = (40, 20, 48, 100) if small else (500, 400, 400, 2000)
    for name in (*FIRST, ADDED):
        write_data(work / f"{name}.jsonl", mean, spread, rows, work / "base" / "tokenizer.json", longest)
    values = {
        "base": {"model": str(work / "base"), "dtype": "float32" if small else "bfloat16"},
        "batch": {"capacity_tokens": 256 if small else 8192, "tile_tokens": 16 if small else 128, "global_samples": 4},
        "train": {"places": places, "max_steps": 12},
        "lora": {"rank": 4 if small else 16, "dropout": 0.0},
        "optim": {"schedule": "constant"},
        "adapters": [
            {
                "name": name,
                "data": {"train": str(work / f"{name}.jsonl"), "max_length": 256 if small else 4096},
                "seed": seed,
            }
            for seed, name in enumerate((*FIRST, ADDED))
        ],
    }
    return parse_config(source_of(values))


if __name__ == "__main__":
    raise SystemExit(write_within_budget("additions", __doc__ or "", 240, make_rows))
