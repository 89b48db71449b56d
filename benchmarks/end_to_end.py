"""Whole training runs at real size on random weights: ours and every baseline, in one process.

    python -m benchmarks.end_to_end --model 8b --workloads xsum cnn wiki mix het --out results   # one GPU
    python -m benchmarks.end_to_end --model 32b --stages 2 --out results                         # two
    python -m benchmarks.end_to_end --model 70b --stages 4 --capacity 6144 --batch 16 --out results
    python -m benchmarks.end_to_end --model qwen3-235b-a22b --stages 8 --workloads mix --variants ours_fp8 --out results
    python -m benchmarks.end_to_end --model tiny --stages 2 --out /tmp/try                       # a trial on a CPU

Random tokens with the length distributions of five workloads, four adapters (r 16, alpha 32, dropout 0.1), real loss
and optimizer steps, the product's own training loop. Useful tokens/s counts real tokens between the end of the warm-up
and the end of the last slot, including the drain. Writes one JSON line with conditions and the measured timeline per
run; at the end a table, a plot and traces for ui.perfetto.dev of all rows in the folder (`end_to_end_report.py`).

sm_mhz and watts are mean clock and power of each device, if `nvidia-smi` is available. host_wait_s is, per stage, the
time in which a microbatch was ready and the host was late. peak_gb is null if an earlier variant needed more memory,
because a process has a single peak.

`--objective dpo` trains pairs of these samples instead (dropout 0, references given, as in `peers/trl_dpo.py`).

Variants (all rows are reported, even if a baseline wins):
    ours            all adapters together, bin packed, our kernels, 1F1B without flush
    ours_xla        the same with the XLA form of LoRA
    ours_sizes      ours, and each microbatch takes the smallest of four sizes that holds it
    ours_fp8, ours_int8, ours_nf4    ours on a base that is stored in these forms; frozen_fp8 is the floor of the first
    single_xla      one adapter after another, XLA LoRA
    single          the same with our kernels
    single_sizes    the same, and each microbatch takes the smallest of four sizes that holds it
    single_short    the same, of sizes down to 1/32 of `--capacity`, as small batches of short rows need
    fsdp_xla        one adapter after another, base sharded over all GPUs, each a replica, XLA LoRA
    fsdp            the same with our kernels
    flush           one adapter after another in a pipeline that is flushed at every step
    mlora           all adapters, one batch of each in turn, packed separately, our kernels
    frozen          the floor: the slots of `ours` forward and backward through the frozen base, with the same stages
                    and remat policy, without LoRA, adapter gradients and optimizer steps
Variants that train one adapter after another, and mlora, use the microbatch size that is fastest in the simulator;
single_sizes and ours_sizes use 3/8, 1/2, 3/4 and all of `--capacity`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.conditions import conditions
from benchmarks.end_to_end_inputs import OTHER_SHAPES, random_base, random_data, random_pairs
from benchmarks.end_to_end_report import report
from benchmarks.frozen import FrozenStage, without_lora, without_updates
from benchmarks.gpu_state import GpuState
from benchmarks.harness import add_row, command_line
from benchmarks.workloads import LENGTHS, LONGEST, SHAPES, WORKLOADS, pair_lengths, sample_lengths
from lorafusion_jax.config.schema import (
    AdapterConfig,
    BaseSettings,
    BatchSettings,
    DataSettings,
    JobConfig,
    LoraSettings,
    MeshSettings,
    ObjectiveSettings,
    OptimSettings,
    SaveSettings,
    TrainSettings,
)
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.data.prepare import AdapterData, Prepared
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.planning.blocks import block_layers
from lorafusion_jax.planning.memory import memory_problem, stage_memory
from lorafusion_jax.planning.prediction import predicted_costs
from lorafusion_jax.session.assembler import Batches
from lorafusion_jax.session.base import fitting_remat
from lorafusion_jax.session.dry_runs import time_passes
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.mesh import StageMesh
from lorafusion_jax.session.move import to_stage
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.profile import profile_stages
from lorafusion_jax.session.session import Session
from lorafusion_jax.session.spans import Spans
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.stage_weights import StageWeights
from lorafusion_jax.session.task import tasks_of
from lorafusion_jax.training.hooks import Hooks
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.loop import PlanRun
from lorafusion_jax.training.state import AdapterProgress, Progress
from lorafusion_jax.weights.table import NONE
from scheduling import AdapterJob, Plan, make_plan, simulate
from scheduling.baselines import batch_by_batch, one_after_another
from scheduling.comparison import host_wait_s
from scheduling.pipeline import Program, one_forward_one_backward

SIZES = {"sizes": (0.375, 0.5, 0.75, 1.0), "short": (1 / 32, 1 / 8, 0.375, 1.0)}  # of the capacity, by plan
MODELS = SHAPES | OTHER_SHAPES
CAPACITIES = (2048, 3072, 4096, 4608, 5120, 5632, 6144, 7168, 8192)


class Variant(NamedTuple):
    """One way to run the jobs."""

    together: bool
    implementation: str | None
    plan: str  # ours, single, sizes, short, mlora
    flush: bool = False
    fsdp: bool = False
    frozen: bool = False
    quantize: str = NONE


VARIANTS = {
    "ours": Variant(True, None, "ours"),
    "ours_xla": Variant(True, "xla", "ours"),
    "ours_fp8": Variant(True, None, "ours", quantize="fp8"),
    "ours_int8": Variant(True, None, "ours", quantize="int8"),
    "ours_nf4": Variant(True, None, "ours", quantize="nf4"),
    "frozen_fp8": Variant(True, None, "ours", frozen=True, quantize="fp8"),
    "ours_sizes": Variant(True, None, "sizes"),
    "single_xla": Variant(False, "xla", "single"),
    "single": Variant(False, None, "single"),
    "single_sizes": Variant(False, None, "sizes"),
    "single_short": Variant(False, None, "short"),
    "fsdp_xla": Variant(False, "xla", "single", fsdp=True),
    "fsdp": Variant(False, None, "single", fsdp=True),
    "flush": Variant(False, "xla", "single", flush=True),
    "mlora": Variant(True, None, "mlora"),
    "frozen": Variant(True, None, "ours", frozen=True),
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to try")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8, help="samples of an adapter's global batch")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--slots", type=int, default=100, help="minimum slots after the warm-up, for joint variants")
    parser.add_argument("--baseline-slots", type=int, help="of the others; default as --slots")
    parser.add_argument("--objective", choices=("sft", "dpo"), default="sft", help="dpo: pairs of samples, no dropout")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["mix"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["ours", "single_xla"])
    parser.add_argument("--set", nargs="*", default=[], help="train settings, e.g. block_layers=2 remat=gemm_inputs")
    parser.add_argument("--xla", nargs="*", default=[], help="XLA flags, e.g. gpu_enable_latency_hiding_scheduler=true")
    parser.add_argument("--layers-per-stage", type=float, nargs="+", help="default by cost")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--trace", type=int, default=0, help="slots to trace: device time by kernel")
    parser.add_argument("--until", type=float, help="seconds after which no further run starts")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    flags = [f"--xla_{flag}" for flag in options.xla]  # jax reads them when it first looks for devices
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
    if options.model != "tiny":
        prepare_machine()
    bench = Bench(options)
    for name in options.variants:  # weights are drawn once per layout, programs compile once per variant
        for workload in options.workloads:
            if options.until and time.perf_counter() - bench.began > options.until:
                print(f"no time left for {name} {workload}", flush=True)
                continue
            try:
                bench.run(name, workload)
            except Exception as problem:  # the other variants go on
                bench.write(
                    {"variant": name, "workload": workload, "error": f"{type(problem).__name__}: {problem}"[:2000]}
                )
    if bench.file.exists():  # at least one variant ran
        report(bench.file, options.out, options.out)


class Bench:
    """Caches weights and compiled stages between runs."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.began = options, time.perf_counter()
        self.conditions = conditions() | {"run": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"}  # rows of one process
        self.file = options.out / "end_to_end.jsonl"
        shape = MODELS[options.model]
        fewer = {"num_layers": options.layers} if options.layers else {}
        if options.layers and "pattern" in shape:
            fewer["pattern"] = shape["pattern"][: options.layers]
        self.model = ModelConfig(**(shape | fewer))
        self.dtype = jnp.float32 if options.model == "tiny" else jnp.bfloat16
        self.tile = 16 if options.model == "tiny" else 128
        self.layers = tuple(options.layers_per_stage) if options.layers_per_stage else None
        self.pairs: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}  # by the lengths of an adapter's samples
        self._layout: tuple | None = None
        self._weights: list[tuple[StageWeights, StageMesh]] = []
        self._stages: tuple[Any, list[Stage]] | None = None

    def run(self, name: str, workload: str) -> None:
        options, variant = self.options, VARIANTS[name]
        devices = options.stages * options.data
        mesh = (
            MeshSettings(stages=1, fsdp=devices)
            if variant.fsdp
            else MeshSettings(stages=options.stages, data=options.data, layers=self.layers)
        )
        wanted = options.slots if variant.together else options.baseline_slots or options.slots
        before = peaks(devices)
        jobs, capacity, plans = self.planned(variant, workload, mesh, wanted)
        config = self.config(variant, mesh, capacity, 1 if not variant.together else options.adapters)
        stages = self.stages(config, frozen=variant.frozen)
        with GpuState() as state:
            results = [
                self.once(variant, config, stages, own_jobs, plan) for own_jobs, plan in zip(jobs, plans, strict=True)
            ]
        settled = config.model_copy(update={"train": config.train.model_copy(update={"remat": stages[0].remat})})
        seconds, tokens = sum(r["seconds"] for r in results), sum(r["tokens"] for r in results)
        row = {
            "variant": name, "workload": workload, "model": options.model, "layers": self.model.num_layers,
            "mesh": mesh.model_dump(include={"stages", "data", "fsdp"}),
            "layers_per_stage": [stage.extent.count for stage in stages],
            "capacity_tokens": capacity, "sizes": sizes_used(plans),
            "global_batch": options.batch, "adapters": options.adapters,
            "objective": options.objective,
            "quantize": variant.quantize, "keep": stages[0].remat, "settings": [*options.set, *options.xla],
            "useful_tokens_per_s": round(tokens / seconds, 1), "slots": sum(r["slots"] for r in results),
            "density": round(sum(p.tokens for p in plans) / sum(p.room for p in plans), 4),
            "noops": sum(p.num_noops for p in plans), "seconds": round(seconds, 3),
            "compile_s": round(sum(r["compile_s"] for r in results), 1), "peak_gb": grown(before, peaks(devices)),
            "predicted_gb": [
                round(stage.total / 1e9, 2) for stage in stage_memory(memory_problem(settled, self.model))
            ],
        }  # fmt: skip
        measured = ("slot_s", "bubbles", "host_s_per_slot", "simulated_over_measured")
        row |= {key: results[0][key] for key in measured if key in results[0]}
        row["host_wait_s"] = [round(sum(waits), 5) for waits in zip(*(r["host_wait_s"] for r in results), strict=True)]
        row |= state.means([r["window"] for r in results], devices)
        self.write(row)
        if variant.together:
            (options.out / f"timeline_{options.model}_{name}_{workload}.json").write_text(
                results[0]["timeline"].to_json()
            )

    def write(self, row: dict) -> None:
        add_row(self.file, row | self.conditions)

    def planned(self, variant: Variant, workload: str, mesh: MeshSettings, slots: int):
        """Jobs of each run, the capacity, and their plans."""
        options, runs = self.options, self.jobs(variant, workload, mesh, slots)
        capacity: int | tuple[int, ...] = options.capacity
        if variant.plan in SIZES:
            capacity = tuple(round(share * options.capacity) for share in SIZES[variant.plan])
        elif variant.plan != "ours" and options.model != "tiny":
            capacity = self.best_capacity(variant, runs, mesh)
        return runs, capacity, [self.plan(variant, run, capacity, mesh) for run in runs]

    def jobs(self, variant: Variant, workload: str, mesh: MeshSettings, slots: int) -> list[list[AdapterJob]]:
        """Jobs of each run, for at least so many timed slots."""
        options, longest = self.options, LONGEST if self.options.model != "tiny" else 96
        scale = 1 if options.model != "tiny" else 0.05
        # Microbatches are 98 % full and some are warm-up, so plan enough that at least `slots` are timed.
        tokens = (1.05 * slots + 4 * mesh.stages) * options.capacity * mesh.replicas
        mean = {"mix": 1130, "het": 1130}.get(workload) or LENGTHS[workload][0]
        texts = 2 if options.objective == "dpo" else 1
        batches = max(2, round(tokens / (mean * texts * scale * options.batch * options.adapters)))
        draw = np.random.default_rng(WORKLOADS.index(workload))
        jobs, count = [], batches * options.batch * texts
        for i in range(options.adapters):
            lengths = sample_lengths(draw, workload, i, count, scale, longest)
            if options.objective == "dpo":
                pairs = pair_lengths(lengths)
                lengths = [2 * prompt + chosen + rejected for prompt, chosen, rejected in pairs]
                self.pairs[tuple(lengths)] = pairs
            jobs.append(AdapterJob(f"a{i}", lengths, options.batch))
        # Every adapter by itself uses the programs of the first one.
        return [jobs] if variant.together else [[dataclasses.replace(job, name=jobs[0].name)] for job in jobs]

    def plan(
        self, variant: Variant, jobs: Sequence[AdapterJob], capacity: int | tuple[int, ...], mesh: MeshSettings
    ) -> Plan:
        limits: dict[str, Any] = {
            "capacity_tokens": capacity, "num_stages": mesh.stages, "data_parallel": mesh.replicas,
            "tile_tokens": self.tile,
        }  # fmt: skip
        if variant.plan == "ours":
            return make_plan(jobs, time_limit_s=5.0, seed=0, **limits)
        if variant.plan in SIZES:
            costs = predicted_costs(self.config(variant, mesh, capacity, len(jobs)), self.model, "h200")
            return make_plan(jobs, time_limit_s=5.0, seed=0, cost_model=costs, **limits)
        return (one_after_another if variant.plan == "single" else batch_by_batch)(jobs, **limits)

    def best_capacity(self, variant: Variant, runs: Sequence[Sequence[AdapterJob]], mesh: MeshSettings) -> int:
        """The capacity that a user would choose: most tokens/s in `plan`, without recomputed products."""
        longest = max(max(job.sample_tokens) for run in runs for job in run)
        possible = [capacity for capacity in CAPACITIES if longest <= capacity <= self.options.capacity]
        configs = {capacity: self.config(variant, mesh, capacity, len(runs[0])) for capacity in possible}
        roomy = [c for c in possible if fitting_remat(configs[c], self.model) != "nothing"]

        def seconds(capacity: int) -> float:
            costs = predicted_costs(configs[capacity], self.model, "h200")
            plans = [self.plan(variant, run, capacity, mesh) for run in runs]
            return sum(simulate(plan, costs, program=program_of(variant, plan)).duration_s for plan in plans)

        return min(roomy or possible, key=seconds)

    def config(self, variant: Variant, mesh: MeshSettings, capacity: int | tuple[int, ...], adapters: int) -> JobConfig:
        settings = dict(pair.split("=") for pair in self.options.set)
        return JobConfig(
            base=BaseSettings(
                model="random", dtype="float32" if self.dtype == jnp.float32 else "bfloat16", quantize=variant.quantize
            ),
            adapters=tuple(
                AdapterConfig(
                    name=f"a{i}", data=DataSettings(train="random"), global_samples=self.options.batch,
                    lora=LoraSettings(rank=16, alpha=32, dropout=0.1 if self.options.objective == "sft" else 0.0),
                    optim=OptimSettings(lr=1e-4), seed=i, objective=ObjectiveSettings(name=self.options.objective),
                )
                for i in range(adapters)
            ),
            batch=BatchSettings(capacity_tokens=capacity, tile_tokens=self.tile, global_samples=self.options.batch),
            mesh=mesh,
            save=SaveSettings(every_minutes=None),
            train=TrainSettings(**({"implementation": variant.implementation} | settings)),
        )  # fmt: skip

    def stages(self, config: JobConfig, *, frozen: bool = False) -> list[Stage]:
        """Compiled stages of a configuration, or only of its base; weights are reused for the same layout."""
        key = (config.model_dump_json(), frozen)
        if self._stages is not None and self._stages[0] == key:
            return self._stages[1]
        self._stages = None
        mesh = config.mesh
        layout = (mesh.stages, mesh.data, mesh.fsdp, tuple(mesh.layers or ()), config.base.quantize)
        if self._layout != layout:
            self._weights = []
            self._weights, self._layout = random_base(config, self.model, self.dtype), layout
        remat = fitting_remat(config, self.model) if config.train.remat == "auto" else config.train.remat
        specs = tuple(adapter_specs(config))
        parts = Parts(
            model=self.model, specs=without_lora(specs) if frozen else specs, settings=config.train, dtype=self.dtype,
            quantize=config.base.quantize, objectives=tuple(adapter.objective.chosen for adapter in config.adapters),
        )  # fmt: skip
        stages = [
            (FrozenStage if frozen else Stage)(
                parts, extent, mesh, config.adapters, remat=remat,
                block=block_layers(
                    config.train.block_layers,
                    len(extent.pieces),
                    fsdp=mesh.fsdp,
                    parameters=self.model.layer(0).num_parameters,
                ),
            )
            for extent, mesh in self._weights
        ]  # fmt: skip
        self._stages = (key, stages)
        return stages

    def once(
        self, variant: Variant, config: JobConfig, stages: list[Stage], jobs: Sequence[AdapterJob], plan: Plan
    ) -> dict:
        """One timed run of the product's loop over a plan."""
        data = {job.name: self.data(job, seed) for seed, job in enumerate(jobs)}
        prepared = Prepared(tokenizer=None, adapters=data)  # type: ignore[arg-type]
        lora = stages[0].first_lora()
        for stage in stages:
            stage.start(lora)
        batches = Batches.of_job(config, prepared, plan, range(plan.data_parallel))
        result: dict[str, Any] = {}
        compiled: list[float] = []
        costs = None
        if variant.together and not variant.frozen and not self.options.no_profile:
            Executor(stages).warm_up(batches.empty())
            costs = profile_stages(stages, batches.loads(), repeats=2)
            for stage in stages:
                stage.start(lora)
        spans, began = Spans(len(stages)), time.time()
        progress = Progress(
            adapters={job.name: AdapterProgress(name=job.name, num_steps=job.num_batches) for job in jobs}
        )
        program = program_of(variant, plan)
        session = Session(config, stages, tasks_of(config, prepared, progress.adapters), spans=spans)

        def listen(event: Any) -> None:
            if event.kind == "compiled":
                compiled.append(event.seconds)

        if variant.together and self.options.trace:
            self.trace(batches, stages)
            for stage in stages:
                stage.start(lora)
        nothing = Hooks(save=lambda wait: None, evaluate=lambda *_: None, finish=lambda *_: None)
        job = Job(config=config, prepared=prepared, plan=plan)
        PlanRun(job, session, progress, listen, nothing, program).run()
        timeline = spans.close(plan)
        if variant.frozen and not np.isfinite(np.asarray(stages[-1].totals["loss"])).all():  # no step checks it
            raise FloatingPointError("the loss of the frozen base is not finite")
        measured = timeline.spans
        tokens = (
            [sum(jobs_of[ref.adapter][ref.sample] for ref in slot.samples) for slot in plan.slots]
            if (jobs_of := {job.name: job.sample_tokens for job in jobs})
            else []
        )
        ends = {span.slot: span.end_s for span in measured if span.kind == "backward" and span.stage == 0}
        order = sorted(ends)
        warm = min(max(2 * len(stages), 5), len(order) // 2)
        first, last = order[warm - 1], order[-1]
        seconds = ends[last] - ends[first]
        steady = [ends[b] - ends[a] for a, b in zip(order[warm:-1], order[warm + 1 :], strict=True)]
        result |= {
            "seconds": seconds,
            "window": (began + ends[first], began + ends[last]),
            "tokens": sum(tokens[slot] for slot in order if slot > first),
            "slots": len(order) - warm,
            "compile_s": sum(compiled),
            "slot_s": round(statistics.median(steady), 5) if steady else None,
            "bubbles": [round(share, 4) for share in timeline.bubble_shares],
            "host_s_per_slot": round(sum(span.end_s - span.start_s for span in timeline.host) / max(len(order), 1), 5),
            "host_wait_s": host_wait_s(timeline, range(first + 1, last + 1)),
            "timeline": timeline.of_slots(range(60)),
        }
        if costs is not None:
            predicted = simulate(plan, costs, program=program)
            result["simulated_over_measured"] = round(predicted.duration_s / timeline.duration_s, 4)
        return result

    def data(self, job: AdapterJob, seed: int) -> AdapterData:
        """Random tokens of a job's samples."""
        if self.options.objective == "dpo":
            return random_pairs(self.pairs[tuple(job.sample_tokens)], self.model.vocab_size, seed)
        return random_data(job, self.model.vocab_size, seed)

    def trace(self, batches: Batches, stages: list[Stage]) -> None:
        """Sums device time by kernel over a few slots, stage by stage."""
        loads = [batches.of(slot) for slot in range(self.options.trace)]
        with tempfile.TemporaryDirectory() as folder:
            for stage in stages:
                time_passes(stage, to_stage(loads[0], stage.mesh))
            with jax.profiler.trace(folder):
                for load in loads:
                    for stage in stages:
                        time_passes(stage, to_stage(load, stage.mesh))
            rows = kernel_times(Path(folder))
        self.write({"trace": self.options.model, "slots": len(loads), "kernels": rows})


def sizes_used(plans: Sequence[Plan]) -> dict[int, int]:
    """Number of slots of each capacity."""
    return dict(sorted(Counter(size for plan in plans for size in plan.slot_capacities).items()))


def program_of(variant: Variant, plan: Plan) -> Program | None:
    """The variant's own order of events; None for the default."""
    if variant.frozen:
        return without_updates(one_forward_one_backward(plan))
    return one_forward_one_backward(plan, flush=True) if variant.flush else None


def peaks(devices: int) -> list[float]:
    """Peak memory of each device since the start of the process, GB."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()[:devices]]
    return [round(device_stats.get("peak_bytes_in_use", 0) / 1e9, 2) for device_stats in stats]


def grown(before: Sequence[float], after: Sequence[float]) -> list[float | None] | None:
    """Peaks of a variant; None if an earlier variant of the process needed more."""
    new_peaks = [peak if peak > earlier else None for earlier, peak in zip(before, after, strict=True)]
    return new_peaks if any(new_peaks) else None


def kernel_times(folder: Path) -> list[tuple[str, int, float]]:
    """(kernel, calls, milliseconds) of all device streams, most expensive first."""
    (file,) = folder.rglob("*.trace.json.gz")
    events = [e for e in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] if "pid" in e]
    lanes = {
        (e["pid"], e.get("tid")): e["args"]["name"] for e in events if e.get("name") in ("process_name", "thread_name")
    }
    total: dict[str, list[float]] = {}
    for event in events:
        process, thread = lanes.get((event["pid"], None), ""), lanes.get((event["pid"], event.get("tid")), "")
        if event.get("ph") == "X" and "Stream" in thread and "gpu" in (process or "gpu").lower():
            entry = total.setdefault(event["name"][:110], [0, 0.0])
            entry[0] += 1
            entry[1] += event["dur"] / 1e3
    ranked = sorted(total.items(), key=lambda item: -item[1][1])
    return [(name, int(calls), round(ms, 3)) for name, (calls, ms) in ranked[:200]]


if __name__ == "__main__":
    main()
