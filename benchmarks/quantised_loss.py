"""Held-out loss of adapters that learnt on a quantised base, next to the same on the bfloat16 base.

    python -m benchmarks.quantised_loss --out results/quantised_loss             # a GPU, one minute
    python -m benchmarks.quantised_loss --out build/quantised_loss --small       # a CPU: to try the script

Two bases: the model of the examples, and one of 50 million parameters that `examples/make_base.py` trains here first.
Four adapters learn together on the examples' data as plain text, from the same start on the same tokens, with Adam.
`quantised_loss.csv` has a row for every base, kind and adapter:

    before, after    held-out loss
    over_bf16        after, over that of the bfloat16 base, less 1; the target is within 0.005
    cosine           of the first gradient of all adapters to that on the bfloat16 base

int8 and nf4 run as the values that a layer multiplies; fp8 multiplies 8-bit floats.

A adapters · S segments · L tokens of a segment · T = A S L
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer

from benchmarks.csv_rows import append_row
from lorafusion_jax.examples import examples_directory
from lorafusion_jax.models import Segments, load_decoder
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.modules.spec import AdapterSpec
from lorafusion_jax.weights.table import KINDS
from pallas_kernels.quantised import fp8

SCRIPTS = Path(__file__).resolve().parent.parent / "examples"
DATA = {"ask": "jsonl", "cards": "jsonl", "explain": "jsonl", "reference": "json"}
SPECS = [AdapterSpec(name=name, rank=16, alpha=32) for name in DATA]
FORMS = ("none", "fp8", "int8", "nf4")
LARGER = {"width": 640, "layers": 11}
WITHIN = 0.005


class Sizes(NamedTuple):
    """Of a step, and how long everything goes on."""

    segments: int = 8
    length: int = 256
    steps: int = 80
    held_out: int = 3  # batches, at most
    base_s: float = 12
    lr: float = 2e-3


SMALL = Sizes(segments=1, length=64, steps=3, held_out=1, base_s=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bases", nargs="+", choices=("examples", "larger"), default=["examples", "larger"])
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    sizes, began = SMALL if given.small else Sizes(), time.monotonic()
    for base in given.bases:
        folder = examples_directory() / "base" if base == "examples" else make_larger(given.out, sizes, given.small)
        for row in compare(folder, sizes):
            row = {"base": base, **row, "device": jax.devices()[0].device_kind}
            append_row(given.out / "quantised_loss.csv", row)
            print(row, flush=True)
        print(f"{time.monotonic() - began:.0f} s", flush=True)


def make_larger(out: Path, sizes: Sizes, small: bool) -> Path:
    sys.path.insert(0, str(SCRIPTS))
    make_base = importlib.import_module("make_base")
    shape = {"width": 128, "layers": 2} if small else LARGER
    told = {"out": out / "base", "tokens": out / "tokens.npz", "seconds": sizes.base_s, "lr": 1e-3, **shape}
    if small:
        told |= {"rows": 2, "row-tokens": 128, "steps": 10}
        write_few_tokens(told["tokens"])
    words = [word for name, value in told.items() for word in (f"--{name}", str(value))]
    make_base.train_base(make_base.arguments().parse_args(words))
    return out / "base"


def write_few_tokens(file: Path) -> None:
    """In place of the whole library's, which take twenty seconds to encode on a CPU of two cores."""
    tokens = np.concatenate(list(texts(examples_directory() / "base", "")))
    np.savez(file, train=tokens.astype(np.uint16), held_out=tokens[:4096].astype(np.uint16))


# --- learning ----------------------------------------------------------------------------------------------------


def compare(folder: Path, sizes: Sizes) -> list[dict[str, Any]]:
    """Rows of all kinds on one base."""
    model = load_decoder(folder, SPECS, dtype=jnp.bfloat16)
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    drawn = np.random.default_rng(0)
    lora = jax.tree.map(lambda leaf: leaf + jnp.asarray(drawn.normal(0, 0.01, leaf.shape), leaf.dtype), lora)
    train, held_out = (batches(folder, ending, sizes) for ending in ("", "_eval"))
    train, held_out = train[np.arange(sizes.steps) % len(train)], held_out[: sizes.held_out]
    program = jax.jit(partial(learn, graph, sizes))
    bases = {form: jax.jit(partial(stored, form))(frozen) for form in FORMS}

    def run(forms: tuple[str, ...]) -> dict[str, Any]:
        return {form: jax.device_get(program(lora, bases[form], train, held_out)) for form in forms}

    with ThreadPoolExecutor(2) as pool:  # two programs, compiled side by side
        found = {
            form: each for done in pool.map(run, (("none", "int8", "nf4"), ("fp8",))) for form, each in done.items()
        }
    size = sum(leaf.size for leaf in jax.tree.leaves(frozen)) / 1e6
    return [row for form in FORMS for row in rows_of(form, found[form], found["none"], {"millions": round(size, 1)})]


