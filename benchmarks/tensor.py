"""Layers on one GPU beside layers that several GPUs compute together (`mesh.tensor`), stages, and replicas.

    python -m benchmarks.tensor --out OUT [--seconds 150] [--layers 8] [--adapters 1] [--meshes data fsdp] [--small]
    python -m benchmarks.tensor --out OUT --gpus 4 --adapters 4 --meshes one tensor parts data    # four GPUs

Writes a random base with layers of an 8B model in bfloat16 and runs `lorafusion train` on it: four adapters together,
then one alone. The first losses of every mesh must be those of the first to rounding before any rate is printed. A row
per run: losses, tokens per second after the first slots, and peak and predicted memory. Nothing starts after --seconds.
Replicas with a base each (`data`) beside replicas that share one (`fsdp`) tell what gathering adds to a slot,
and `processes` what a process for each of the `stages` adds. `parts` is `tensor` with `train.parts: 2`; --leave builds
persistent kernels for so many multiprocessors less, which sums may take.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.harness import add_row, command_line
from benchmarks.random_base import write_base
from benchmarks.random_job import SHAPE, SMALL
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.config import load_config
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.planning.prediction import predicted_costs, predicted_memory
from scheduling import plan_statistics

MESHES = {
    "one": None, "tensor": "tensor", "parts": "tensor", "stages": "stages", "processes": "stages", "data": "data",
    "fsdp": "fsdp",
}  # fmt: skip
TOLERANCE = 4 * 2**-9  # of the first losses, at equal weights: as `verify` allows in bfloat16
NARROWER = """
import runpy
from pallas_kernels import device
whole = device.num_sms
device.num_sms = lambda: whole() - {leave}
runpy.run_module("lorafusion_jax", run_name="__main__", alter_sys=True)
"""
WARM = 8  # slots that are not timed
SLOTS = 24  # of each GPU, at least


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--adapters", type=int, nargs="+", default=[4, 1], help="that train together, at most 4")
    parser.add_argument("--meshes", choices=MESHES, nargs="+", default=list(MESHES))
    parser.add_argument("--gpus", type=int, default=2, help="of a mesh, but for `one`")
    parser.add_argument("--leave", type=int, default=0, help="multiprocessors without kernels of ours")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on simulated devices")
    options = parser.parse_args()
    shape, began = SMALL if options.small else SHAPE, time.monotonic()
    write = partial(add_row, options.out / "tensor.jsonl")
    with tempfile.TemporaryDirectory(prefix="tensor_") as name:
        work = Path(name)
        write({"section": "conditions", **_conditions(options), "layers": options.layers, "shape": shape})
        write_base(work / "base", shape, max(2, options.gpus) if options.small else options.layers)
        _write_data(work, options.small, options.gpus)
        for adapters in options.adapters:
            first: dict[str, float] = {}
            for mesh in options.meshes:
                if time.monotonic() - began > options.seconds:
                    return 0
                row, losses = _run(work, mesh, adapters, options)
                first = first or losses
                apart = max(abs(losses[adapter] - loss) / loss for adapter, loss in first.items())
                assert apart < TOLERANCE, (mesh, losses, first)
                setting = {"mesh": mesh, "gpus": options.gpus, "adapters": adapters, "left_sms": options.leave}
                write({"section": "run", **setting, "first_losses_apart": apart, **row})
    return 0


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, which leaves the GPUs to the runs."""
    program = "import json; from benchmarks.conditions import conditions; print(json.dumps(conditions()))"
    done = subprocess.run([sys.executable, "-c", program], env=_environment(options), check=True, capture_output=True)
    return json.loads(done.stdout)


def _environment(options: argparse.Namespace) -> dict[str, str]:
    simulated = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(options.gpus)}
    return os.environ | (simulated if options.small else {})


