"""A base of Llama-3.1-8B's shape with random weights, which several benchmarks of one machine can share.

    python -m benchmarks.random_base DIR [--small]      # 16 GB, 50 s; as often as you like: it is written once

One layer is drawn, the others have the same bytes under their own names. Its tokenizer is the examples', which has
fewer ids than the base.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes  # noqa: F401 - numpy's bfloat16, for safetensors
from safetensors.numpy import load_file, save_file

from benchmarks.random_job import SHAPE, SMALL
from lorafusion_jax.examples import examples_directory

FIRST = "model.layers.0."
INDEX = "model.safetensors.index.json"  # is written last
WRITE = """
import sys, json, pathlib, jax.numpy as jnp
from flax import nnx
from benchmarks.saved_model import save_decoder
from lorafusion_jax.models import Decoder, ModelConfig, RopeScaling
shape = json.loads(sys.argv[2])
scaling = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
config = ModelConfig(family="llama", rope_scaling=scaling, max_positions=131072, **shape)
save_decoder(Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), pathlib.Path(sys.argv[1]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    options = parser.parse_args()
    random_base(options.folder, small=options.small)
    return 0


def add_base_option(parser: argparse.ArgumentParser) -> None:
    """`--base`, for `random_base`."""
    parser.add_argument("--base", type=Path, help="a folder of `benchmarks.random_base`; default: one that is removed")


def random_base(folder: Path, *, small: bool) -> Path:
    """Writes a base with its tokenizer, if it is not there. Waits for another process that writes it.

    Raises:
        ValueError: the folder has a base of another shape.
    """
    shape = SMALL if small else SHAPE
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / INDEX).exists():
            write_base(folder, shape, shape["num_layers"])
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (folder / file).write_bytes((examples_directory() / "base" / file).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    if (config["hidden_size"], config["num_hidden_layers"]) != (shape["hidden_size"], shape["num_layers"]):
        raise ValueError(f"{folder} has a base of another shape: remove it, or name another folder")
    return folder


def write_base(base: Path, shape: dict, layers: int) -> None:
    """One layer, then copies of it under the names of the others."""
    one_layer = json.dumps(shape | {"num_layers": 1})
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", WRITE, str(base), one_layer], check=True, env=environment)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    tensors = {name: tensor for file in base.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in (*base.glob("*.safetensors"), *base.glob("*.index.json")):
        file.unlink()
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith(FIRST)}
    shards = {"rest": {name: tensor for name, tensor in tensors.items() if name not in layer}}
    for number in range(layers):
        layer_tensors = {name.replace(FIRST, f"model.layers.{number}."): tensor for name, tensor in layer.items()}
        shards[f"{number:03}"] = layer_tensors
    files = {name: f"model-{name}.safetensors" for name in shards}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: save_file(shards[name], base / files[name], metadata={"format": "pt"}), shards))
    index = {tensor: files[name] for name, tensors in shards.items() for tensor in tensors}
    total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (base / INDEX).write_text(text)


if __name__ == "__main__":
    raise SystemExit(main())
