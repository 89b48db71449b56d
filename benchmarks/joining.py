"""Does joining pay? Adapters together beside one after another, on one card and one random base.

    python -m benchmarks.joining --out D --budget 900            # one H200, 8B's shape
    python -m benchmarks.joining --out D --budget 60 --small     # a CPU, to try

Rows of joining.jsonl, those of most interest first:
    {"part": "rl", ...}       adapters that sample their rows (`rollout`): seconds of a step of all adapters, and the
                              share of sampling in it
    {"part": "sft", "way": "together" | "one by one", ...}
                              equal adapters in supervised fine-tuning. Microbatches have the best of three sizes in the
                              simulator, for each way. `step_s` is a step of all adapters; one that trains alone waits
                              `step_s` over their number for its own
    {"part": "search", "phase": "planned" | "started" | "trained" | "cut", ...}
                              64 points (learning rate × rank × batch) in one run, with and without halving: a row as
                              each phase ends. "trained" has the seconds until the last point is trained; the run ends
                              there, without a last save of all points. "cut": the budget ended first; the row has what
                              was done, and `left_predicted_s`, which is predicted and not measured

A search by PEFT, one point after another, takes Σ tokens of a point / tokens per second at its batch, which
`python -m benchmarks.peers --batch 1 4 8 16 --variants default packed --workload xsum` measures in the same
environment of torch.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import lorafusion_jax as lf
from benchmarks.conditions import conditions
from benchmarks.end_to_end import VARIANTS, Bench, Variant
from benchmarks.harness import add_row, command_line
from benchmarks.random_base import add_base_option, random_base
from benchmarks.random_job import SHAPE, SMALL
from lorafusion_jax.config.schema import JobConfig, MeshSettings
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.planning.prediction import predicted_costs
from lorafusion_jax.report.events import AdapterChanged, AdapterEvaluated, RunEvent, RunStarted, SlotDone, StepTaken
from lorafusion_jax.training.meter import EVALUATING, SAMPLING
from scheduling import AdapterJob, simulate

WAYS = {"single": "one by one", "ours": "together"}
SIZES = (1 / 16, 3 / 16, 1 / 2)  # of the capacity; each compiles once for each number of adapters
PARTS = ("rl", "sft", "search")
SEARCHES = {"halving": (True, "none"), "whole": (False, "none"), "fp8": (True, "fp8")}  # with halving?, base
SHOWN_EVERY_S = 5.0  # the steps of a search
REWARD = (
    "def reward(completions):\n    return [sum(map(str.islower, text)) / (len(text) + 1) for text in completions]\n"
)


class Cell(NamedTuple):
    """Equal adapters: samples of a step, rank, mean tokens of a sample, number, how the base is stored."""

    batch: int
    rank: int
    tokens: int
    adapters: int
    quantize: str = "none"


CELLS = (
    *(Cell(batch, 8, 256, 16) for batch in (4, 1, 16, 64)),
    Cell(4, 8, 256, 4),
    Cell(4, 8, 256, 16, "fp8"),
    *(Cell(batch, 8, 2048, 16) for batch in (1, 4)),
    Cell(4, 8, 256, 64),
    *(Cell(batch, 64, 256, 16) for batch in (1, 16)),
    *(Cell(batch, 8, 256, 16, "fp8") for batch in (1, 16)),
    *(Cell(batch, 8, 2048, 16) for batch in (16, 64)),
    Cell(16, 64, 2048, 16),
)
SMALL_CELLS = (Cell(1, 4, 16, 3), Cell(4, 4, 16, 3))


SMALLER_S = 0.01  # of a slot: 512 and 1 536 tokens took 46 and 103 ms on an H200 where default rates predict 38 and 92


class Joining(Bench):
    """`Bench` with cells in place of workloads."""

    cell: Cell

    def jobs(self, variant: Variant, workload: str, mesh: MeshSettings, slots: int) -> list[list[AdapterJob]]:
        cell, capacity = self.cell, self.options.capacity
        together = cell.adapters if variant.together else 1
        steps = min(slots + 5, max(2, round(slots * capacity / (cell.tokens * cell.batch * together))))  # each ≥ a slot
        draw, count = np.random.default_rng(0), steps * cell.batch
        longest = min(2 * cell.tokens, capacity // 2)
        lengths = [draw.lognormal(np.log(cell.tokens) - 0.11, 0.47, count) for _ in range(together)]
        jobs = [
            AdapterJob(f"a{number}", row.clip(4, longest).astype(int).tolist(), cell.batch)
            for number, row in enumerate(lengths)
        ]
        return [jobs]

    def config(self, variant: Variant, mesh: MeshSettings, capacity: Any, adapters: int) -> JobConfig:
        config = super().config(variant, mesh, capacity, adapters if adapters > 1 else 1)
        lora = config.adapters[0].lora.model_copy(update={"rank": self.cell.rank})
        renamed = [adapter.model_copy(update={"lora": lora}) for adapter in config.adapters]
        base = config.base.model_copy(update={"quantize": self.cell.quantize})
        return config.model_copy(update={"adapters": tuple(renamed), "base": base})

    def planned(self, variant: Variant, workload: str, mesh: MeshSettings, slots: int):
        """As `Bench` has it, but the adapters together take the best size of microbatches, too."""
        runs = self.jobs(variant, workload, mesh, slots)
        capacity = self.best_capacity(variant, runs, mesh)
        return runs, capacity, [self.plan(variant, run, capacity, mesh) for run in runs]

    def best_capacity(self, variant: Variant, runs: Sequence[Sequence[AdapterJob]], mesh: MeshSettings) -> int:
        longest = max(max(job.sample_tokens) for run in runs for job in run)

        def seconds(capacity: int) -> float:
            costs = predicted_costs(self.config(variant, mesh, capacity, len(runs[0])), self.model, "h200")
            plans = [self.plan(variant, run, capacity, mesh) for run in runs]
            return sum(simulate(plan, costs).duration_s + SMALLER_S * plan.num_slots for plan in plans)

        sizes = [round(share * self.options.capacity) for share in SIZES]
        return min((size for size in sizes if size >= longest), key=seconds)

    def write(self, row: Mapping[str, Any]) -> None:
        keys = (
            "capacity_tokens", "useful_tokens_per_s", "density", "slots", "slot_s", "seconds", "compile_s", "peak_gb",
            "predicted_gb", "error",
        )  # fmt: skip
        cell = self.cell._asdict() | {"part": "sft", "way": WAYS[row["variant"]]}
        if "useful_tokens_per_s" in row:
            tokens = self.cell.adapters * self.cell.batch * self.cell.tokens
            cell["step_s"] = round(tokens / row["useful_tokens_per_s"], 3)
        add_row(self.file, cell | {key: row[key] for key in keys if key in row} | self.conditions)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--budget", type=float, default=900.0, help="seconds; nothing new starts after them")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=list(SEARCHES), help="of the part `search`")
    parser.add_argument("--cells", nargs="+", type=int, help="of the part `sft`, counted from 0 (default: all)")
    add_base_option(parser)
    options = parser.parse_args()
    stop = time.monotonic() + options.budget
    if not options.small:
        prepare_machine()
    for part in options.parts:
        try:
            rows = {"sft": sft, "rl": rl, "search": search}[part](options, stop)
            for row in rows:
                add_row(options.out / "joining.jsonl", {"part": part} | row | conditions())
        except Exception as problem:  # the other parts go on
            error = f"{type(problem).__name__}: {problem}"[:2000]
            add_row(options.out / "joining.jsonl", {"part": part, "error": error})
    return 0


def sft(options: argparse.Namespace, stop: float) -> Iterator[dict[str, Any]]:
    """Measures the cells; `Joining` writes their rows."""
    settings = argparse.Namespace(
        model="tiny" if options.small else "8b", layers=None, stages=1, data=1, objective="sft",
        set=[], xla=[], layers_per_stage=None, no_profile=True, trace=0, capacity=256 if options.small else 8192,
        batch=1, adapters=1, slots=20, baseline_slots=20, out=options.out,
    )  # fmt: skip
    bench = Joining(settings)
    bench.file = options.out / "joining.jsonl"
    alone: set[Cell] = set()
    cells = SMALL_CELLS if options.small else CELLS
    for cell in cells if options.cells is None else [cells[number] for number in options.cells]:
        bench.cell, settings.batch = cell, cell.batch
        for name in WAYS:
            if time.monotonic() > stop:
                return
            settings.adapters = cell.adapters if VARIANTS[name].together else 1
            if settings.adapters == 1:
                if (one := cell._replace(adapters=1)) in alone:  # whatever their number
                    continue
                alone.add(one)
            try:
                bench.run(name, "mix")
            except Exception as problem:
                bench.write({"variant": name, "error": f"{type(problem).__name__}: {problem}"[:2000]})
    yield from ()


def rl(options: argparse.Namespace, stop: float) -> Iterator[dict[str, Any]]:
    """Trains adapters that sample their rows: together, and one of them alone, which stands for each."""
    prompt, group, prompts, new, steps = (16, 4, 2, 8, 3) if options.small else (256, 16, 4, 512, 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = random_base(options.base or folder / "base", small=options.small)
        (folder / "reward.py").write_text(REWARD)
        draw = np.random.default_rng(0)
        words = ["".join(map(chr, row)) for row in draw.integers(97, 122, (prompts * steps, prompt))]
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
        for adapters in (4, 1):
            if time.monotonic() > stop:
                return
            entry = {
                "objective": "grpo",
                "rollout": {
                    "prompts": "prompts.jsonl", "reward": "reward.py:reward", "group": group, "max_tokens": new,
                    "lag": 1,
                },
                "batch": {"global_samples": group * prompts},
                "epochs": 1,
            }  # fmt: skip
            entries = [{"name": f"a{number}", "seed": number, **entry} for number in range(adapters)]
            yield {"adapters": adapters, "answers": group * prompts, "prompt": prompt, "new": new} | _rl_run(
                folder, base, entries, prompt + new + 64, options.small
            )


def _rl_run(folder: Path, base: Path, entries: list[dict], longest: int, small: bool) -> dict[str, Any]:
    capacity = 256 if small else 8192
    job = {
        "base": {"model": str(base), "dtype": "float32" if small else "bfloat16"},
        "data": {"max_length": min(longest, capacity)},
        "batch": {"capacity_tokens": capacity, "tile_tokens": 16 if small else 128},
        "lora": {"rank": 16},
        "save": {"every_minutes": None},
        "train": {"log_every_s": 0},
        "adapters": entries,
    }
    run = _train(job, folder / f"run-{len(entries)}")
    rows = list(read_rows(run.folder / "metrics.jsonl"))
    steps = [row for row in rows if row["kind"] == "step"]
    last, measured = max(row["step"] for row in steps), [row for row in steps if row["step"] > 1]
    first, end = (max(row["time"] for row in steps if row["step"] == step) for step in (1, last))

    def sampled_s(until: float) -> float:
        pauses = [row["paused_s"] for row in rows if row["kind"] == "slot" and row["time"] <= until]
        return max((pause.get(SAMPLING, 0.0) for pause in pauses if pause), default=0.0)

    return {
        "step_s": round((end - first) / (last - 1), 3),
        "sampling_s": round((sampled_s(float("inf")) - sampled_s(first)) / (last - 1), 3),
        "mean_answer_tokens": round(sum(row["answer_tokens"] for row in measured) / len(measured), 1),
        "reward": round(sum(row["reward"] for row in measured) / len(measured), 3),
        "lag": max(row["lag"] for row in steps),
    }


def search(options: argparse.Namespace, stop: float) -> Iterator[dict[str, Any]]:
    """Trains 64 points of one data set: with halving, without, and with halving on a base in fp8. Writes its rows."""
    rates, ranks, batches = (["1e-4", "2e-4", "4e-4", "8e-4"], [4, 8, 16, 32], [1, 4, 8, 16])
    if options.small:
        rates, ranks, batches = rates[:2], [2], [4, 8]
    rows, tokens = (32, 16) if options.small else (32, 270)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = random_base(options.base or folder / "base", small=options.small)
        vocab = (SMALL if options.small else SHAPE)["vocab_size"]
        draw = np.random.default_rng(0)
        lengths = draw.lognormal(np.log(tokens) - 0.2, 0.62, rows + 4).clip(8, 4 * tokens).astype(int)
        data = [json.dumps({"input_ids": draw.integers(300, vocab, length).tolist()}) for length in lengths]
        (folder / "train.jsonl").write_text("\n".join(data[:rows]))
        (folder / "eval.jsonl").write_text("\n".join(data[rows:]))
        for halving, quantize in (SEARCHES[name] for name in options.searches):
            if time.monotonic() > stop:
                return
            job = {
                "base": {"model": str(base), "dtype": "float32" if options.small else "bfloat16", "quantize": quantize},
                "data": {"max_length": 4 * tokens, "train": "train.jsonl", "eval": "eval.jsonl"},
                "batch": {
                    "capacity_tokens": [64, 256] if options.small else [2048, 8192],
                    "tile_tokens": 16 if options.small else 128, "global_samples": batches,
                },
                "lora": {"rank": ranks},
                "optim": {"lr": rates},
                "halving": {"first_share": 0.125, "factor": 2} if halving else {},
                "save": {"every_minutes": None},
                "train": {"log_every_s": 1},  # says what evaluations took
                "adapters": [{"name": "point"}],
            }  # fmt: skip
            points = {"points": len(rates) * len(ranks) * len(batches), "halving": halving, "quantize": quantize}

            def tell(row: dict[str, Any], points: dict[str, Any] = points) -> None:
                add_row(options.out / "joining.jsonl", {"part": "search"} | points | row | conditions())

            _search_run(job, folder / f"search-{halving}-{quantize}", tell, stop)
    yield from ()


def _search_run(job: dict[str, Any], folder: Path, tell: Callable[[dict[str, Any]], None], stop: float) -> None:
    planned = lf.plan(_written(job, folder)).numbers
    predicted = planned.get("predicted") or {}  # without stops: an upper bound where points are halved
    seconds = {key: round(predicted.get(key) or 0.0, 1) for key in ("seconds", "evaluation_s")}
    shown = {**seconds, "evaluations": predicted.get("evaluations")}
    print(f"{folder.name}: predicted {shown}, without start-up", flush=True)
    tell({"phase": "planned", "predicted": shown, "slots": planned["slots"], "tokens": planned["tokens"]})
    try:
        with suppress(SearchEnded):
            _train(job, folder, progress=SearchWatch(tell, stop, sum(seconds.values())))
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the adapters of all points; a checkpoint of the next run needs room
    gc.collect()  # and that run needs the memory


class SearchEnded(BaseException):
    """All points of a search are trained, or its budget is spent. What would follow is a save of them all."""


class SearchWatch:
    """Listens to a search: tells a row as each phase ends, and ends the run.

    Args:
        predicted_s: of all slots and evaluations.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None], stop: float, predicted_s: float):
        self._tell, self._stop, self._predicted_s = tell, stop, predicted_s
        self._began, self._first_s, self._shown_s = time.perf_counter(), 0.0, 0.0
        self._steps_of: dict[str, int] = {}  # of each point, as they are planned or stopped early
        self._taken: dict[str, int] = {}
        self._evaluations, self._evaluation_s, self._slots, self._early = 0, 0.0, 0, 0
        self._has_ended = False

    def __call__(self, event: RunEvent) -> None:
        if self._has_ended:
            return
        if isinstance(event, RunStarted):
            self._steps_of = dict(event.adapters)
        elif isinstance(event, SlotDone):
            self._evaluation_s = event.paused_s.get(EVALUATING, self._evaluation_s)
        elif isinstance(event, AdapterEvaluated):
            self._evaluations += 1
        elif isinstance(event, AdapterChanged) and event.action == "stop":
            self._steps_of[event.adapter], self._early = event.num_steps, self._early + 1
        elif isinstance(event, StepTaken):
            self._take(event)
        self._slots = max(self._slots, event.slot)
        if self._taken and all(self._taken.get(name, 0) >= steps for name, steps in self._steps_of.items()):
            self._end({"phase": "trained"})
        elif self._steps_of and time.monotonic() > self._stop:
            share = sum(self._taken.values()) / sum(self._steps_of.values())
            self._end({"phase": "cut", "left_predicted_s": round((1 - share) * self._predicted_s, 1)})

    def _take(self, event: StepTaken) -> None:
        now_s = time.perf_counter() - self._began
        if not self._taken:
            self._first_s = now_s
            self._tell({"phase": "started", "seconds": round(now_s, 1)})
        self._taken[event.adapter] = event.step
        if now_s - self._shown_s > SHOWN_EVERY_S:
            self._shown_s = now_s
            print(f"{now_s:.0f} s: {sum(self._taken.values())} of {sum(self._steps_of.values())} steps", flush=True)

    def _end(self, row: dict[str, Any]) -> None:
        """Tells what was done, and ends the run.

        Raises:
            SearchEnded: always.
        """
        self._has_ended = True
        seconds = time.perf_counter() - self._began
        done = sum(self._taken.get(name, 0) >= steps for name, steps in self._steps_of.items())
        self._tell(
            row
            | {
                "seconds": round(seconds, 1),
                "from_first_step_s": round(seconds - self._first_s, 1) if self._taken else 0.0,
                "evaluation_s": round(self._evaluation_s, 1),
                "evaluations": self._evaluations,
                "slots_done": self._slots,
                "points_done": done,
                "ended_early": self._early,
                "steps_done": sum(self._taken.values()),
                "steps": sum(self._steps_of.values()),
            }
        )
        raise SearchEnded


def _train(job: dict[str, Any], folder: Path, *, progress: SearchWatch | bool = False) -> lf.Run:
    run = lf.train(lf.load_job(_written(job, folder)), folder, progress=progress)
    gc.collect()  # the next run needs the memory
    return run


def _written(job: dict[str, Any], folder: Path) -> Path:
    path = folder.parent / "job.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML
    return path


if __name__ == "__main__":
    raise SystemExit(main())
