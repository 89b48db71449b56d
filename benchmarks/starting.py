"""How long from the command to the first optimizer step? Without a compilation cache, and with one.

    python -m benchmarks.starting --out results/starting --work /dev/shm --layers 36 8 --quantize none fp8
    python -m benchmarks.starting --out results/starting --work /dev/shm --ahead with without --until-first-step
    python -m benchmarks.starting --out results/starting --stages 2 --shape mistral-24b    # two GPUs, 50 GB of files
    python -m benchmarks.starting --out results/starting --stages 4 --shape llama-70b --repeats 10 --until-first-step
    python -m benchmarks.starting --out /tmp/try --small                     # in miniature on a CPU, to try the script

Writes a model: one layer is drawn, the others have the same bytes under their own names. The files are in the page
cache then. The same job starts twice with a cache of its own, which is empty at first, for each number of layers and
each way to store the base. `starting.jsonl` has the seconds of each command until its first optimizer step, and what
the run says about its parts. Variants that would begin after `--seconds` are left out. With `--ahead with without` the
cold start is repeated without the processes that compile beside the run, and a table of phases follows each start.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.conditions import conditions
from benchmarks.harness import add_row, command_line
from benchmarks.random_base import write_base
from benchmarks.random_job import SMALL, write_data
from lorafusion_jax.checkpoint.begun_folder import read_start
from lorafusion_jax.signals import INTERRUPTED

SHAPES = {
    "qwen3-8b": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_layers": 36, "num_heads": 32,
        "num_kv_heads": 8, "head_dim": 128, "rope_theta": 1e6,
    },
    "mistral-24b": {
        "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768, "num_layers": 40, "num_heads": 32,
        "num_kv_heads": 8, "head_dim": 128, "rope_theta": 1e8,
    },
    "llama-70b": {
        "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_layers": 80, "num_heads": 64,
        "num_kv_heads": 8, "head_dim": 128, "rope_theta": 5e5,
    },
}  # fmt: skip
NAMES = ("a", "b", "c", "d")
WITHOUT = (
    "from lorafusion_jax.session import ahead; ahead.CORES = 10**6; from lorafusion_jax.__main__ import main; main()"
)
POLL_S = 0.05


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--work", type=Path, help="where files of the model are written; default: the system's folder")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-8b")
    parser.add_argument("--layers", type=int, nargs="*", help="numbers of layers, as many as the model has or fewer")
    parser.add_argument("--quantize", nargs="*", default=["none"])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--ahead", nargs="*", choices=("with", "without"), default=["with"], help="of cold starts")
    parser.add_argument("--repeats", type=int, default=1, help="cold starts, each with an empty cache")
    parser.add_argument("--until-first-step", action="store_true", help="stop each run then")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    shape, began = SMALL if options.small else SHAPES[options.shape], time.monotonic()
    for layers in options.layers or [shape["num_layers"]]:
        with tempfile.TemporaryDirectory(prefix="starting_", dir=options.work) as folder:
            work = Path(folder)
            write_base(work / "base", shape, layers)
            size_gb = round(sum(file.stat().st_size for file in (work / "base").glob("*.safetensors")) / 1e9, 2)
            for quantize in options.quantize:
                write_job(work, options, quantize)
                cold = [("empty", ahead, repeat) for repeat in range(options.repeats) for ahead in options.ahead]
                filled = ("filled", options.ahead[-1], options.repeats - 1)  # by the last cold start
                for cache, ahead, repeat in [*cold, filled]:
                    if time.monotonic() - began > options.seconds:
                        return 0
                    row = {"shape": options.shape, "layers": layers, "stages": options.stages, "quantize": quantize}
                    row |= {"cache": cache, "ahead": ahead, "repeat": repeat, "gb": size_gb}
                    run = work / f"run_{quantize}_{cache}_{ahead}_{repeat}"
                    folder = work / f"cache_{quantize}_{ahead}_{repeat}"
                    row |= start(work / "jobs.yaml", run, folder, ahead=ahead, stop=options.until_first_step)
                    row |= conditions()
                    print(phase_table(row), flush=True)
                    add_row(options.out / "starting.jsonl", row)
    return 0


def write_job(work: Path, options: argparse.Namespace, quantize: str) -> None:
    tokenizer = Path(__file__).parent.parent / "examples" / "base"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (work / "base" / name).write_bytes((tokenizer / name).read_bytes())
    longest = 128 if options.small else 4096
    for name in NAMES:
        write_data(work / f"{name}.jsonl", longest / 5, longest / 8, 16, tokenizer / "tokenizer.json", longest)
    job = {
        "base": {"model": "base", "quantize": quantize},
        "data": {"max_length": longest},
        "batch": {"capacity_tokens": 2 * longest, "tile_tokens": 16 if options.small else 128, "global_samples": 8},
        "mesh": {"stages": options.stages},
        "train": {"max_steps": 2, "log_every_s": 0},
        "lora": {"rank": 16, "dropout": 0.1},
        "adapters": [{"name": name, "data": {"train": f"{name}.jsonl", "eval": f"{name}.jsonl"}} for name in NAMES],
    }
    (work / "jobs.yaml").write_text(yaml.safe_dump(job))


def start(job: Path, run: Path, cache: Path, *, ahead: str, stop: bool) -> dict:
    """Runs the command with a cache of its own; `stop` ends it after the first optimizer step."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    program = ["-m", "lorafusion_jax"] if ahead == "with" else ["-c", WITHOUT]
    began, phases, stopped = time.time(), {}, False
    process = subprocess.Popen(
        [sys.executable, *program, "train", str(job), "--out", str(run)],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    while process.poll() is None:
        if (begun := read_start(run)) is not None:
            phases.setdefault(begun["phase"], round(begun["phase_began"] - began, 2))
        elif stop and not stopped and _steps(run):
            process.send_signal(signal.SIGINT)
            stopped = True
        time.sleep(POLL_S)
    if process.returncode not in (0, INTERRUPTED):
        return {"exit_code": process.returncode, "phases": phases}
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (started,) = (event for event in events if event["kind"] == "started-up")
    return {
        "first_step_s": round(min(_steps(run)) - began, 1),
        "command_s": round(time.time() - began, 1),
        "start_up_began_s": round(started["time"] - began - started["seconds"], 2),
        "phases": phases,
        "parts": started,
    }


def _steps(run: Path) -> list[float]:
    """When the optimizer steps of a run were."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [row["time"] for row in map(json.loads, lines) if row["kind"] == "step"]
    except (OSError, ValueError):  # not there yet, or its last line is being written
        return []


def phase_table(row: dict) -> str:
    """The phases and parts of a start, in seconds from the command."""
    title = f"{row['cache']} cache, {row['ahead']} processes beside the run"
    if "exit_code" in row:
        return f"{title}: exit code {row['exit_code']}"
    first, parts = row["start_up_began_s"], row["parts"]
    lines = [(at, None, text) for text, at in row["phases"].items()]
    lines += [(first + begin, first + end, name) for name, (begin, end) in parts["parts"].items()]
    lines.append((row["first_step_s"], None, "first optimizer step"))
    lines.sort(key=lambda line: line[0])
    shown = [f"  {at:7.2f} {'' if end is None else f'{end:7.2f}':7}  {text}" for at, end, text in lines]
    counts = {name: parts[name] for name in ("compiled", "from_cache", "lowering_s", "compiling_s")}
    return "\n".join([title, *shown, f"  {counts}", f"  failed beside the run: {parts.get('ahead_failures', {})}"])


if __name__ == "__main__":
    sys.exit(main())
