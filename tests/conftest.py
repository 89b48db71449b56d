"""A tiny random base model and small job files, shared by the tests that train."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lorafusion_jax.examples import examples_directory

WORDS = [
    "adapter",
    "base",
    "batch",
    "bias",
    "cache",
    "file",
    "graph",
    "kernel",
    "layer",
    "loss",
    "mask",
    "model",
    "norm",
    "plan",
    "rank",
    "row",
    "scale",
    "shard",
    "slot",
    "tile",
]


def pytest_configure() -> None:
    """Eight simulated devices on the CPU, before anything starts a backend: layouts are tested everywhere."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory):
    """Keeps token and program caches out of the user's, and lets equal programs compile once per session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def quick_compiles(own_caches):
    """Programs of tiny models: compiling is all of the time, so most optimizations are off and results are kept."""
    import jax
    import platformdirs

    def use(most: bool, folder: str | None, seconds: float) -> None:
        jax.config.update("jax_disable_most_optimizations", most)
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)

    use(True, platformdirs.user_cache_dir("lorafusion") + "/programs", 0.1)
    yield
    use(False, None, 1.0)


def write_base(directory: Path, **changes) -> Path:
    """Writes an HF directory of a random tiny model with the tokenizer of the examples."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from lorafusion_jax.models import Decoder, ModelConfig, save_decoder

    shape = {
        "family": "llama",
        "vocab_size": 3072,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "tie_embeddings": True,
    }
    with jax.default_device(jax.local_devices()[0]):
        model = Decoder(ModelConfig(**(shape | changes)), dtype=jnp.float32, rngs=nnx.Rngs(0))
    save_decoder(model, directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(examples_directory() / "base" / name, directory / name)
    return directory


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory) -> Path:
    """A random 2-layer model with tied embeddings."""
    return write_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="session")
def deep_base(tmp_path_factory) -> Callable[..., Path]:
    """Random models of 5 layers, with tied embeddings or without: enough for four uneven stages."""
    folder = tmp_path_factory.mktemp("deep")
    return {
        tied: write_base(folder / f"tied-{tied}", num_layers=5, tie_embeddings=tied, vocab_size=3072)
        for tied in (True, False)
    }.__getitem__


@pytest.fixture
def write_rows(tmp_path) -> Callable[..., str]:
    """Writes prompt/completion rows of different lengths; returns the file's name."""

    def write(name: str, count: int, seed: int = 0, longest: int = 24) -> str:
        draw = random.Random(f"{name}-{seed}")
        rows = [
            {
                "prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, longest))),
                "completion": " " + " ".join(draw.choices(WORDS, k=draw.randint(1, longest))),
            }
            for _ in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"{name}.jsonl"

    return write


@pytest.fixture
def write_job(tmp_path, tiny_base) -> Callable[..., Path]:
    """Writes a job file for the tiny base; sections are keyword arguments. JSON is YAML."""

    def write(adapters: list[dict], **sections) -> Path:
        job = {
            "base": {"model": str(tiny_base), "dtype": "float32"},
            "data": {"max_length": 64},
            "batch": {"capacity_tokens": 128, "tile_tokens": 16},
            "train": {"log_every_s": 0},
        } | sections
        path = tmp_path / "jobs.yaml"
        path.write_text(json.dumps(job | {"adapters": adapters}))
        return path

    return write
