"""What do other ways to multiply gain in a pass of decoding, with a base of bfloat16 and of fp8?

    python -m benchmarks.decode_products --out DIR [--budget 270] [--small] [--parts passes gaps]

Qwen3-8B's shape as in `benchmarks.generate`, 16 adapters of rank 16, 64 and 256 rows with 512 positions each. No prompt
is read: passes run over a cache of zeros, which costs the same. The ways take turns within one process, three times
each; `over_separate` is the separate products' time over that of a row. Ways: `joined`: all products of an input in two
launches, with fp8 in three, as decoding does with 64 rows; `unmerged`: XLA merges no products of one input, of which it
makes one slower kernel for queries, keys and values. `gaps`: log p of sampled tokens beside that of the same tokens as
a prompt, which training's kernels read. Rows are also written to DIR/decode_products.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.conditions import conditions
from benchmarks.generate import (
    ADAPTERS,
    SHAPE,
    SMALL,
    STEPS,
    guarded,
    kernel_rows,
    pass_bytes,
    random_stage,
    read_bandwidth,
)
from benchmarks.harness import add_row, command_line
from lorafusion_jax.generation import row_adapters
from lorafusion_jax.generation.choose import Choices
from lorafusion_jax.generation.engine import Engine
from lorafusion_jax.generation.passes import Passes
from lorafusion_jax.generation.programs import GenerationPrograms, Position
from lorafusion_jax.generation.requests import Request
from lorafusion_jax.generation.row_settings import RowSettings
from lorafusion_jax.generation.sampling import MODES, Sampling
from lorafusion_jax.generation.slots import Sampler
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.models.cache import BLOCK
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.weights.table import NONE

PARTS = ("passes", "gaps")
WAYS: dict[str, tuple[str, dict[str, Any]]] = {  # backend, options of the compiler
    "separate": (row_adapters.SEPARATE, {}),
    "joined": (row_adapters.NAME, {}),
    "unmerged": (row_adapters.SEPARATE, {"xla_gpu_dot_merger_threshold_mb": 0}),
}
GAPS = ("joined", "separate")
TURNS, CALLS = 3, 3  # of each way, and calls of STEPS passes in a turn


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--budget", type=float, default=270.0, help="seconds; nothing new starts after them")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    stop = time.monotonic() + options.budget
    for row in _rows(options.small, options.parts):
        add_row(options.out / "decode_products.jsonl", row | {"left_s": round(stop - time.monotonic(), 1)})
        if time.monotonic() > stop:
            break
    return 0


def _rows(small: bool, parts: Any) -> Iterator[dict[str, Any]]:
    yield {"section": "conditions", **conditions()}
    adapters, filled, few, many = (4, 24, 8, 16) if small else (ADAPTERS, 512, 64, 256)
    config = ModelConfig(family="qwen3", qk_norm=True, **(SMALL if small else SHAPE))
    bandwidth = read_bandwidth(2**24 if small else 2**32)
    yield {"section": "read", "gb_per_s": bandwidth / 1e9}
    stages = dict[str, Stage]()
    programs = dict[str, dict[str, GenerationPrograms]]()  # by base and way
    for rows, base in ((few, "bf16"), (few, "fp8"), (many, "bf16"), (many, "fp8")):
        if base not in stages:
            stages[base] = random_stage(config, adapters, jnp.bfloat16, NONE if base == "bf16" else base)
            programs[base] = {way: GenerationPrograms(stages[base], options) for way, (_, options) in WAYS.items()}
        if "passes" in parts:
            ways = ["separate", "joined" if rows == few else "unmerged"]
            timed = _pass_rows(stages[base], {way: programs[base][way] for way in ways}, base, rows, filled, bandwidth)
            yield from guarded(f"{base}, {rows} rows", timed)
        if "gaps" in parts and (rows, base) == (many, "bf16"):
            yield from guarded("gaps", _gap_rows(stages[base], programs[base]["separate"], few, filled))


def _pass_rows(
    stage: Stage, programs: dict[str, GenerationPrograms], base: str, rows: int, filled: int, bandwidth: float
) -> Iterator[dict[str, Any]]:
    """Times the ways in turns, then the kernels of each."""
    adapters = len(stage.parts.specs)
    runs = {way: _pass(stage, way, programs[way], rows, filled) for way in programs}
    times: dict[str, list[float]] = {way: [] for way in runs}
    for turn in range(1 + TURNS):
        for way, run in runs.items():
            began = time.perf_counter()
            run()
            if not turn:
                yield {"section": "first", "base": base, "rows": rows, "way": way, "s": time.perf_counter() - began}
                continue
            for _ in range(CALLS):
                began = time.perf_counter()
                run()
                times[way].append((time.perf_counter() - began) / STEPS)
    total = pass_bytes(stage, adapters, float(rows * (filled - STEPS // 2)))
    pass_s = {way: float(np.median(seconds)) for way, seconds in times.items()}
    for way, seconds in pass_s.items():
        yield {
            "section": "pass", "base": base, "rows": rows, "way": way, "pass_ms": 1e3 * seconds,
            "least_ms": 1e3 * min(times[way]), "most_ms": 1e3 * max(times[way]), "pass_gb": total / 1e9,
            "bound_ms": 1e3 * total / bandwidth, "of_bound": total / bandwidth / seconds,
            "over_separate": pass_s["separate"] / seconds,
        }  # fmt: skip
    for way, run in runs.items():
        yield from kernel_rows(f"{base}, {way}", rows, run)


def _pass(stage: Stage, way: str, programs: GenerationPrograms, rows: int, filled: int) -> Callable[[], None]:
    """A function that runs and awaits some passes."""
    adapters, blocks = len(stage.parts.specs), -(-filled // BLOCK)
    passes = Passes([stage], [programs], slots=adapters, rows=rows, blocks=rows * blocks)
    specs = dict(stage.occupied)
    passes.hold([Sampler(number=n, adapter=n, name=specs[n].name, spec=specs[n]) for n in range(adapters)])
    assert all(passes.put(number, number) for number in range(adapters))
    slots = np.arange(rows, dtype=np.int32) % adapters
    at = Position(
        np.full(rows, filled - STEPS - 1, np.int32), np.full(rows, blocks * BLOCK, np.int32), slots,
        np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks),
    )  # fmt: skip
    zeros = np.zeros(rows, np.float32)
    choices = Choices(zeros, zeros.astype(np.int32), zeros + 1, zeros, np.zeros((rows, 2), np.uint32))
    settings = RowSettings(number_B=zeros.astype(np.int32), slot_B=slots, choices=choices, mode=MODES[0])

    def run() -> None:
        row_adapters.NAME = WAYS[way][0]  # is read when a program is traced
        passes.next_tokens(STEPS, at, settings)
        jax.block_until_ready(passes.newest)

    return run


def _gap_rows(stage: Stage, programs: GenerationPrograms, rows: int, filled: int) -> Iterator[dict[str, Any]]:
    """Samples in each way, and reads prompts and answers as prompts: of shapes that `_pass_rows` has compiled."""
    adapters, prompt, new = len(stage.parts.specs), filled * 3 // 4, filled // 4
    blocks = rows * -(-filled // BLOCK)
    engine = Engine([stage], rows=rows, slots=adapters, blocks=blocks, programs=[programs], steps=STEPS)
    samplers, draw = [engine.snapshot(adapter) for adapter in range(adapters)], np.random.default_rng(3)
    prompts = draw.integers(1, engine.model.vocab_size, (rows, prompt)).tolist()

    def answers(requests: list[Request]) -> list[Any]:
        submitted = [engine.submit(request) for request in requests]
        while engine.busy:
            engine.step()
        return submitted

    for way in GAPS:
        row_adapters.NAME = WAYS[way][0]
        programs.next_inputs.clear_cache()  # programs of prompts do not depend on the way, and stay
        began = time.perf_counter()
        settings = [Sampling(max_tokens=new, temperature=1.0, seed=seed, stop_tokens=()) for seed in range(rows)]
        pairs = list(zip(prompts, settings, strict=True))
        samples = answers(
            [Request(tokens=t, sampler=samplers[i % adapters], sampling=s) for i, (t, s) in enumerate(pairs)]
        )
        scored = answers([
            Request(
                tokens=[*tokens, *sample.tokens],
                sampler=samplers[i % adapters],
                sampling=Sampling(max_tokens=0, prompt_logprobs=0, prompt_last=new),
            )
            for i, (tokens, sample) in enumerate(zip(prompts, samples, strict=True))
        ])  # fmt: skip
        gaps = np.concatenate([
            np.abs(np.array(sample.logprobs) - np.array(score.prompt_logprobs[-len(sample.logprobs) :], float))
            for sample, score in zip(samples, scored, strict=True)
        ])  # fmt: skip
        yield {
            "section": "gap", "way": way, "rows": rows, "tokens": len(gaps), "gap_median": float(np.median(gaps)),
            "gap_99": float(np.quantile(gaps, 0.99)), "gap_max": float(gaps.max()), "s": time.perf_counter() - began,
        }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
