"""Packed causal attention on a GPU: correctness and times of our kernels, cuDNN and XLA.

    python benchmarks/attention.py --out benchmarks/results/attention.jsonl --budget 200

One JSON line per finding, written at once; a variant that fails leaves a line with its error. Times are microseconds,
medians over rounds in random order; `floor_us` is the work of the visible pairs alone at 600 TFLOP/s.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from lorafusion_jax.models import Segments, attention  # noqa: E402
from lorafusion_jax.models.attention_cudnn import cudnn_backward, cudnn_forward  # noqa: E402
from lorafusion_jax.models.attention_pallas import pallas_backward, pallas_forward  # noqa: E402
from pallas_kernels.attention import AttentionConfig, attention_backward, attention_forward, document_rows  # noqa: E402
from pallas_kernels.attention.dkv import dkv  # noqa: E402
from pallas_kernels.attention.dq import dq  # noqa: E402
from pallas_kernels.attention.forward import forward  # noqa: E402
from pallas_kernels.tuning.timing import time_calls  # noqa: E402

PEAK = 600e12
VARIANTS = {
    "default": {},
    "heads_fastest": {"heads_fastest": True},
    "no_branch": {"branch": False},
    "dkv_stages_3": {"dkv_stages": 3},
    "dkv_stages_2": {"dkv_stages": 2},
    "dq_stages_3": {"dq_stages": 3},
    "dq_keys_128": {"dq_keys": 128, "dq_places": 1},
    "dq_stages_4_places_1": {"dq_stages": 4, "dq_places": 1},
    "forward_keys_64": {"forward_keys": 64, "forward_stages": 4},
}
KERNELS = ("forward", "dq", "dkv")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    lengths: tuple[int, ...]
    rows: int = 8192
    heads: int = 32
    key_heads: int = 8
    width: int = 128

    def segments(self) -> Segments:
        runs = len(self.lengths) + (sum(self.lengths) < self.rows)
        return Segments.from_lengths(self.lengths, self.rows, bucket=-(-runs // 8) * 8)

    def arrays(self, seed: int, dtype=jnp.bfloat16) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(seed), 4)
        heads = (self.heads, self.key_heads, self.key_heads, self.heads)
        return tuple(jax.random.normal(k, (self.rows, h, self.width), dtype) for k, h in zip(keys, heads, strict=True))

    def floor_us(self, backward: bool) -> float:
        lengths = [*self.lengths, self.rows - sum(self.lengths)]
        pairs = sum(n * (n + 1) / 2 for n in lengths)
        return pairs * self.heads * self.width * 2 * (7 if backward else 2) / PEAK * 1e6


def ragged(rows: int, low: int, high: int, seed: int) -> tuple[int, ...]:
    """Random lengths of documents that leave a tail of padding."""
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) + high < rows:
        lengths.append(int(rng.integers(low, high + 1)))
    return tuple(lengths)


TYPICAL = Case(name="ragged_630", lengths=ragged(8192, 520, 630, 0))
CASES = [
    TYPICAL,
    dataclasses.replace(TYPICAL, name="ragged_630_70b", heads=64),
    dataclasses.replace(TYPICAL, name="ragged_630_32b", heads=40),
    Case(name="ragged_1024", lengths=ragged(8192, 64, 1024, 1)),
    Case(name="16x512", lengths=(512,) * 16),
    Case(name="8x1024", lengths=(1024,) * 8),
    Case(name="1x8192", lengths=(8192,)),
    Case(name="64x128", lengths=(128,) * 64),
]
CHECKS = [
    *(dataclasses.replace(case, rows=2048, lengths=ragged(2048, 3, 500, seed)) for seed, case in enumerate(CASES[:3])),
    Case(name="narrow", lengths=ragged(2048, 3, 700, 5), rows=2048, width=64, heads=8, key_heads=2),
    Case(name="one_head_each", lengths=ragged(1024, 1, 90, 6), rows=1024, heads=4, key_heads=4),
    TYPICAL,
    CASES[6],
    CASES[7],
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--budget", type=float, default=200, help="seconds; nothing new starts after them")
    parser.add_argument("--sections", default="check,whole,kernels")
    args = parser.parse_args()
    stop = time.monotonic() + args.budget
    device = jax.devices()[0].device_kind
    with args.out.open("a") as file:
        for name in args.sections.split(","):
            for record in SECTIONS[name]():
                line = json.dumps({"section": name, "device": device, "jax": jax.__version__, **record})
                print(line[:300], flush=True)
                file.write(line + "\n")
                file.flush()
                if time.monotonic() > stop:
                    return


def both(forward: Callable, backward: Callable, q, k, v, do, segments):
    o, residuals = forward(q, k, v, segments)
    return o, *backward(residuals, do)


def through_facade(implementation: str, q, k, v, do, segments):
    o, pullback = jax.vjp(lambda *qkv: attention(*qkv, segments, implementation=implementation), q, k, v)
    return o, *pullback(do)


RAW = {"cudnn": (cudnn_forward, cudnn_backward), "pallas": (pallas_forward, pallas_backward)}


def check() -> Iterator[dict]:
    """Relative errors against float32, and whether two runs give the same bits."""
    for case in CHECKS:
        record = {"case": case.name, "rows": case.rows, "heads": case.heads, "documents": len(case.lengths)}
        arrays, segments = case.arrays(0), case.segments()
        exact = jax.jit(functools.partial(through_facade, "xla"))(*(x.astype(jnp.float32) for x in arrays), segments)
        for name, pair in RAW.items():
            try:
                run = jax.jit(functools.partial(both, *pair))
                found, again = (jax.block_until_ready(run(*arrays, segments)) for _ in range(2))
                errors = [relative(a, b) for a, b in zip(found, exact, strict=True)]
                same = [bool(jnp.array_equal(a, b)) for a, b in zip(found, again, strict=True)]
                yield record | {
                    "name": name,
                    "errors": dict(zip(("o", "dq", "dk", "dv"), errors, strict=True)),
                    "same_bits": same,
                }
            except Exception as error:  # one variant must not lose the others
                yield record | {"name": name, "error": f"{type(error).__name__}: {error}"[:1500]}


def relative(a: jax.Array, b: jax.Array) -> float:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def whole() -> Iterator[dict]:
    """Forward alone and forward with backward, kernels alone and with the cleaning of the facade around them."""
    for case in CASES:
        segments = case.segments()
        calls = {}
        for name, pair in RAW.items():
            calls[f"{name} forward"] = lambda q, k, v, do, s, pair=pair: pair[0](q, k, v, s)[0]
            calls[f"{name} both"] = functools.partial(both, *pair)
        if case is TYPICAL:
            for name in ("cudnn", "pallas_mosaic_gpu"):
                calls[f"{name} facade"] = functools.partial(through_facade, name)
        sets = [(*case.arrays(seed), segments) for seed in (1, 2)]
        yield from timed(calls, sets, {"case": case.name, "heads": case.heads, "documents": len(case.lengths)}, case)


def kernels() -> Iterator[dict]:
    """Every kernel alone, with other tile sizes and depths."""
    case = TYPICAL
    sets = []
    for seed in (1, 2):
        q, k, v, do = case.arrays(seed)
        s = case.segments()
        first, end = (jnp.asarray(x) for x in document_rows(s.ids, s.offsets, s.lengths))
        o, lse = jax.jit(attention_forward)(q, k, v, first)
        sets.append((q, k, v, do, o, lse, first, end))
    calls = {
        "delta": lambda q, k, v, do, o, lse, first, end: (o.astype(jnp.float32) * do.astype(jnp.float32)).sum(-1).T,
        "rows": lambda *_: document_rows(*(jnp.asarray(x) for x in (s.ids, s.offsets, s.lengths))),
        "backward": lambda q, k, v, do, o, lse, first, end: attention_backward(q, k, v, o, lse, do, first, end),
    }
    for name, settings in VARIANTS.items():
        static = {"config": AttentionConfig(**settings), "scale": case.width**-0.5}
        touched = [kernel for kernel in KERNELS if kernel == name.split("_")[0]] or KERNELS
        for kernel in touched:
            calls[f"{kernel} {name}"] = functools.partial(ALONE[kernel], static)
    yield from timed(calls, sets, {"case": case.name}, case)


# Each kernel alone on (q, k, v, do, o, lse, first, end); its time does not depend on the values of delta.
ALONE = {
    "forward": lambda static, q, k, v, do, o, lse, first, end: forward(q, k, v, first, **static),
    "dq": lambda static, q, k, v, do, o, lse, first, end: dq(q, k, v, do, lse, lse, first, **static),
    "dkv": lambda static, q, k, v, do, o, lse, first, end: dkv(q, k, v, do, lse, lse, end, **static),
}


def timed(calls: dict[str, Callable], sets: list[tuple], record: dict, case: Case) -> Iterator[dict]:
    ready = {}
    for name, call in calls.items():
        try:
            compiled = jax.jit(call)
            jax.block_until_ready(compiled(*sets[0]))
            ready[name] = compiled, sets
        except Exception as error:  # as above
            yield record | {"name": name, "error": f"{type(error).__name__}: {error}"[:1500]}
    floors = {"floor_us": case.floor_us(False), "floor_both_us": case.floor_us(True)}
    for name, result in time_calls(ready, rounds=7).items():
        yield (
            record
            | {"name": name, **{k: round(v, 1) for k, v in dataclasses.asdict(result).items()}}
            | {k: round(v, 1) for k, v in floors.items()}
        )


SECTIONS = {"check": check, "whole": whole, "kernels": kernels}

if __name__ == "__main__":
    main()
