"""Which sizes suit the kernel that multiplies an input of decoding by its siblings' weights and the A of all adapters?

    python -m benchmarks.decode_tiles --out DIR [--budget 120] [--small]

64 rows, 16 adapters of rank 16, the inputs of a layer of Qwen3-8B; weights of bfloat16 and of 8-bit floats. Some copies
of the weights, more than the cache of an H200 holds, are multiplied after each other. "xla": the same products by XLA,
which widens 8-bit weights. Rows are also written to DIR/decode_tiles.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.conditions import conditions
from benchmarks.generate import ADAPTERS, RANK, guarded
from benchmarks.harness import write_within_budget
from pallas_kernels.decoding.row_sums import Low, RowSumsConfig, row_sums

ROWS, COPIES = 64, 8
INPUTS = {  # in features, and out features of siblings
    "gate, up": (4096, (12288, 12288)),
    "down": (12288, (4096,)),
    "q, k, v": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
}
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"num_stages": 6},
    {"fill": 1.5},
    {"width": 64, "num_stages": 6},
    {"num_warps": 8},
    {"depth": 128, "num_stages": 3},
)


def main() -> int:
    return write_within_budget("decode_tiles", __doc__ or "", 120, _rows)


def _rows(small: bool) -> Iterator[dict[str, Any]]:
    yield {"section": "conditions", **conditions()}
    for name, (features, outs) in INPUTS.items():
        for base in ("bf16", "fp8"):
            shrink = 16 if small else 1
            yield from _rows_of(name, base, features // shrink, [out // shrink for out in outs], 1 if small else COPIES)


def _rows_of(name: str, base: str, features: int, outs: list[int], copies: int) -> Iterator[dict[str, Any]]:
    def weight(columns: int) -> jax.Array:
        if base == "bf16":
            return jnp.ones((features, columns), jnp.bfloat16)
        return jnp.ones((columns, features), jnp.float8_e4m3fn)

    x, slots = jnp.ones((ROWS, features), jnp.bfloat16), jnp.arange(ROWS, dtype=jnp.int32) % ADAPTERS
    banks = [
        ([weight(n) for n in outs], [jnp.ones((features, ADAPTERS * RANK), jnp.bfloat16) for _ in outs])
        for _ in range(copies)
    ]

    def by_xla(x: Any, banks: Any) -> Any:
        ws = [[w if base == "bf16" else w.T.astype(x.dtype) for w in ws] + as_ for ws, as_ in banks]
        return [[jnp.matmul(x, w, preferred_element_type=jnp.float32) for w in siblings] for siblings in ws]

    def by_kernel(config: RowSumsConfig) -> Callable[[Any, Any], Any]:
        def run(x: Any, banks: Any) -> Any:
            rounded = None if base == "bf16" else x.astype(jnp.float16)
            lows = lambda as_: [Low(a, RANK, RANK * i) for i, a in enumerate(as_)]  # noqa: E731
            return [row_sums(x, ws, lows(as_), slots, rounded_TK=rounded, config=config) for ws, as_ in banks]

        return run

    ways = {"xla": by_xla} | {str(sizes): by_kernel(RowSumsConfig(**sizes)) for sizes in CONFIGS}
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(banks))
    for way, function in ways.items():
        for row in guarded(way, _timed(jax.jit(function), x, banks)):
            rates = {"us": row["us"] / copies, "gb_per_s": read / 1e3 / row["us"]} if "us" in row else {}
            yield {"section": "tiles", "input": name, "base": base, "way": way} | row | rates


def _timed(run: Callable[..., Any], *arguments: Any) -> Iterator[dict[str, Any]]:
    """Microseconds of a call."""
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - began)
    yield {"us": 1e6 * min(times)}


if __name__ == "__main__":
    raise SystemExit(main())
