"""Location of the example jobs, data sets and the tiny base model, in the sources or of a wheel."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from lorafusion_jax.files import make_folder, user_cache

if TYPE_CHECKING:
    import numpy as np

PACKAGE = Path(__file__).resolve().parent
IN_WHEEL = PACKAGE / "_examples"
WEIGHTS = "base/model.safetensors"


def examples_directory() -> Path:
    """Folder with `demo.yaml`, `data/` and `base/`.

    A wheel has no weights of the base, which would be two thirds of it. They are drawn once, into the user's cache.
    """
    return _with_weights(IN_WHEEL) if IN_WHEEL.is_dir() else PACKAGE.parent / "examples"


def _with_weights(examples: Path) -> Path:
    from lorafusion_jax.tensor_file import write_tensors

    files = {str(path.relative_to(examples)): path.read_bytes() for path in sorted(examples.rglob("*.*"))}
    folder = user_cache(f"examples-{crc32(repr((files, Path(__file__).read_bytes())).encode()):08x}")

    def is_whole() -> bool:
        return all((folder / name).is_file() for name in (*files, WEIGHTS))

    if not is_whole():
        make_folder(folder.parent)
        with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
            copy = shutil.copytree(examples, Path(parent) / "examples")
            config = json.loads((copy / "base" / "config.json").read_text("utf-8"))
            write_tensors(copy / WEIGHTS, draw_llama(config))
            if not is_whole():  # something that cleans caches took a file
                shutil.rmtree(folder, ignore_errors=True)
            try:
                copy.rename(folder)
            except OSError:  # another process was first
                if not is_whole():
                    raise
    return folder


def draw_llama(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Weights of a Llama with one matrix for embedding and head, the same ones whenever they are drawn."""
    import ml_dtypes
    import numpy as np

    width, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    layer_shapes = {
        "input_layernorm": (width,), "self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width), "self_attn.o_proj": (width, q), "post_attention_layernorm": (width,),
        "mlp.gate_proj": (mlp, width), "mlp.up_proj": (mlp, width), "mlp.down_proj": (width, mlp),
    }  # fmt: skip
    shapes = {"embed_tokens": (config["vocab_size"], width), "norm": (width,)} | {
        f"layers.{layer}.{name}": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in layer_shapes.items()
    }
    rng = np.random.default_rng(0)
    return {
        f"model.{name}.weight": (rng.normal(0, shape[1] ** -0.5, shape) if len(shape) == 2 else np.ones(shape)).astype(
            ml_dtypes.bfloat16
        )
        for name, shape in shapes.items()
    }
