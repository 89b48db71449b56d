"""Do jobs that come and go on a real GPU end when the online simulator says?

    python -m benchmarks.online_real --out results          # one H200 or H100 (80 GiB), 160 s with its start
    python -m benchmarks.online_real --small --out /tmp/x   # a tiny model on a CPU: tries the mechanics
    python -m benchmarks.online_real --again results --out /tmp/x   # predicts again, for timelines of an earlier run

Two scenarios of five unequal jobs that arrive over time, on one GPU and a part of Llama-3.1-8B's layers with random
weights. The online policy decides in its simulator who trains when. `replan` makes one plan of these decisions, and the
product's own training loop trains it, with a drained pipeline wherever jobs join or leave. Written for every job are
its completion time (from its arrival to its last step) and the errors of three predictions:

    simulated   by the online simulator: the rates of groups at the costs that `lorafusion plan` takes for this job,
                nothing measured. A session's programs have its largest rank, so these costs know the ranks.
    planned     by playing the plan at the same costs
    profiled    by playing the plan at costs that were measured in this process before the run

Arrivals are slots of the plan: those that it reaches at the arrival's time at those costs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import jax.numpy as jnp

from benchmarks.conditions import conditions
from benchmarks.csv_rows import append_row
from benchmarks.end_to_end_inputs import random_base, random_data
from benchmarks.online_real_plan import SCENARIOS, Change, draw_jobs, planned, simulated, slot_at, time_of
from benchmarks.workloads import SHAPES
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.schema import (
    AdapterConfig,
    BaseSettings,
    BatchSettings,
    DataSettings,
    JobConfig,
    LoraSettings,
    OptimSettings,
    SaveSettings,
    TrainSettings,
)
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.planning.auto import device_for_rates
from lorafusion_jax.planning.prediction import DEVICES, memory_of, predicted_costs
from lorafusion_jax.session.base import fitting_remat
from lorafusion_jax.session.batches import Batches
from lorafusion_jax.session.mesh import StageMesh
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.profile import profile_stages
from lorafusion_jax.session.session import Session
from lorafusion_jax.session.spans import Spans
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.stage_weights import StageWeights
from lorafusion_jax.session.task import tasks_of
from lorafusion_jax.training import changes as training
from lorafusion_jax.training.hooks import Hooks
from lorafusion_jax.training.job import Job as Training
from lorafusion_jax.training.loop import PlanRun
from lorafusion_jax.training.state import Progress
from pallas_kernels.device import device_kind
from scheduling import CostModel, Plan, Timeline, simulate
from scheduling.online import ClusterResult, Job, Worker
from scheduling.online.facts import GIB

DROPOUT = 0.1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of the 32 of Llama-3.1-8B")
    parser.add_argument("--device", choices=DEVICES, help="whose default costs predict (default: the attached one)")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=[*SCENARIOS])
    parser.add_argument("--again", type=Path, help="folder with timelines of an earlier run, which are not run again")
    parser.add_argument("--small", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--out", type=Path, help="default: a folder of benchmarks/results")
    options = parser.parse_args(arguments)
    if not options.small:
        prepare_machine()
    Real(options).run()


class Real:
    """Both scenarios on one set of frozen weights; equal adapters share their programs."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.began = options, time.perf_counter()
        self.device: str = options.device or device_for_rates(device_kind())
        self.worker = Worker("host0", 1, memory_gib=memory_gib(self.device), device=self.device)
        shape = SHAPES["tiny"] | {"num_layers": 1} if options.small else SHAPES["8b"] | {"num_layers": options.layers}
        self.model = ModelConfig(**shape)
        self.dtype = jnp.float32 if options.small else jnp.bfloat16
        self.capacity, self.tile = (512, 16) if options.small else (8192, 128)
        measured_on = conditions()
        name = f"online_real_{self.device}_{measured_on['date']}"
        self.out: Path = options.out or Path(__file__).parent / "results" / name
        self.out.mkdir(parents=True, exist_ok=True)
        asked = {name: str(value) for name, value in vars(options).items() if name != "out"}
        what = {"device": self.device, "card": measured_on["device"], "memory_gib": self.worker.memory_gib}
        what |= {"layers": self.model.num_layers, "capacity_tokens": self.capacity, "dropout": DROPOUT}
        (self.out / "conditions.json").write_text(json.dumps(measured_on | asked | what, indent=1) + "\n")
        self._base: list[tuple[StageWeights, StageMesh]] = []
        self._stage: tuple[tuple[AdapterSpec, ...], Stage] | None = None

    def run(self) -> None:
        for scenario in self.options.scenarios:
            try:
                self.scenario(scenario)
            except Exception as problem:  # the other scenario goes on
                self.say(f"{scenario} failed: {type(problem).__name__}: {str(problem)[:2000]}")
                if self.options.small:
                    raise

    def scenario(self, name: str) -> None:
        """Simulates, plans, trains and compares one scenario."""
        small = {"scale": 0.05, "shorter": 8.0} if self.options.small else {}
        costs = predicted_costs(self.config(name), self.model, self.device)
        jobs = draw_jobs(name, self.model, costs, self.capacity, **small)
        result, moves = simulated(jobs, self.worker, costs, self.capacity)
        plan, changes = planned(jobs, moves, costs, capacity_tokens=self.capacity, tile_tokens=self.tile)
        self.say(f"{name}: {plan.num_slots} slots, {plan.density:.1%} full, {result.makespan_s:.1f} s simulated")
        for move in moves:
            what = [f"+{job}" for job in move.joins] + [f"-{job}" for job in move.leaves]
            self.say(f"  {move.time_s:8.3f} s  {' '.join(what)}: {move.why}")
        timelines = {"planned": simulate(plan, costs)}
        if self.options.again:
            measured = Timeline.from_json((self.options.again / f"timeline_{name}.json").read_text())
            if dict(measured.slot_adapters) != dict(timelines["planned"].slot_adapters):
                raise ValueError("the timeline is of another plan")
        else:
            measured, profile = self.train(name, jobs, plan, changes)
            timelines["profiled"] = simulate(plan, profile)
        self.compare(name, jobs, result, timelines | {"measured": measured})

    def train(
        self, name: str, jobs: Sequence[Job], plan: Plan, changes: Sequence[Change]
    ) -> tuple[Timeline, CostModel]:
        """Trains the plan with the product's loop. Returns the measured timeline, and costs measured before."""
        config = self.config(name)
        names = [job.name for job in jobs]
        data = {name: random_data(plan.job_of[name], self.model.vocab_size, seed) for seed, name in enumerate(names)}
        prepared = Prepared(tokenizer=None, adapters=data)  # type: ignore[arg-type]
        stage = self.stage(config)
        lora = stage.first_lora()
        stage.start(lora)
        batches = Batches.of_job(config, prepared, plan, range(1))
        spans = Spans(1)
        session = Session(config, [stage], tasks_of(config, prepared), spans=spans)
        session.executor.warm_up(batches.empty())
        self.say(f"  programs are there at {time.perf_counter() - self.began:.1f} s")
        profile = profile_stages([stage], batches.loads(), repeats=3)
        stage.start(lora)
        steps = {name: plan.job_of[name].num_batches for name in names}
        late = {change.job for change in changes if change.action == "add"}
        progress = Progress.first({name: steps[name] for name in names if name not in late}, stage_devices=1, plan="")
        plan_changes = [
            training.Change(slot=c.slot, adapter=c.job, action=c.action, steps=steps[c.job]) for c in changes
        ]

        def take_clocks(*_: object) -> None:
            session.take_data(config, prepared, progress.adapters)

        take_clocks()
        hooks = Hooks(save=lambda wait: None, evaluate=lambda *_: None, finish=lambda *_: None, add=take_clocks)
        job = Training(config=config, prepared=prepared, plan=plan)
        PlanRun(job, session, progress, lambda event: None, hooks, changes=plan_changes).run()
        measured = spans.close(plan)
        (self.out / f"timeline_{name}.json").write_text(measured.to_json())
        ended = {job: progress.adapters[job].status for job in names if job in progress.adapters}
        if ended != dict.fromkeys(names, "done"):
            raise RuntimeError(f"not every job was trained to its end: {ended}")
        return measured, profile

    def config(self, name: str) -> JobConfig:
        small = self.options.small
        most = 16 if small else 256  # every rank compiles a step of its own
        targets = ["down_proj"] if small else "all-linear"
        return JobConfig(
            base=BaseSettings(model="random", dtype="float32" if small else "bfloat16"),
            adapters=tuple(
                AdapterConfig(
                    name=f"j{index}", data=DataSettings(train="random"), global_samples=draw.batch,
                    lora=LoraSettings(rank=min(draw.rank, most), alpha=2 * draw.rank, dropout=DROPOUT, targets=targets),
                    optim=OptimSettings(lr=1e-4), seed=index,
                )
                for index, draw in enumerate(SCENARIOS[name])
            ),
            batch=BatchSettings(capacity_tokens=self.capacity, tile_tokens=self.tile),
            save=SaveSettings(every_minutes=None),
            train=TrainSettings(block_layers=1),  # the programs of a deep model
        )  # fmt: skip

    def stage(self, config: JobConfig) -> Stage:
        specs = tuple(adapter_specs(config))
        if self._stage is None or self._stage[0] != specs:
            if not self._base:
                self._base = random_base(config, self.model, self.dtype)
            ((weights, mesh),) = self._base
            parts = Parts(model=self.model, specs=specs, settings=config.train, dtype=self.dtype)
            remat = fitting_remat(config, self.model)
            self._stage = specs, Stage(parts, weights, mesh, config.adapters, remat=remat, block=1)
        return self._stage[1]

    def compare(self, name: str, jobs: Sequence[Job], result: ClusterResult, timelines: Mapping[str, Timeline]) -> None:
        """Writes a row per job and a row of the whole scenario."""
        rows = []
        for job, of in zip(jobs, SCENARIOS[name], strict=True):
            slot = slot_at(timelines["planned"], job.arrival_s)
            took = {"simulated": result.finish_s[job.name] - job.arrival_s} | {
                source: timeline.finish_s[job.name] - time_of(timeline, slot) for source, timeline in timelines.items()
            }
            rows.append(
                {
                    "scenario": name, "job": job.name, "workload": of.workload, "rank": job.rank,
                    "batch": job.global_batch, "steps": job.steps, "tokens": round(job.tokens),
                    "arrival_s": round(job.arrival_s, 3),
                }
                | _with_errors(took)
            )  # fmt: skip
            append_row(self.out / "jobs.csv", rows[-1])
        lasted = {"simulated": result.makespan_s} | {of: timeline.duration_s for of, timeline in timelines.items()}
        tokens = timelines["measured"].tokens
        whole = {"scenario": name, "slots": len({span.slot for span in timelines["measured"].spans}), "tokens": tokens}
        whole |= {f"{of}_tokens_per_s": round(tokens / seconds) for of, seconds in lasted.items()}
        whole |= {f"makespan_{key}": value for key, value in _with_errors(lasted).items()}
        for of in [*lasted][:-1]:
            errors = [abs(row[f"{of}_error"]) for row in rows]
            whole |= {f"{of}_jobs_mean": round(mean(errors), 4), f"{of}_jobs_worst": round(max(errors), 4)}
        append_row(self.out / "runs.csv", whole)
        for row in (*rows, whole):
            self.say("  " + " ".join(f"{key}={value}" for key, value in row.items()))
        self.say(f"  {time.perf_counter() - self.began:.1f} s of this process")

    def say(self, text: str) -> None:
        print(text, flush=True)
        with (self.out / "log.txt").open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def memory_gib(device: str) -> float:
    """GiB of a device; those of the scheduler's usual worker if its memory is not the limit, as on a CPU."""
    known = memory_of(device)
    return known / GIB if known else Worker("usual", 1).memory_gib


def _with_errors(seconds: Mapping[str, float]) -> dict[str, float]:
    """All seconds, and of each prediction predicted / measured - 1."""
    errors = {f"{of}_error": round(s / seconds["measured"] - 1, 4) for of, s in seconds.items() if of != "measured"}
    return {f"{of}_s": round(value, 4) for of, value in seconds.items()} | errors


if __name__ == "__main__":
    main()
