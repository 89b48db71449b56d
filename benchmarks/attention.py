"""Packed causal attention on a GPU: correctness and times of our kernels, cuDNN and XLA.

    python -m benchmarks.attention --out benchmarks/results/attention_h200_2026-11-24 --budget 200

Writes one JSON line per result at once; a failing variant leaves a line with its error. Times are medians in
microseconds over rounds in random order. `floor_us` is the time of the unmasked pairs at 600 TFLOP/s.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import command_line
from benchmarks.measured_code import write_measured
from lorafusion_jax.models import Segments, attention
from lorafusion_jax.models.attention.api import hopper_backward, hopper_forward, triton_backward, triton_forward
from lorafusion_jax.models.attention.cudnn import cudnn_backward, cudnn_forward
from lorafusion_jax.models.attention.rule import ScoreRule
from pallas_kernels.attention import AttentionConfig, attention_backward, attention_forward, document_rows
from pallas_kernels.attention.hopper.blocks import key_blocks, query_blocks
from pallas_kernels.attention.hopper.config import TILE, Units
from pallas_kernels.attention.hopper.dkv import KEYS, dkv
from pallas_kernels.attention.hopper.dq import dq
from pallas_kernels.attention.hopper.forward import forward
from pallas_kernels.device import num_sms
from pallas_kernels.tuning.timing import time_calls

PEAK = 600e12
VARIANTS = {  # name -> settings; "rows": blocks in the order of rows; "each": one block of threads per item of work
    "default": {},
    "rows": {"rows": True},
    "each": {"each": True},
    "forward_stages_2": {"forward_stages": 2},
    "dkv_stages_3": {"dkv_stages": 3},
    "dkv_places_1": {"dkv_stages": 4, "places": 1},
    "dkv_places_1_each": {"dkv_stages": 4, "places": 1, "each": True},
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
    """Random document lengths with a tail of padding."""
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
    parser = command_line(__doc__)
    parser.add_argument("--budget", type=float, default=200, help="seconds; nothing new starts after them")
    parser.add_argument("--sections", default="check,isolation,whole,kernels")
    args = parser.parse_args()
    stop = time.monotonic() + args.budget
    device = jax.devices()[0].device_kind
    write_measured(args.out)
    with (args.out / "attention.jsonl").open("a") as file:
        for name in args.sections.split(","):
            for record in SECTIONS[name]():
                line = json.dumps({"section": name, "device": device, "jax": jax.__version__, **record})
                print(line[:300], flush=True)
                file.write(line + "\n")
                file.flush()
                if time.monotonic() > stop:
                    return


def both(forward: Callable, backward: Callable, q, k, v, do, segments):
    rule = ScoreRule(channels=q.shape[-1], scale=q.shape[-1] ** -0.5)
    o, residuals = forward(q, k, v, segments, rule)
    return o.reshape(q.shape), *backward(residuals, do, rule)


def through_facade(implementation: str, q, k, v, do, segments):
    o, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, segments, implementation=implementation), q, k, v)
    return o, *pullback(do)


RAW = {
    "cudnn": (cudnn_forward, cudnn_backward),
    "triton": (triton_forward, triton_backward),
    "pallas": (hopper_forward, hopper_backward),  # isolated by itself
}


def isolation() -> Iterator[dict]:
    """Checks that NaN or infinity in one document shows there and changes no bit of the others."""
    for implementation in ("pallas_mosaic_gpu", "pallas_triton"):
        yield from isolation_of(implementation)


def isolation_of(implementation: str) -> Iterator[dict]:
    case = CHECKS[0]
    arrays, segments = case.arrays(0), case.segments()
    run = jax.jit(functools.partial(through_facade, implementation))
    clean = run(*arrays, segments)
    row = int(segments.offsets[2]) + 5
    others = np.asarray(segments.ids) != segments.ids[row]
    for name, operand in zip(("q", "k", "v", "do"), range(4), strict=True):
        for bad in (np.nan, np.inf):
            spoiled = list(arrays)
            spoiled[operand] = spoiled[operand].at[row, 0, 3].set(bad)
            outputs = run(*spoiled, segments)
            kept = [
                bool((np.asarray(a)[others] == np.asarray(b)[others]).all())
                for a, b in zip(outputs, clean, strict=True)
            ]
            shows = [bool(jnp.isnan(a[~others]).any()) for a in outputs]
            yield {"name": f"{implementation}: {bad} in {name}", "others_keep_their_bits": kept, "nan_in_own": shows}


def check() -> Iterator[dict]:
    """Computes relative errors against float32, and whether two runs are bitwise equal."""
    for case in CHECKS:
        record = {"case": case.name, "rows": case.rows, "heads": case.heads, "documents": len(case.lengths)}
        arrays, segments = case.arrays(0), case.segments()
        exact = jax.jit(functools.partial(through_facade, "xla"))(*(x.astype(jnp.float32) for x in arrays), segments)
        for name, pair in RAW.items():
            try:
                run = jax.jit(functools.partial(both, *pair))
                outputs, again = (jax.block_until_ready(run(*arrays, segments)) for _ in range(2))
                errors = [relative(a, b) for a, b in zip(outputs, exact, strict=True)]
                same = [bool(jnp.array_equal(a, b)) for a, b in zip(outputs, again, strict=True)]
                yield record | {
                    "name": name,
                    "errors": dict(zip(("o", "dq", "dk", "dv"), errors, strict=True)),
                    "same_bits": same,
                }
            except Exception as error:  # the other variants go on
                yield record | {"name": name, "error": f"{type(error).__name__}: {error}"[:1500]}


def relative(a: jax.Array, b: jax.Array) -> float:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def whole() -> Iterator[dict]:
    """Times forward and forward + backward, with and without the NaN isolation around the kernels."""
    for case in CASES:
        segments = case.segments()
        calls = {}
        for name, pair in RAW.items():
            calls[f"{name} forward"] = lambda q, k, v, do, s, pair=pair: pair[0](q, k, v, s)[0]
            calls[f"{name} both"] = functools.partial(both, *pair)
        if case is TYPICAL:
            for name in ("cudnn", "pallas_triton", "pallas_mosaic_gpu", "xla"):
                calls[f"{name} facade"] = functools.partial(through_facade, name)
        sets = [(*case.arrays(seed), segments) for seed in (1, 2)]
        yield from timed(calls, sets, {"case": case.name, "heads": case.heads, "documents": len(case.lengths)}, case)


def kernels() -> Iterator[dict]:
    """Times every kernel separately, and with other ring depths."""
    case = TYPICAL
    segments = case.segments()
    sets = []
    for seed in (1, 2):
        q, k, v, do = case.arrays(seed)
        rows = document_rows(segments.ids, segments.offsets, segments.lengths)
        _, saved = jax.jit(attention_forward)(q, k, v, *rows)
        height = Units(group=case.heads // case.key_heads).queries
        tables = query_blocks(rows[0], height, TILE), key_blocks(rows[1], KEYS, TILE)
        tables = tuple((table, table[jnp.argsort(table[:, 0])]) for table in tables)
        sets.append((saved, do, *tables, jnp.zeros(1, jnp.int32)))
    calls = {
        "tables": lambda saved, *_: (query_blocks(saved.first_T, 64, TILE), key_blocks(saved.end_T, KEYS, TILE)),
        "backward": lambda saved, do, *_: attention_backward(saved, do),
    }
    for name, settings in VARIANTS.items():
        settings = dict(settings)
        static = {"rows": settings.pop("rows", False), "sms": 4096 if settings.pop("each", False) else num_sms()}
        static |= {"config": AttentionConfig(**settings), "scale": case.width**-0.5}
        touched = [kernel for kernel in KERNELS if kernel == name.split("_")[0]] or KERNELS
        for kernel in touched:
            calls[f"{kernel} {name}"] = functools.partial(ALONE[kernel], **static)
    yield from timed(calls, sets, {"case": case.name}, case)


# Each kernel alone; its time does not depend on the values of lse and delta.
def _forward(saved, do, queries, keys, dirty, *, rows, **static):
    q, k, v, _, _, first, _ = saved
    return forward(q, k, v, first, queries[rows], **static)


def _dq(saved, do, queries, keys, dirty, *, rows, **static):
    q, k, v, o, lse, first, _ = saved
    return dq(q, k, v, o, do, lse, first, queries[rows], **static)


def _dkv(saved, do, queries, keys, dirty, *, rows, **static):
    q, k, v, _, lse, _, end = saved
    return dkv(q, k, v, do, lse, lse, end, keys[rows], dirty, **static)


ALONE = {"forward": _forward, "dq": _dq, "dkv": _dkv}


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


SECTIONS = {"check": check, "isolation": isolation, "whole": whole, "kernels": kernels}

if __name__ == "__main__":
    main()
