"""What default rates predict for the pipelines that were measured: time of a microbatch and idle share of each stage.

    python -m benchmarks.pipelines --out benchmarks/results/pipelines_DATE    # a minute; no GPU
    python -m benchmarks.pipelines --claims --out benchmarks/results/claims_DATE    # orders of other systems

A row for each order of work with several stages in the published runs, with its layers, capacity and remat policy. Both
orders get the same rates, so their ratio shows whether predictions favour one of them.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import pairwise, product
from pathlib import Path

import numpy as np

from benchmarks.csv_rows import write_rows
from benchmarks.end_to_end import VARIANTS, Bench
from benchmarks.harness import command_line
from benchmarks.measured_code import write_measured
from benchmarks.published import newest, pipeline_rows
from lorafusion_jax.config.schema import MeshSettings
from lorafusion_jax.planning.prediction import predicted_costs
from scheduling import AdapterJob, Timeline, default_cost_model, make_plan, simulate
from scheduling.baselines import batch_by_batch, one_after_another, tuned

ORDERS = ("ours", "mlora")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--claims", action="store_true")
    asked = parser.parse_args()
    out = asked.out
    write_measured(out)
    if asked.claims:
        write_rows(out / "claims.csv", claims())
        return
    rows = []
    for (model, stages), measured in pipeline_rows().items():
        for (_, variant), row in newest(measured).items():
            if variant in ORDERS:
                timeline = predicted(row, out)
                rows.append(
                    {"model": model, "stages": stages, "variant": variant, "slot_s": row["slot_s"]}
                    | {"predicted_slot_s": round(slot_seconds(timeline), 5)}
                    | {"predicted_bubbles": " ".join(f"{share:.4f}" for share in timeline.bubble_shares)}
                )
                print(rows[-1], flush=True)
    write_rows(out / "pipelines.csv", rows)


def claims() -> list[dict]:
    """Four adapters one after another with a flush at every step, in mLoRA's order, and by our plan."""
    rows = []
    for stages, batch, seed in product((2, 4, 8), (8, 16), range(2)):
        draw, costs = np.random.default_rng(seed), default_cost_model(num_stages=stages)
        lengths = [np.clip(draw.lognormal(6, 0.8, 192), 32, 4096).astype(int).tolist() for _ in range(4)]
        jobs = [AdapterJob(f"a{number}", samples, batch) for number, samples in enumerate(lengths)]
        plans = {
            name: tuned(make, jobs, capacities=(4096, 6144, 8192), cost_model=costs, num_stages=stages)
            for name, make in (("flushed", one_after_another), ("mlora", batch_by_batch), ("ours", make_plan))
        }
        timelines = {name: simulate(plan, costs) for name, plan in plans.items()}
        row: dict = {"stages": stages, "batch": batch, "seed": seed}
        for name, timeline in timelines.items():
            wall_s, busy_s = (
                max(span.end_s for span in timeline.spans),
                sum(s.end_s - s.start_s for s in timeline.spans),
            )
            row[f"{name}_s"] = f"{wall_s:.4f}"
            row[f"{name}_idle"] = f"{1 - busy_s / (stages * wall_s):.4f}"  # fill and drain included
        rows.append(row)
        print(row, flush=True)
    return rows


def predicted(row: dict, out: Path) -> Timeline:
    """Simulates a plan of the row's kind, as long as its run, at default rates of an H200."""
    mesh = MeshSettings(stages=row["mesh"]["stages"], data=row["mesh"]["data"], layers=tuple(row["layers_per_stage"]))
    options = argparse.Namespace(
        model=row["model"], layers=None, capacity=row["capacity_tokens"], batch=row["global_batch"],
        adapters=row["adapters"], objective="sft", layers_per_stage=None, set=[f"remat={row['keep']}"], out=out,
    )  # fmt: skip
    bench, variant = Bench(options), VARIANTS[row["variant"]]
    (jobs,) = bench.jobs(variant, row["workload"], mesh, row["slots"])
    plan = bench.plan(variant, jobs, options.capacity, mesh)
    return simulate(
        plan, predicted_costs(bench.config(variant, mesh, options.capacity, len(jobs)), bench.model, "h200")
    )


def slot_seconds(timeline: Timeline) -> float:
    """Median time from the end of a microbatch to the end of the next, as measured runs have it."""
    ends = sorted(span.end_s for span in timeline.spans if span.kind == "backward" and span.stage == 0)
    return statistics.median(after - before for before, after in pairwise(ends))


if __name__ == "__main__":
    main()
