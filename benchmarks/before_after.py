"""Compares results and speed of two checkouts, before and after a change of the structure.

    git worktree add ../before COMMIT
    python -m benchmarks.before_after --before ../before --out benchmarks/results/before_after_2026-11-23
    python -m benchmarks.before_after --before ../before --parts layer training --out …      # one H200

Parts: `job` runs the demo's job for some steps on one device and on 2 stages x 2 replicas, on CPUs; losses and exported
adapters must be bitwise equal. `layer` (a decoder layer of Llama-3.1-8B's shape) and `training` (the same model on the
workload `mix`) run on a GPU, with both checkouts in turn. Writes rows.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MESHES = {"one device": [], "2 stages x 2 replicas": ["mesh.stages=2", "mesh.data=2"]}
CONDITIONS = "import json; from benchmarks.conditions import conditions; print(json.dumps(conditions()))"
LAYER = """
import dataclasses, json, sys
sys.path[:0] = [ROOT]; sys.path.append(ROOT + "/benchmarks")
from benchmarks import kernel_layer as kl
class Recorder:
    left_s = 1e9
    def attempt(self, name, work): work()
    def add(self, **row): print("ROW " + json.dumps(row), flush=True)
wanted = [v for v in kl.variants(True) if v.name in ("frozen A1 p0", "ours A4 p0.1", "ours A4 p0")]
kl.run_part(Recorder(), kl.SHAPES[0], "layer 8B", wanted, kl.layer, False)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the commit before")
    parser.add_argument("--parts", nargs="+", choices=("job", "layer", "training"), default=["job"])
    parser.add_argument("--rounds", type=int, default=2, help="turns of either checkout, of layer and training")
    parser.add_argument("--steps", type=int, default=6, help="of each adapter of the job")
    parser.add_argument("--slots", type=int, default=60, help="of training")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    parts = {"job": job, "layer": layer, "training": training}
    with (args.out / "rows.jsonl").open("a", encoding="utf-8") as stream:
        for part in args.parts:
            for row in parts[part](args):
                text = json.dumps({"part": part, **row})
                print(text, flush=True)
                stream.write(text + "\n")
                stream.flush()
    return 0


def job(args: argparse.Namespace) -> Iterator[dict]:
    """Trains the demo's job in both checkouts and compares losses and adapters bitwise."""
    for mesh, overrides in MESHES.items():
        with tempfile.TemporaryDirectory() as folder:
            runs = {name: _train(tree, Path(folder) / name, overrides, args.steps) for name, tree in _trees(args)}
            adapters = {name: _adapters(run) for name, run in runs.items()}
            losses = {name: _losses(run) for name, run in runs.items()}
        yield {
            "mesh": mesh,
            "adapters": len(adapters["after"]),
            "adapters_equal": adapters["before"] == adapters["after"],
            "loss_rows": len(losses["after"]),
            "losses_equal": losses["before"] == losses["after"],
        }


def layer(args: argparse.Namespace) -> Iterator[dict]:
    """Times a decoder layer in both checkouts in turn."""
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        for name, tree in _trees(args):
            shown = _run(tree, ["-c", LAYER.replace("ROOT", repr(str(tree)))])
            for line in shown.splitlines():
                if line.startswith("ROW "):
                    row = json.loads(line[4:])
                    times.setdefault((row["name"], name), []).append(row["p50_us"])
    yield from _ratios(times, "us")


def training(args: argparse.Namespace) -> Iterator[dict]:
    """Trains an 8B model on `mix` in both checkouts in turn."""
    speeds: dict[tuple[str, str], list[float]] = {}
    for turn in range(args.rounds):
        for name, tree in _trees(args):
            out = args.out / "training" / f"{name}{turn}"
            script = ["-m", "benchmarks.end_to_end"] if name == "after" else ["benchmarks/end_to_end.py"]
            options = (
                f"--model 8b --workloads mix --variants ours --no-profile --slots {args.slots} --out {out.resolve()}"
            )
            _run(tree, [*script, *options.split()])
            for file in out.glob("*.jsonl"):
                for line in file.read_text(encoding="utf-8").splitlines():
                    if (speed := json.loads(line).get("useful_tokens_per_s")) is not None:
                        speeds.setdefault(("8B mix", name), []).append(speed)
    yield from _ratios(speeds, "useful_tokens_per_s")


def _ratios(values: dict[tuple[str, str], list[float]], unit: str) -> Iterator[dict]:
    conditions = json.loads(_run(ROOT, ["-c", CONDITIONS]))  # in a child process, so that this one uses no GPU memory
    for what in dict.fromkeys(what for what, _ in values):
        before, after = values[what, "before"], values[what, "after"]
        ratio = statistics.median(after) / statistics.median(before)
        yield {"what": what, "unit": unit, "before": before, "after": after, "after_over_before": ratio, **conditions}


def _trees(args: argparse.Namespace) -> list[tuple[str, Path]]:
    return [("before", args.before.resolve()), ("after", ROOT)]


def _run(tree: Path, arguments: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{tree}: {' '.join(arguments[:3])} ended with {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout


def _train(tree: Path, out: Path, overrides: list[str], steps: int) -> Path:
    command = ["-m", "lorafusion_jax", "train", "examples/demo.yaml", "--out", str(out), f"train.max_steps={steps}"]
    _run(tree, [*command, *overrides], JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="4")
    return out


def _adapters(run: Path) -> dict[str, bytes]:
    files = run.glob("adapters/*/step-*/adapter_model.safetensors")
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


def _losses(run: Path) -> list[tuple]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    keys = ("kind", "adapter", "step", "loss", "grad_norm", "lr", "eval_loss")
    return [tuple(row.get(key) for key in keys) for row in rows if row["kind"] in ("step", "eval")]


if __name__ == "__main__":
    sys.exit(main())
