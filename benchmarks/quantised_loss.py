"""Held-out loss of adapters that learnt on a quantised base, next to the same on the bfloat16 base.

    python -m benchmarks.quantised_loss --out results/quantised_loss             # a GPU, three minutes
    python -m benchmarks.quantised_loss --out build/quantised_loss --small       # a CPU: to try the script
    python -m benchmarks.quantised_loss --out results/quantised_loss_cpu --bases larger --kinds fp8 --seeds 3 \
        --segments 4 --steps 40 --base-s 900                                     # a CPU, an hour

Two bases: the model of the examples, and one of 50 million parameters that `examples/make_base.py` trains here first.
Four adapters learn together on the examples' data as plain text, from the same start on the same tokens, with Adam.
A seed draws the start and the order of the batches. Rows of `quantised_loss.csv` are of a base, kind, seed and adapter:

    before, after    held-out loss
    over_bf16        after, over that of the bfloat16 base with the same seed, less 1
    cosine           of the first gradient of all adapters to that on the bfloat16 base

`quantised_loss_means.csv` has the means over seeds and their standard errors; the target is a mean within 0.005.

int8 and nf4 run as the values that a layer multiplies; fp8 multiplies 8-bit floats.

A adapters · S segments · L tokens of a segment · T = A S L
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from benchmarks.harness import command_line
from benchmarks.measured_code import write_measured
from benchmarks.saved_model import load_decoder
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.examples import examples_directory
from lorafusion_jax.models import Segments
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.weights.table import KINDS
from pallas_kernels.quantised import fp8

SCRIPTS = Path(__file__).resolve().parent.parent / "examples"
DATA = {"ask": "jsonl", "cards": "jsonl", "explain": "jsonl", "reference": "json"}
SPECS = [AdapterSpec(name=name, rank=16, alpha=32) for name in DATA]
FORMS = ("none", "fp8", "int8", "nf4")
FIRST = ("none", "fp8")  # int8 and nf4 run the programs of bfloat16
LARGER = {"width": 1024, "layers": 4}  # few layers compile fast
WITHIN = 0.005


class Sizes(NamedTuple):
    """Of a step, and how long everything goes on."""

    segments: int = 8
    length: int = 256
    steps: int = 80
    held_out: int = 12  # batches, at most
    base_s: float = 12
    lr: float = 2e-3
    seeds: int = 5


SMALL = Sizes(segments=1, length=64, steps=3, held_out=1, base_s=1, seeds=2)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--bases", nargs="+", choices=("examples", "larger"), default=["examples", "larger"])
    parser.add_argument("--kinds", nargs="+", choices=FORMS[1:], default=FORMS[1:], help="next to bfloat16")
    parser.add_argument("--small", action="store_true")
    for name, value in Sizes()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"default: {value}")
    given = parser.parse_args()
    write_measured(given.out)
    sizes, began = SMALL if given.small else Sizes(), time.monotonic()
    sizes = sizes._replace(**{name: value for name in sizes._fields if (value := getattr(given, name)) is not None})
    forms = ("none", *given.kinds)
    for base in given.bases:
        folder = examples_directory() / "base" if base == "examples" else make_larger(given.out, sizes, given.small)
        rows = []
        for row in compare(folder, sizes, forms):
            rows.append({"base": base, **row, "device": jax.devices()[0].device_kind})
            append_row(given.out / "quantised_loss.csv", rows[-1])
        for row in means(rows):
            append_row(given.out / "quantised_loss_means.csv", row)
            print(row, flush=True)
        print(f"{time.monotonic() - began:.0f} s", flush=True)


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over seeds, for each kind and adapter."""
    means = []
    for kind, name in dict.fromkeys((row["kind"], row["adapter"]) for row in rows):
        mine = [row for row in rows if (row["kind"], row["adapter"]) == (kind, name)]
        over, cosines = ([row[column] for row in mine] for column in ("over_bf16", "cosine"))
        means.append(
            {
                "base": mine[0]["base"], "millions": mine[0]["millions"], "kind": kind, "adapter": name,
                "seeds": len(mine), "after": round(float(np.mean([row["after"] for row in mine])), 5),
                "over_bf16": round(float(np.mean(over)), 5),
                "standard_error": round(float(np.std(over, ddof=1) / len(over) ** 0.5), 5) if len(over) > 1 else None,
                "cosine": round(float(np.mean(cosines)), 5), "within": bool(abs(np.mean(over)) <= WITHIN),
            }
        )  # fmt: skip
    return means


def make_larger(out: Path, sizes: Sizes, small: bool) -> Path:
    sys.path.insert(0, str(SCRIPTS))
    make_base = importlib.import_module("make_base")
    shape = {"width": 128, "layers": 2} if small else LARGER
    told = {"out": out / "base", "tokens": out / "tokens.npz", "seconds": sizes.base_s, "lr": 1e-3, **shape}
    if jax.default_backend() == "cpu":
        told |= {"rows": 8, "row-tokens": 512}
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


class Learnt(NamedTuple):
    """Of one kind and one seed."""

    gradient: np.ndarray  # the first, of all adapters
    before: np.ndarray  # held-out loss of every adapter
    after: np.ndarray


