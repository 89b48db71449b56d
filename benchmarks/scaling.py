"""Predicts throughput on 1 to 256 GPUs with the simulator, and where it stops scaling, in a table and a plot.

    python -m benchmarks.scaling --out benchmarks/results/scaling_2026-11-24   # two minutes on one core
    python -m benchmarks.scaling --quick   # 8B alone, two batch sizes, prints only

Nothing is measured on more than a few GPUs. The rates of one H200 and of its links are measured (see ASSUMPTIONS); the
rest follows from complete, verified plans. Writes scaling.csv, scaling.png and the assumptions.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.measured_code import write_measured
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.planning.memory import DEVICE_BYTES, MemoryProblem, choose_remat, fits, stage_memory
from lorafusion_jax.planning.stages import stage_layers, worth_in_layers
from scheduling import (
    AdapterJob,
    CostModel,
    GatherCost,
    PassCost,
    Plan,
    PlanError,
    StageCost,
    default_cost_parts,
    make_plan,
    simulate,
    stages_from_parts,
)

GPUS = (1, 2, 4, 8, 16, 64, 256)
HOST = 8  # GPUs
NVLINK, NETWORK = 369e9, 50e9  # bytes per second and GPU
HOP_S = 20e-6
MEMORY_RATE = 4.3e12
RANK = 16
ASSUMPTIONS = """\
samples: log-normal, 950 +- 430 tokens (32 to 4096), seed 0; batches per adapter as in BATCHES; LoRA r 16 on all linears
compute: default rates of one H200 (scheduling/rates.py: 8B in 0.46 s for 8192 tokens, as in whole runs); bfloat16
keep: fastest that fits 140 GiB by the memory model; gemm_inputs adds 2 % to backward, nothing a whole forward
stages: inside a host of 8 GPUs, activations 112 GB/s and 20 us; layers by modelled cost
fsdp: inside a host, a layer's weights gathered at 369 GB/s before it runs; programs of four layers may hide some of
  it behind the layer before, which is not measured and counts as none; replicas of their own
all-reduce of an adapter's float32 gradients when its batch ends: ring inside the host (369 GB/s), then each GPU its
  share across hosts (400 Gb/s), 20 us a hop; nothing overlaps it
optimizer step: 28 bytes a parameter at 4.3 TB/s
replicas of a slot wait for the slowest; no stragglers, no input stalls, the host thread is never late
global batches are as given: more GPUs do not get more samples
"""
BATCHES = {8: 32, 16: 32, 64: 24, 256: 10}
_LLAMA = {"family": "llama", "vocab_size": 128256, "num_kv_heads": 8, "head_dim": 128}
MODELS = {
    "8B": ModelConfig(hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, **_LLAMA),
    "32B": ModelConfig(
        family="qwen2",
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_layers=64,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        qkv_bias=True,
    ),
    "70B": ModelConfig(hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, **_LLAMA),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Devices of a run; replicas = gpus / stages, `fsdp` of them share one copy of the weights."""

    gpus: int
    stages: int
    fsdp: int

    @property
    def replicas(self) -> int:
        return self.gpus // self.stages


def meshes(gpus: int) -> Iterator[Mesh]:
    """All meshes with stages and shared weights inside a host."""
    for stages in (1, 2, 4, 8):
        for fsdp in (1, 2, 4, 8):
            if stages * fsdp <= min(gpus, HOST):
                yield Mesh(gpus=gpus, stages=stages, fsdp=fsdp)


@cache
def jobs(adapters: int, global_batch: int) -> tuple[AdapterJob, ...]:
    random = np.random.default_rng(0)
    spread = np.log(1 + (430 / 950) ** 2)
    count = global_batch * BATCHES[global_batch]

    def lengths() -> list[int]:
        return random.lognormal(np.log(950) - spread / 2, spread**0.5, count).clip(32, 4096).astype(int).tolist()

    return tuple(AdapterJob(f"a{index}", lengths(), global_batch) for index in range(adapters))


@cache
def planned(adapters: int, global_batch: int, capacity: int, stages: int, replicas: int) -> Plan | None:
    """The plan; None if a sample is longer than the microbatch."""
    try:
        return make_plan(
            jobs(adapters, global_batch),
            capacity_tokens=capacity,
            num_stages=stages,
            data_parallel=replicas,
            search_evaluations=2_000,
        )
    except PlanError:
        return None


