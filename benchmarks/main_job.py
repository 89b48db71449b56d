"""The main job at full size from the command line: a random Llama-3.1-8B-shaped model and four adapters.

    python -m benchmarks.main_job --out results-folder            # one GPU with 80 GB or more, about 5 minutes
    python -m benchmarks.main_job --out /tmp/try --small          # a miniature on a CPU, to try the script

Weights and words are random: speed and memory are those of the real model, losses are meaningless. Writes one JSON row
with tokens/s, peak device memory, compile and load times, and the run's own metrics.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rope_theta": 500000.0,
}
SMALL = {
    "vocab_size": 3072,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}
WRITE = """
import sys, json, jax.numpy as jnp
from flax import nnx
from lorafusion_jax.models import Decoder, ModelConfig, RopeScaling, save_decoder
shape = json.loads(sys.argv[2])
scaling = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
config = ModelConfig(family="llama", rope_scaling=scaling, max_positions=131072, **shape)
save_decoder(Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), sys.argv[1], shard_bytes=5 * 2**30)
"""
ADAPTERS = [  # different rank, alpha, dropout, lr and batch; lengths like three summarisation sets and their mix
    ("xsum", 540, 380, {"rank": 16, "alpha": 32, "dropout": 0.1}, 1e-4, 8),
    ("cnn", 950, 430, {"rank": 32, "alpha": 32, "dropout": 0.05}, 2e-4, 8),
    ("wiki", 1900, 900, {"rank": 8, "alpha": 16, "dropout": 0.0}, 3e-4, 4),
    ("mix", 800, 700, {"rank": 64, "alpha": 64, "dropout": 0.1, "rslora": True}, 1e-4, 8),
]


def write_data(path: Path, mean: float, spread: float, rows: int, tokenizer_file: Path, longest: int) -> None:
    """Writes prompt/completion rows with log-normal token lengths."""
    import math

    from tokenizers import Tokenizer

    tokenizer, draw = Tokenizer.from_file(str(tokenizer_file)), random.Random(path.name)
    words = [word for word in (tokenizer.decode([i]).strip() for i in range(300, 3000)) if word.isalpha()]
    variance = math.log(1 + (spread / mean) ** 2)
    with path.open("w") as file:
        for _ in range(rows):
            length = min(max(int(draw.lognormvariate(math.log(mean) - variance / 2, variance**0.5)), 32), longest)
            text = draw.choices(words, k=length)
            cut = length // 3
            file.write(json.dumps({"prompt": " ".join(text[:cut]), "completion": " " + " ".join(text[cut:])}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["train.remat=auto"],
        help="one run for each; settings joined by commas, e.g. train.remat=nothing,train.max_steps=6",
    )
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="main_job_"))
    options.out.mkdir(parents=True, exist_ok=True)
    shape, scale = (SMALL, 0.05) if options.small else (SHAPE, 1)
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", WRITE, str(work / "base"), json.dumps(shape)], check=True)
    facts = {"shape": shape, "write_model_s": round(time.perf_counter() - started, 1)}
    write_job(work, options, scale)
    rows, codes = [], []
    for number, variant in enumerate(options.variants):
        run = work / f"run{number}"
        started = time.perf_counter()
        command = [sys.executable, "-m", "lorafusion_jax", "train", str(work / "jobs.yaml"), "--out", str(run)]
        done = subprocess.run([*command, *variant.split(",")])
        codes.append(done.returncode)
        rows.append(
            {"variant": variant, "exit_code": done.returncode, "command_s": round(time.perf_counter() - started, 1)}
            | facts
            | read_run(run)
        )
        for name in ("metrics.jsonl", "run.json"):
            if (run / name).exists():
                shutil.copyfile(run / name, options.out / f"{number}_{name}")
        (options.out / "main_job.json").write_text(json.dumps(rows, indent=1))
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "shape"}, indent=1), flush=True)
    shutil.rmtree(work, ignore_errors=True)
    return max(codes)


def write_job(work: Path, options: argparse.Namespace, scale: float) -> None:
    """Writes tokenizer, data and job file next to the model."""
    tokenizer = Path(__file__).parent.parent / "examples" / "base"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, work / "base" / name)
    longest = int(4096 * scale)
    adapters = []
    for name, mean, spread, lora, lr, batch in ADAPTERS:
        write_data(
            work / f"{name}.jsonl",
            mean * scale,
            spread * scale,
            options.steps * batch,
            tokenizer / "tokenizer.json",
            longest,
        )
        adapters.append(
            {
                "name": name,
                "data": {"train": f"{name}.jsonl"},
                "lora": lora,
                "optim": {"lr": lr},
                "batch": {"global_samples": batch},
            }
        )
    capacity = int(options.capacity * scale) // 16 * 16 if options.small else options.capacity
    job = {
        "base": {"model": "base"},
        "data": {"max_length": longest},
        "batch": {"capacity_tokens": capacity, "tile_tokens": 16 if options.small else 128},
        "train": {"max_steps": options.steps},
        "adapters": adapters,
    }
    (work / "jobs.yaml").write_text(yaml.safe_dump(job))


def read_run(folder: Path) -> dict:
    from lorafusion_jax.report.recorder import read_rows
    from lorafusion_jax.report.summary import throughput

    if not (folder / "events.jsonl").exists():
        return {}
    events = {event["kind"]: event for event in read_rows(folder / "events.jsonl")}
    steps = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "step"]
    started, finished = events.get("started", {}), events.get("finished", {})
    return {
        "device": started.get("device"),
        "slots": started.get("slots"),
        "density": started.get("density"),
        "trainable": started.get("trainable"),
        "frozen": started.get("frozen"),
        "compile_s": events.get("compiled", {}).get("seconds"),
        "peak_bytes": finished.get("peak_bytes"),
        "optimizer_steps": len(steps),
        "throughput": throughput(folder),
        "versions": json.loads((folder / "run.json").read_text())["versions"],
    }


if __name__ == "__main__":
    sys.exit(main())