def compare(folder: Path, sizes: Sizes, forms: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of all seeds and kinds on one base."""
    model = load_decoder(folder, SPECS, dtype=jnp.bfloat16)
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    size = round(sum(leaf.size for leaf in jax.tree.leaves(frozen)) / 1e6, 1)
    train, held_out = (batches(folder, ending, sizes) for ending in ("", "_eval"))
    programs = compiled(graph, sizes)
    bases = {form: jax.jit(partial(stored, form))(frozen) for form in forms}
    first = [form for form in FIRST if form in forms]
    with ThreadPoolExecutor(2) as pool:  # both kinds of programs, compiled side by side
        list(pool.map(lambda form: learn(programs, sizes._replace(steps=1), lora, bases[form], train, held_out), first))
    for seed in range(sizes.seeds):
        drawn = np.random.default_rng(seed)
        start = jax.tree.map(partial(_shift, drawn), lora)
        order = np.concatenate([drawn.permutation(len(train)) for _ in range(-(-sizes.steps // len(train)))])
        learnt = {form: learn(programs, sizes, start, bases[form], train[order], held_out) for form in forms}
        for form in forms:
            yield from rows_of(form, learnt[form], learnt["none"], {"millions": size, "seed": seed})


def _shift(drawn: np.random.Generator, leaf: jax.Array) -> jax.Array:
    return leaf + jnp.asarray(drawn.normal(0, 0.01, leaf.shape), leaf.dtype)


def rows_of(form: str, learnt: Learnt, plain: Learnt, told: dict[str, Any]) -> list[dict[str, Any]]:
    """Of one kind, a row for each adapter."""
    norms = np.linalg.norm(learnt.gradient) * np.linalg.norm(plain.gradient)
    cosine = float(learnt.gradient @ plain.gradient / norms)
    return [
        {
            **told, "kind": form, "adapter": name, "before": round(float(learnt.before[i]), 5),
            "after": round(float(learnt.after[i]), 5),
            "over_bf16": round(float(learnt.after[i] / plain.after[i] - 1), 5), "cosine": round(cosine, 5),
        }
        for i, name in enumerate(DATA)
    ]  # fmt: skip


class Programs(NamedTuple):
    losses: Callable[..., jax.Array]  # lora, base, tokens -> loss of every adapter
    slope: Callable[..., Any]  # lora, base, tokens -> gradient of their sum
    update: Callable[..., Any]  # gradient, state, lora -> lora and state after a step
    start: Callable[..., Any]  # lora -> state


def compiled(graph: Any, sizes: Sizes) -> Programs:
    count = len(SPECS) * sizes.segments
    rows = count * sizes.length
    segments = Segments.from_lengths([sizes.length] * count, rows)
    positions = np.tile(np.arange(sizes.length, dtype=np.int32), count)
    context = LoRAContext.of(SPECS, list(range(len(SPECS))))

    def losses(lora, frozen, tokens):
        inputs, targets = (part.reshape(rows) for part in (tokens[..., :-1], tokens[..., 1:]))
        logits = nnx.merge(graph, lora, frozen)(inputs, positions, segments, context)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
        return nll.reshape(len(SPECS), -1).mean(1)

    def update(gradient, state, lora):
        changes, state = adam.update(gradient, state)
        return optax.apply_updates(lora, changes), state

    adam = optax.adam(sizes.lr)
    slope = jax.grad(lambda lora, frozen, tokens: losses(lora, frozen, tokens).sum())
    return Programs(jax.jit(losses), jax.jit(slope), jax.jit(update), jax.jit(adam.init))


def learn(programs: Programs, sizes: Sizes, lora: Any, frozen: Any, train: np.ndarray, held_out: np.ndarray) -> Learnt:
    def evaluate():
        return np.mean([programs.losses(lora, frozen, tokens) for tokens in held_out[: sizes.held_out]], axis=0)

    before, state = evaluate(), programs.start(lora)
    first = gradient = programs.slope(lora, frozen, train[0])
    for step in range(1, sizes.steps + 1):
        lora, state = programs.update(gradient, state, lora)
        if step < sizes.steps:
            gradient = programs.slope(lora, frozen, train[step])
    flat = np.concatenate([np.asarray(leaf, np.float32).ravel() for leaf in jax.tree.leaves(first)])
    return Learnt(flat, before, evaluate())


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
    batch_tokens = sizes.segments * sizes.length
    streams = list(texts(folder, ending))
    count = min((len(stream) - 1) // batch_tokens for stream in streams)
    starts = np.arange(count * sizes.segments).reshape(count, sizes.segments) * sizes.length
    return np.stack([stream[starts[..., None] + np.arange(sizes.length + 1)] for stream in streams], axis=1)


def texts(folder: Path, ending: str):
    """The tokens of every adapter's data, one sample after the other."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, suffix in DATA.items():
        content = (examples_directory() / "data" / f"{name}{ending}.{suffix}").read_text(encoding="utf-8")
        samples = [content] if suffix == "json" else content.splitlines()
        yield np.array(tokenizer.encode("\n".join(_text(json.loads(sample)) for sample in samples)).ids, np.int32)


def _text(sample: Any) -> str:
    if isinstance(sample, str):
        return sample
    return " ".join(map(_text, sample.values() if isinstance(sample, dict) else sample))


if __name__ == "__main__":
    main()