def memory(model: ModelConfig, mesh: Mesh, adapters: int, capacity: int) -> MemoryProblem | None:
    """The memory problem with the fastest remat policy that fits; None if none fits."""
    specs = tuple(AdapterSpec(name=f"a{index}", rank=RANK, alpha=32, dropout=0.1) for index in range(adapters))
    problem = MemoryProblem(
        model=model,
        adapters=specs,
        optimizers=("adamw",) * adapters,
        layers=stage_layers(model, mesh.stages),
        capacity_tokens=capacity,
        fsdp=mesh.fsdp,
    )
    problem = replace(problem, remat=choose_remat(problem, DEVICE_BYTES["h200"]))
    return problem if fits(problem, DEVICE_BYTES["h200"]) else None


def costs(problem: MemoryProblem, mesh: Mesh) -> CostModel:
    """Cost model of a mesh; updates include the all-reduce."""
    model = problem.model
    linears = model.layer(0).linear_shapes()
    weights = sum(rows * columns for rows, columns in linears.values())
    table = model.vocab_size * model.hidden_size
    parts = default_cost_parts(
        "h200",
        layer_parameters=weights,
        table_parameters=table,
        hidden_size=model.hidden_size,
        attention_width=model.num_heads * model.head_dim,
        mlp_width=model.intermediate_size,
    )
    trainable = RANK * sum(rows + columns for rows, columns in linears.values())  # one adapter, one layer
    backward = _backward(parts.layer, problem.remat)
    layer = replace(parts.layer, backward=backward, update_s=28 * trainable / MEMORY_RATE)
    gather = GatherCost(layer_bytes=2 * weights, table_bytes=2 * table, devices=mesh.fsdp)
    counts = worth_in_layers(model, problem.layers)
    model_costs = stages_from_parts(replace(parts, layer=layer), counts, gather=gather if mesh.fsdp > 1 else None)
    stages = tuple(
        replace(stage, update_s=stage.update_s + all_reduce_s(4 * trainable * count, mesh))
        for stage, count in zip(model_costs.stages, counts, strict=True)
    )
    return replace(model_costs, stages=stages)


