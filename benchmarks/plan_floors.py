"""Are plans ever longer than simple rules and other systems' orders make them?

    python -m benchmarks.plan_floors --jobs 16 --out benchmarks/results/plan_floors_DATE

Each seed draws an instance: 1 to 64 adapters with batches of 1 to 512 samples, equal or mixed; eight shapes of lengths;
1 to 16 stages, 1 to 4 replicas, capacities of 1024 to 8192 tokens or barely above the longest sample; sometimes one
huge adapter with many small ones. A row has the slots of the plan at the default effort, the bound, and the slots of

* the list rule: in every slot jobs in order of the longest chain left, each with its rest or first-fit decreasing;
* LoRAFusion's order: pairs of adapters whose lengths differ most, batch by batch, each pair packed by itself;
* mLoRA's order: a batch of each adapter in turn, each packed by itself.

All but the seconds is counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import zip_longest
from multiprocessing import get_context

import numpy as np

from benchmarks.csv_rows import append_row, read_rows
from benchmarks.harness import command_line
from benchmarks.measured_code import write_measured
from scheduling import AdapterJob, make_plan
from scheduling.types import Limits

SEEDS = range(200)
MOST_SAMPLES = 6000  # of an instance
FLOORS = ("list_rule", "lorafusion", "mlora")
Batches = list[list[list[int]]]  # lengths: adapter, batch, sample


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="instances, from seed 0 on")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    write_measured(options.out)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for row in pool.map(measure, range(options.seeds)):
            append_row(options.out / "slots.csv", row)
    rows = read_rows(options.out / "slots.csv")
    total = {name: sum(int(row[name]) for row in rows) for name in ("bound", "slots", *FLOORS)}
    ratios = {name: round(slots / total["bound"], 4) for name, slots in total.items()}
    mean = sum(int(row["slots"]) / int(row["bound"]) for row in rows) / len(rows)
    longer = [row["seed"] for row in rows if any(int(row["slots"]) > int(row[name]) for name in FLOORS)]
    print(f"slots over the bound {ratios}, in the mean {mean:.4f}; longer than a floor: {longer}")
    return 1 if longer else 0


def measure(seed: int) -> dict[str, object]:
    jobs, limits = draw_instance(seed)
    began = time.process_time()
    plan = make_plan(
        jobs,
        capacity_tokens=limits.capacity_tokens,
        num_stages=limits.num_stages,
        data_parallel=limits.data_parallel,
    )
    return {
        "seed": seed,
        "adapters": len(jobs),
        "samples": sum(job.num_samples for job in jobs),
        "batches": " ".join(str(size) for size in sorted({job.global_batch for job in jobs})),
        "capacity_tokens": limits.capacity_tokens,
        "stages": limits.num_stages,
        "replicas": limits.data_parallel,
        "bound": plan.lower_bound,
        "slots": plan.num_slots,
        "list_rule": list_rule(jobs, limits),
        "lorafusion": lorafusion_order(jobs, limits),
        "mlora": mlora_order(jobs, limits),
        "cpu_s": round(time.process_time() - began, 2),
    }


def draw_instance(seed: int) -> tuple[list[AdapterJob], Limits]:
    draw = np.random.default_rng([116, seed])
    capacity, stages = int(draw.choice([1024, 2048, 4096, 8192])), int(draw.choice([1, 1, 2, 4, 8, 16]))
    replicas, count = int(draw.choice([1, 1, 1, 2, 4])), int(draw.choice([1, 2, 3, 4, 6, 8, 16, 64]))
    mixed, huge = seed // 8 % 3 == 1, seed // 8 % 6 == 5 and count > 2
    most_power = int(draw.integers(0, 10))
    jobs: list[AdapterJob] = []
    for index in range(count):
        batch = 2 ** (int(draw.integers(0, 10)) if mixed else min(most_power, 8))
        samples = max(batch, int(draw.integers(1, MOST_SAMPLES // count + 1))) if count < 64 else 4 * batch
        if huge:
            samples = MOST_SAMPLES // 2 if index == 0 else 4 * batch
        samples = min(samples, max(batch, MOST_SAMPLES // count))
        jobs.append(AdapterJob(f"a{index}", _lengths(draw, seed % 8, capacity, samples), batch))
    longest = max(max(job.sample_tokens) for job in jobs)
    if seed // 8 % 5 == 4:
        capacity = -(-longest // 128) * 128
    return jobs, Limits(capacity_tokens=capacity, num_stages=stages, data_parallel=replicas)


def _lengths(draw: np.random.Generator, shape: int, capacity: int, count: int) -> np.ndarray:
    mean = capacity * draw.uniform(0.05, 0.4)
    drawn = [
        lambda: draw.lognormal(np.log(mean), 0.4, count),
        lambda: draw.lognormal(np.log(mean), 1.0, count),
        lambda: draw.uniform(1, 2 * mean, count),
        lambda: np.full(count, mean),
        lambda: np.where(draw.random(count) < 0.2, 0.8 * capacity, 0.2 * mean),
        lambda: mean / 3 * (1 + draw.pareto(1.5, count)),
        lambda: capacity * draw.choice([1 / 2, 1 / 3], count) * draw.uniform(0.98, 1.1, count),
        lambda: np.where(draw.random(count) < 0.1, capacity - 128 * draw.random(count), draw.lognormal(5, 0.7, count)),
    ][shape]()
    return np.clip(drawn, 8, capacity).astype(int)


def list_rule(jobs: Sequence[AdapterJob], limits: Limits) -> int:
    """Slots of the list rule. Written apart from the planner."""
    batches, gap = _batches(jobs), limits.num_stages - 1
    room = limits.tiles * limits.tile_tokens
    need = [[max(1, -(-sum(batch) // (room * limits.data_parallel))) for batch in job] for job in batches]
    chain = [sum(slots) + gap * (len(slots) - 1) for slots in need]
    current, ready = [0] * len(jobs), [0] * len(jobs)
    left, slot = [list(job[0]) for job in batches], 0
    while any(left):
        free = [job for job, rest in enumerate(left) if rest and ready[job] <= slot]

        def way(job: int) -> int:
            return chain[job] - need[job][current[job]] + -(-sum(left[job]) // (room * limits.data_parallel))

        order = sorted(free, key=lambda job: (-way(job), job))
        for _ in range(limits.data_parallel):
            tiles = limits.tiles
            for job in order:
                first_fit, tokens = [], 0
                for length in left[job]:  # longest first
                    if -(-(tokens + length) // limits.tile_tokens) <= tiles:
                        first_fit.append(length)
                        tokens += length
                for length in first_fit:
                    left[job].remove(length)
                tiles -= -(-tokens // limits.tile_tokens)
        for job in free:
            if not left[job]:
                chain[job] -= need[job][current[job]] + gap
                current[job] += 1
                ready[job] = slot + limits.num_stages
                left[job] = list(batches[job][current[job]]) if current[job] < len(batches[job]) else []
        slot += 1
    return slot


def lorafusion_order(jobs: Sequence[AdapterJob], limits: Limits) -> int:
    """Slots of pairs of adapters, batch by batch."""
    ranked = sorted(range(len(jobs)), key=lambda job: float(np.mean(jobs[job].sample_tokens)))
    half = len(ranked) // 2
    pairs = [
        *zip(ranked[:half], ranked[: -half - 1 : -1], strict=True),
        *([(ranked[half],)] if len(ranked) % 2 else []),
    ]
    return _in_turn(pairs, _batches(jobs), limits)


def mlora_order(jobs: Sequence[AdapterJob], limits: Limits) -> int:
    """Slots of one batch of each adapter in turn."""
    return _in_turn([(job,) for job in range(len(jobs))], _batches(jobs), limits)


def _in_turn(groups: Sequence[tuple[int, ...]], batches: Batches, limits: Limits) -> int:
    """Packs the batches of each group in turn, first-fit decreasing; no-ops keep the distance between batches."""
    ready, slot = [0] * len(batches), 0
    for turn in zip_longest(*(range(max(len(batches[job]) for job in group)) for group in groups)):
        for group, number in zip(groups, turn, strict=True):
            members = [job for job in group if number is not None and number < len(batches[job])]
            if not members:
                continue
            samples = [(length, job) for job in members for length in batches[job][number]]
            slot = max(slot, *(ready[job] for job in members))
            slot += -(-_first_fit(samples, limits) // limits.data_parallel)
            for job in members:
                ready[job] = slot - 1 + limits.num_stages
    return slot


def _first_fit(samples: Iterable[tuple[int, int]], limits: Limits) -> int:
    """Microbatches of (length, adapter), first-fit decreasing; an adapter's rows are padded to tiles."""
    bins: list[dict[int, int]] = []
    for length, job in sorted(samples, reverse=True):
        for load in bins:
            tokens = {**load, job: load.get(job, 0) + length}
            if sum(-(-some // limits.tile_tokens) for some in tokens.values()) <= limits.tiles:
                load.update(tokens)
                break
        else:
            bins.append({job: length})
    return len(bins)


def _batches(jobs: Sequence[AdapterJob]) -> Batches:
    """Samples of each batch, longest first."""
    return [
        [
            sorted(job.sample_tokens[start : start + job.global_batch], reverse=True)
            for start in range(0, job.num_samples, job.global_batch)
        ]
        for job in jobs
    ]


if __name__ == "__main__":
    raise SystemExit(main())
