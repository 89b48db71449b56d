"""A base, rows and a job so small that a whole run takes seconds, most of them for tracing."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

SHAPE = {
    "family": "llama",
    "vocab_size": 3072,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "tie_embeddings": True,
}
ROWS = 12


def arguments_of_a_run(description: str | None, work: str) -> argparse.ArgumentParser:
    """A parser with the folders of runs and of rows.

    Args:
        description: what the benchmark asks.
        work: help text of `--work`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help=work)
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    return parser


def write_base(folder: Path, **changes: Any) -> Path:
    """A random model of one layer with the tokenizer of the examples; starts a device.

    Args:
        changes: to its shape.
    """
    import jax.numpy as jnp
    from flax import nnx

    from benchmarks.saved_model import save_decoder
    from lorafusion_jax.examples import examples_directory
    from lorafusion_jax.models import Decoder, ModelConfig

    save_decoder(Decoder(ModelConfig(**SHAPE | changes), dtype=jnp.float32, rngs=nnx.Rngs(0)), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(examples_directory() / "base" / name, folder / name)
    return folder


def write_rows(folder: Path, name: str) -> str:
    """The first rows of one of the examples' data; returns the file's name."""
    from lorafusion_jax.examples import examples_directory

    lines = (examples_directory() / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / f"{name}.jsonl").write_text("".join(lines[:ROWS]), encoding="utf-8")
    return f"{name}.jsonl"


def write_job(folder: Path, base: Path, adapters: list[dict[str, Any]], **sections: Any) -> Path:
    """A job file of these adapters; a section replaces that of the same name."""
    job = {
        "base": {"model": str(base), "dtype": "float32"},
        "data": {"max_length": 32},
        "batch": {"capacity_tokens": 128, "tile_tokens": 32, "global_samples": 2},
        "lora": {"rank": 4, "targets": ["down_proj"]},
        "train": {"max_steps": 4, "plan_seconds": 0.01, "log_every_s": 0},
        "adapters": adapters,
    } | sections
    path = folder / "jobs.yaml"
    path.write_text(json.dumps(job), encoding="utf-8")  # JSON is YAML
    return path