def all_reduce_s(size: float, mesh: Mesh) -> float:
    """Time of a ring inside the host, followed by a ring across hosts, with one share per replica."""
    inside = min(mesh.replicas, max(1, HOST // mesh.stages))
    hosts = mesh.replicas // inside
    local = 2 * (inside - 1) / inside * size / NVLINK + 2 * (inside - 1) * HOP_S
    across = 2 * (hosts - 1) / hosts * size / inside / NETWORK + 2 * (hosts - 1).bit_length() * HOP_S
    return (local if inside > 1 else 0.0) + (across if hosts > 1 else 0.0)


def _backward(layer: StageCost, keep: str) -> PassCost:
    forward, backward = layer.forward, layer.backward
    again = {"everything": 0.0, "gemm_inputs": 0.02, "nothing": 1.0}[keep]
    base = forward if keep == "nothing" else backward
    return PassCost(
        fixed_s=backward.fixed_s + again * base.fixed_s,
        token_s=backward.token_s + again * base.token_s,
        square_s=backward.square_s + again * base.square_s,
    )


def best(name: str, adapters: int, global_batch: int, gpus: int) -> dict | None:
    """The fastest mesh and capacity for a number of GPUs; None if the model fits on none."""
    rows = []
    for mesh in meshes(gpus):
        for capacity in (4096, 8192):
            problem = memory(MODELS[name], mesh, adapters, capacity)
            plan = problem and planned(adapters, global_batch, capacity, mesh.stages, mesh.replicas)
            if problem and plan:
                rows.append(_row(problem, mesh, plan))
    if not rows:
        return None
    row = max(rows, key=lambda row: row["tokens_per_s"])
    return {"model": name, "adapters": adapters, "global_batch": global_batch, "gpus": gpus} | row


def _row(problem: MemoryProblem, mesh: Mesh, plan: Plan) -> dict:
    model_costs = costs(problem, mesh)
    timeline = simulate(plan, model_costs)
    updates = sum(span.end_s - span.start_s for span in timeline.spans if span.kind == "update")
    return {
        "stages": mesh.stages,
        "replicas": mesh.replicas,
        "fsdp": mesh.fsdp,
        "capacity": problem.capacity_tokens,
        "keep": problem.remat,
        "memory_gib": round(max(stage.total for stage in stage_memory(problem)) / 2**30, 1),
        "tokens_per_s": round(timeline.tokens_per_s),
        "slots": plan.num_slots,
        "noop_share": round(plan.num_noops / plan.num_slots, 4),
        "density": round(plan.density, 4),
        "over_bound": round(plan.gap, 4),
        "bubble_share": round(timeline.bubble_share, 4),
        "update_share": round(updates / timeline.duration_s / mesh.stages, 4),
        "step_s": round(timeline.duration_s / max(job.num_batches for job in plan.jobs), 3),
    }


def with_efficiency(rows: list[dict]) -> list[dict]:
    """Adds useful tokens/s per GPU relative to the best of the model (few GPUs may need recomputation)."""
    best_rate = {
        name: max(row["tokens_per_s"] / row["gpus"] for row in rows if row["model"] == name)
        for name in {row["model"] for row in rows}
    }
    return [
        row
        | {
            "efficiency": round(row["tokens_per_s"] / row["gpus"] / best_rate[row["model"]], 3),
            "limit": _limit(row),
        }
        for row in rows
    ]


def _limit(row: dict) -> str:
    """The largest loss: room in microbatches, idle stages, or updates."""
    lost = {
        "replicas starve (no samples left that may run)": 1 - row["density"] / max(1 - row["noop_share"], 1e-9),
        "no-ops and bubbles (waiting for updates)": max(row["noop_share"], row["bubble_share"]),
        "all-reduce and optimizer steps": row["update_share"],
    }
    name, share = max(lost.items(), key=lambda item: item[1])
    return f"{name} {share:.0%}" if share >= 0.03 else "nothing above 3 %"


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(4.6 * len(names), 4.4), sharey=False, squeeze=False)
    colors = dict(zip(sorted(BATCHES), ("#0072b2", "#e69f00", "#009e73", "#cc79a7"), strict=True))
    for axis, name in zip(axes[0], names, strict=True):
        mine = [row for row in rows if row["model"] == name]
        for adapters, global_batch in dict.fromkeys((row["adapters"], row["global_batch"]) for row in mine):
            line = [row for row in mine if (row["adapters"], row["global_batch"]) == (adapters, global_batch)]
            axis.plot(
                [row["gpus"] for row in line],
                [row["tokens_per_s"] for row in line],
                marker="o",
                markersize=3.5,
                color=colors[global_batch],
                linestyle="-" if adapters == 16 else "--",
                label=f"{adapters} adapters, batch {global_batch}",
            )
        ideal = [max(row["tokens_per_s"] / row["gpus"] for row in mine) * gpus for gpus in GPUS]
        axis.plot(GPUS, ideal, color="#999999", linewidth=0.8, linestyle=":", label="ideal")
        axis.set(xscale="log", yscale="log", xticks=GPUS, xlabel="H200 GPUs", title=name)
        axis.set_xticklabels(GPUS)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("useful tokens/s, predicted")
    axes[0][-1].legend(fontsize=7, frameon=False)
    figure.suptitle("Predicted by the simulator, best mesh for each number of GPUs; not measured", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="folder of the run")
    options = parser.parse_args()
    quick = options.quick
    if not quick and options.out is None:
        parser.error("--out must name the output folder")
    rows = []
    for adapters in (4, 16):
        for global_batch in (8, 64) if quick else BATCHES:
            for name in ("8B",) if quick else MODELS:
                points = [row for gpus in GPUS if (row := best(name, adapters, global_batch, gpus))]
                rates = {row["gpus"]: row["tokens_per_s"] for row in points}
                print(f"{name}, {adapters} adapters, batch {global_batch}: {rates}", flush=True)
                rows += points
            planned.cache_clear()
    rows = with_efficiency(sorted(rows, key=lambda row: list(MODELS).index(row["model"])))
    if quick:
        return
    write(rows, options.out)


def write(rows: list[dict], folder: Path) -> None:
    """Writes the table, the assumptions, and the plot."""
    write_measured(folder)
    with (folder / "scaling.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    (folder / "scaling_assumptions.txt").write_text(ASSUMPTIONS)
    plot(rows, folder / "scaling.png")


if __name__ == "__main__":
    main()