def rows_of(form: str, found: Any, plain: Any, told: dict[str, Any]) -> list[dict[str, Any]]:
    """Of one kind, a row for each adapter."""
    gradient, before, after = found
    cosine = float(gradient @ plain[0] / (np.linalg.norm(gradient) * np.linalg.norm(plain[0])))
    over = after / plain[2] - 1
    return [
        {
            **told, "kind": form, "adapter": name, "before": round(float(before[i]), 5),
            "after": round(float(after[i]), 5), "over_bf16": round(float(over[i]), 5), "cosine": round(cosine, 5),
            "within": bool(abs(over[i]) <= WITHIN),
        }
        for i, name in enumerate(DATA)
    ]  # fmt: skip


def learn(graph: Any, sizes: Sizes, lora: Any, frozen: Any, train: jax.Array, held_out: jax.Array):
    """First gradient, and held-out loss of every adapter before and after."""
    count = len(SPECS) * sizes.segments
    rows = count * sizes.length
    segments = Segments.from_lengths([sizes.length] * count, rows)
    positions = np.tile(np.arange(sizes.length, dtype=np.int32), count)
    context = LoRAContext.of(SPECS, list(range(len(SPECS))))

    def losses(lora, tokens):
        inputs, targets = (part.reshape(rows) for part in (tokens[..., :-1], tokens[..., 1:]))
        logits = nnx.merge(graph, lora, frozen)(inputs, positions, segments, context)
        each = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
        return each.reshape(len(SPECS), -1).mean(1)

    def evaluate(lora):
        return jax.lax.map(partial(losses, lora), held_out).mean(0)

    def step(carry, tokens):
        lora, state = carry
        gradient = slope(lora, tokens)
        changes, state = adam.update(gradient, state)
        return (optax.apply_updates(lora, changes), state), None

    adam, slope = optax.adam(sizes.lr), jax.grad(lambda lora, tokens: losses(lora, tokens).sum())
    first = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(slope(lora, train[0]))])
    (learnt, _), _ = jax.lax.scan(step, (lora, adam.init(lora)), train)
    return first, evaluate(lora), evaluate(learnt)


def stored(form: str, frozen: Any) -> Any:
    """The base with its projections' kernels as a kind stores them."""
    leaves = [
        (path, leaf.replace(_kernel(form, leaf[...])) if path[-1] == "kernel" else leaf)
        for path, leaf in nnx.to_flat_state(frozen)
    ]
    return nnx.from_flat_state(leaves)


def _kernel(form: str, kernel: jax.Array) -> Any:
    if form == "none":
        return kernel
    wide = kernel.astype(jnp.float32)
    if form == "fp8":
        return fp8.quantise(wide)
    return KINDS[form].dequantise(KINDS[form].quantise(wide), kernel.dtype)


# --- data --------------------------------------------------------------------------------------------------------


def batches(folder: Path, ending: str, sizes: Sizes) -> np.ndarray:
    """Tokens [batches, A, S, L + 1], as many as the shortest text has."""
    each = sizes.segments * sizes.length
    streams = list(texts(folder, ending))
    count = min((len(stream) - 1) // each for stream in streams)
    starts = np.arange(count * sizes.segments).reshape(count, sizes.segments) * sizes.length
    return np.stack([stream[starts[..., None] + np.arange(sizes.length + 1)] for stream in streams], axis=1)


def texts(folder: Path, ending: str):
    """The tokens of every adapter's data, one sample after the other."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, suffix in DATA.items():
        content = (examples_directory() / "data" / f"{name}{ending}.{suffix}").read_text(encoding="utf-8")
        samples = [content] if suffix == "json" else content.splitlines()
        yield np.array(tokenizer.encode("\n".join(_text(json.loads(each)) for each in samples)).ids, np.int32)


def _text(sample: Any) -> str:
    if isinstance(sample, str):
        return sample
    return " ".join(map(_text, sample.values() if isinstance(sample, dict) else sample))


if __name__ == "__main__":
    main()