def _write_data(work: Path, small: bool, gpus: int) -> None:
    """Rows of random tokens, 200 to 1800 of them, enough for the slots of four adapters."""
    tokenizer = Path(__file__).parent.parent / "examples" / "base"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (work / "base" / name).write_bytes((tokenizer / name).read_bytes())
    draw, scale = np.random.default_rng(0), 0.04 if small else 1.0
    rows = SLOTS * gpus * 8 // 4
    for number in range(4):
        lengths = draw.integers(round(200 * scale), round(1800 * scale), rows)
        tokens = [draw.integers(300, 3000, length).tolist() for length in lengths]
        lines = [json.dumps({"input_ids": ids, "labels": ids}) + "\n" for ids in tokens]
        (work / f"a{number}.jsonl").write_text("".join(lines))


def _job(mesh: str, adapters: int, small: bool, gpus: int) -> dict[str, Any]:
    axis = MESHES[mesh]
    longest = 128 if small else 2048
    return {
        "base": {"model": "base"},
        "data": {"max_length": longest},
        "batch": {"capacity_tokens": 4 * longest, "tile_tokens": 16 if small else 128, "global_samples": 16},
        "mesh": {} if axis is None else {axis: gpus},
        "train": {"log_every_s": 0, "remat": "gemm_inputs", "parts": 2 if mesh == "parts" else 1},
        "save": {"every_minutes": None},
        "lora": {"rank": 16, "dropout": 0.1},
        "adapters": [
            {"name": f"a{n}", "data": {"train": f"a{n}.jsonl"}, "epochs": 4 // adapters} for n in range(adapters)
        ],
    }  # fmt: skip


def _run(work: Path, mesh: str, adapters: int, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns what a run took, and the first loss of each adapter."""
    small, leave = options.small, options.leave
    jobs, out = work / f"{mesh}_{adapters}.yaml", work / f"run_{mesh}_{adapters}"
    jobs.write_text(yaml.safe_dump(_job(mesh, adapters, small, options.gpus)))
    program = ["-c", NARROWER.format(leave=leave)] if leave else ["-m", "lorafusion_jax"]
    command = [sys.executable, *program, "train", str(jobs), "--out", str(out)]
    began = time.monotonic()
    if mesh == "processes":
        _run_in_processes(command, options)
    else:
        subprocess.run(command, env=_environment(options), check=True, stdout=subprocess.DEVNULL)
    seconds, run = time.monotonic() - began, RunFolder(out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {row["adapter"]: row["loss"] for row in reversed(rows) if row["kind"] == "step"}
    ended = {row["slot"]: row["time"] for row in rows if row["kind"] == "slot"}
    plan = run.read_plan()
    tokens = [sum(plan.job_of[ref.adapter].sample_tokens[ref.sample] for ref in slot.samples) for slot in plan.slots]
    last = max(ended)
    timed = ended[last] - ended[WARM]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    peak = next((event.get("peak_bytes") for event in events if event["kind"] == "finished"), None)
    config = load_config(jobs, ())
    model = ModelConfig.from_hf(work / "base")
    statistics = plan_statistics(plan, predicted_costs(config, model, "cpu" if small else "h200"))
    return {
        "slots": len(plan.slots),
        "tokens_per_s": round(sum(tokens[WARM:last]) / timed, 1),
        "predicted_tokens_per_s": round(statistics.tokens_per_s, 1),
        "slot_ms": round(1000 * timed / (last - WARM), 2),
        "peak_bytes": peak,
        "predicted_bytes": max(stage.total for stage in predicted_memory(config, model, None).stages),
        "last_losses": {row["adapter"]: row["loss"] for row in rows if row["kind"] == "step"},
        "command_s": round(seconds, 1),
    }, losses


def _run_in_processes(command: list[str], options: argparse.Namespace) -> None:
    """A process for each stage, with one device each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    join = ["--distributed", "--coordinator", f"127.0.0.1:{port}", "--num-processes", str(options.gpus)]
    processes = []
    for number in range(options.gpus):
        one_device = {"JAX_NUM_CPU_DEVICES": "1"} if options.small else {"CUDA_VISIBLE_DEVICES": str(number)}
        environment = _environment(options) | one_device
        of_process = [*command, *join, "--process-id", str(number)]
        processes.append(subprocess.Popen(of_process, env=environment, stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in processes]
    assert not any(codes), codes


if __name__ == "__main__":
    sys.exit(main())
