"""What default rates predict for the pipelines that were measured: time of a microbatch and idle share of each stage.

    python -m benchmarks.pipelines --out benchmarks/results/pipelines_DATE    # a minute; no GPU

A row for each order of work with several stages in the published runs, with its layers, capacity and remat policy. Both
orders get the same rates, so their ratio shows whether predictions favour one of them.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import pairwise
from pathlib import Path

from benchmarks.csv_rows import write_rows
from benchmarks.end_to_end import VARIANTS, Bench
from benchmarks.measured_code import write_measured
from benchmarks.published import newest, pipeline_rows
from lorafusion_jax.config.schema import MeshSettings
from lorafusion_jax.planning.prediction import predicted_costs
from scheduling import Timeline, simulate

ORDERS = ("ours", "mlora")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    write_measured(out)
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
