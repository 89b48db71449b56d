"""Does the simulator foretell how jobs fare that come to a service with several GPUs and a policy?

    python -m benchmarks.live_policy --out results/live_policy --work /dev/shm --gpus 4 --over 300    # four GPUs
    python -m benchmarks.live_policy --out /tmp/try --small                                     # the CPU as one GPU

Starts `lorafusion serve --policy ours` with a random base of Llama-3.1-8B's shape, which opens and ends sessions as it
likes; 8 clients submit jobs at times drawn from one seed. The simulator gets the same jobs, the times at which they
came, and the rates and costs that the service plans with; nothing is fitted to the run. A row of `live_policy.jsonl`
has completion times over the simulated ones, and the seconds to the last end of both; `jobs.json` is what was told.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.conditions import conditions
from benchmarks.harness import add_row, command_line
from benchmarks.live import make_spec, planner_job, served, submit_over, summary, wait_all
from benchmarks.random_base import add_base_option, random_base
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.planning.model_facts import ModelFacts
from lorafusion_jax.serve.control.policy_scheduler import MAX_SLOWDOWN, BaseShape
from scheduling import AdapterJob
from scheduling.online import Job, ModelShape, Rates, Worker, simulate_cluster

POLICY, MEMORY_GIB = "ours", 140.0


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--work", type=Path, help="where files are written; default: the system's folder")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--over", type=float, default=300.0, help="seconds over which jobs come")
    parser.add_argument("--most", type=float, default=580.0, help="seconds after which the script gives up")
    parser.add_argument("--rows", type=int, default=96, help="samples of a job")
    parser.add_argument("--small", action="store_true", help="six tiny jobs on the CPU, as one GPU")
    add_base_option(parser)
    options = parser.parse_args()
    until, small = time.monotonic() + options.most, options.small
    gpus, count, over_s, rows = (0, 6, 10.0, 24) if small else (options.gpus, options.jobs, options.over, options.rows)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="live_", dir=options.work) as folder:
        work = Path(folder)
        base = random_base(options.base or work / "base", small=small)
        specs = [make_spec(work, base, number, rows, small) for number in range(count)]
        arguments = ["--policy", POLICY, "--gpus", str(gpus), "--memory-gib", str(MEMORY_GIB)]
        with served(work, base, options.out, arguments, warm=False, small=small) as client:
            told = wait_all(submit_over(client, specs, over_s), options.out, until)
        planned = [planner_job(base, spec, small) for spec in specs]
        row = {"what": "live policy", "jobs": count, "gpus": gpus, "over_s": over_s, "rows": rows, "small": small}
        model = ModelConfig.from_hf(base)
        row |= compared(told, planned, specs, model, max(1, gpus), "cpu" if small else "h200")
    print(json.dumps(row, indent=1))
    add_row(options.out / "live_policy.jsonl", row | conditions())
    return 0


def compared(
    told: Sequence[dict], planned: Sequence[AdapterJob], specs: Sequence[dict], model: ModelConfig, gpus: int,
    device: str,
) -> dict[str, object]:  # fmt: skip
    """Completion times over those of the simulator."""
    first = min(entry["job"]["created"] for entry in told)
    shape = BaseShape(name="base", **{key: getattr(model, key) for key in ModelShape.__dataclass_fields__})
    jobs, took_s = [], {}
    for entry, job, spec in zip(told, planned, specs, strict=True):
        row, steps = entry["job"], [step for step in entry["rows"] if step["kind"] == "step"]
        assert [step["step"] for step in steps] == list(range(1, row["steps"] + 1)), row
        came_s = row["created"] - first
        took_s[job.name] = steps[-1]["time"] - first - came_s
        jobs.append(
            Job(
                job.name, row["owner"], shape, came_s, list(job.sample_tokens), job.global_batch, job.num_batches,
                rank=spec["lora"]["rank"], max_slowdown=MAX_SLOWDOWN,
            )
        )  # fmt: skip
    rates = Rates(facts=ModelFacts({"base": model}))
    result = simulate_cluster(jobs, [Worker("host", gpus, MEMORY_GIB, device)], policy=POLICY, rates=rates)
    came = {job.name: job.arrival_s for job in jobs}
    ratios = [took_s[name] / (end - came[name]) for name, end in result.finish_s.items()]
    return {
        "over_simulated": summary(ratios) | {"mean": round(sum(ratios) / len(ratios), 3)},
        "end_s": round(max(came[name] + seconds for name, seconds in took_s.items()), 2),
        "simulated_end_s": round(max(result.finish_s.values()), 2),
        "tokens": sum(sum(job.sample_tokens) for job in planned),
    }


if __name__ == "__main__":
    raise SystemExit(main())
