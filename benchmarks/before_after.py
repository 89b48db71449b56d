"""Compares results and speed of two checkouts, before and after a change of the structure.

    git worktree add ../before COMMIT            # or its archive, unpacked
    python -m benchmarks.before_after --before ../before --out benchmarks/results/before_after_2026-11-23
    python -m benchmarks.before_after --before ../before --parts layer training --out …      # one GPU

Parts: `job` runs the demo's job as it was before for some steps on one device and on 2 stages x 2 replicas, on CPUs;
losses and exported adapters must be bitwise equal. The others run on a GPU, in bfloat16 and fp8: `layer` is a decoder
layer of Llama-3.1-8B's shape, forward and backward, in two processes that take turns of 0.1 s; `training` is the same
model on the workload `mix`, where the checkouts run in turn. Compiled programs and the algorithms that XLA chose are
kept between the runs, so that both checkouts take the same for the same product. Writes rows.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import command_line

ROOT = Path(__file__).resolve().parents[1]
MESHES = {"one device": [], "2 stages x 2 replicas": ["mesh.stages=2", "mesh.data=2"]}
CONDITIONS = "import json; from benchmarks.conditions import conditions; print(json.dumps(conditions()))"
VARIANTS = {"ours": "8B mix bf16", "ours_fp8": "8B mix fp8"}
SAME = 0.01  # of a time or a speed


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the commit before")
    parser.add_argument("--parts", nargs="+", choices=("job", "layer", "training"), default=["job"])
    parser.add_argument("--rounds", type=int, default=2, help="turns of either checkout in training")
    parser.add_argument("--turns", type=int, default=40, help="turns of either checkout and layer")
    parser.add_argument("--steps", type=int, default=6, help="of each adapter of the job")
    parser.add_argument("--slots", type=int, default=40, help="of training")
    parser.add_argument("--seconds", type=float, default=560, help="no training starts that would end later")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script on a CPU")
    args = parser.parse_args()
    args.until = time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    parts = {"job": job, "layer": layer, "training": training}
    with tempfile.TemporaryDirectory() as cache, (args.out / "rows.jsonl").open("a", encoding="utf-8") as stream:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
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
            demo = args.before.resolve() / "examples" / "demo.yaml"
            runs = {name: _train(tree, demo, Path(folder) / name, overrides, args.steps) for name, tree in _trees(args)}
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
    """Times a decoder layer in both checkouts, which take turns."""
    with contextlib.ExitStack() as running:
        sides = {name: running.enter_context(Side(tree, small=args.small)) for name, tree in _trees(args)}
        answers = [side.answer() for side in sides.values()]
        names = [name for name in answers[0] if name in answers[1]]
        for side in sides.values():  # one after another, because XLA chooses algorithms by their time
            side.ask("compile")
        times: dict[tuple[str, str], list[float]] = {(name, side): [] for name in names for side in sides}
        for _ in range(args.turns):
            for name in names:
                for side, process in sides.items():
                    times[name, side].append(process.ask(f"{name} {0.001 if args.small else 0.1}"))
    for name in names:
        yield from _ratio(f"layer {name}", "us", times[name, "before"], times[name, "after"])


class Side(contextlib.AbstractContextManager):
    """A process that times the layers of a checkout."""

    def __init__(self, tree: Path, *, small: bool):
        script = [sys.executable, "-P", str(ROOT / "benchmarks" / "before_after_layer.py"), *["--small"] * small]
        environment = _environment(tree) | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}  # two share a GPU
        self._process = subprocess.Popen(
            script, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __exit__(self, *error: object) -> None:
        self._process.__exit__(*error)  # without commands it ends

    def ask(self, command: str) -> Any:
        """The answer to a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line[7:])
        sys.exit(f"the layers ended with {self._process.wait()}")


def training(args: argparse.Namespace) -> Iterator[dict]:
    """Trains an 8B model on `mix` in both checkouts in turn. A ratio is written again after each turn."""
    speeds: dict[tuple[str, str], list[float]] = {}
    longest = 0.0
    for _ in range(args.rounds):
        for name, tree in _trees(args):
            began = time.monotonic()
            if began + longest > args.until:
                return
            for variant, speed in _speeds(tree, args).items():
                speeds.setdefault((variant, name), []).append(speed)
            longest = max(longest, time.monotonic() - began)
        for variant in dict.fromkeys(variant for variant, _ in speeds):
            sides = speeds[variant, "before"], speeds[variant, "after"]
            yield from _ratio(VARIANTS[variant], "useful_tokens_per_s", *sides)


def _speeds(tree: Path, args: argparse.Namespace) -> dict[str, float]:
    """Useful tokens/s by variant."""
    model, variants = ("tiny --layers 1 --adapters 2 --capacity 256", ["ours"]) if args.small else ("8b", [*VARIANTS])
    options = f"--model {model} --workloads mix --no-profile --slots {args.slots} --variants"
    with tempfile.TemporaryDirectory() as out:
        _run(tree, ["-m", "benchmarks.end_to_end", "--out", out, *options.split(), *variants])
        lines = (Path(out) / "end_to_end.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["variant"]: row for row in map(json.loads, lines)}
    for variant, row in rows.items():
        if "error" in row:
            sys.exit(f"{tree}: {variant}: {row['error']}")
    return {variant: row["useful_tokens_per_s"] for variant, row in rows.items()}


def _ratio(name: str, unit: str, before: list[float], after: list[float]) -> Iterator[dict]:
    """A row: both medians, the median ratio of a turn, and all turns, whose spread is the noise."""
    ratio = statistics.median(b / a for a, b in zip(before, after, strict=True))
    conditions = json.loads(_run(ROOT, ["-c", CONDITIONS]))  # in a child process, so that this one uses no GPU memory
    yield {
        "name": name, "unit": unit, "before": statistics.median(before), "after": statistics.median(after),
        "after_over_before": ratio, "same": abs(ratio - 1) <= SAME,
        "turns": [[round(a, 1), round(b, 1)] for a, b in zip(before, after, strict=True)], **conditions,
    }  # fmt: skip


def _trees(args: argparse.Namespace) -> list[tuple[str, Path]]:
    return [("before", args.before.resolve()), ("after", ROOT)]


def _run(tree: Path, arguments: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=_environment(tree) | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{tree}: {' '.join(arguments[:3])} ended with {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}


def _train(tree: Path, job: Path, out: Path, overrides: list[str], steps: int) -> Path:
    command = ["-m", "lorafusion_jax", "train", str(job), "--out", str(out), f"train.max_steps={steps}"]
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
