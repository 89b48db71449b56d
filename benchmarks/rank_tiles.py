"""Which tiles are best for the passes of large ranks, and what would Hopper's passes over x take at these ranks?

    python -m benchmarks.rank_tiles --out benchmarks/results/rank_tiles_h200_2026-11-25      # one Hopper GPU, 2 minutes
    python -m benchmarks.rank_tiles --out /tmp/tiles --small                                 # any machine: does it run?

Every product of a decoder layer of Qwen3-8B's shape with four adapters of rank 128, 8192 tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from benchmarks.conditions import conditions
from benchmarks.ranks import RATE, SMALL, TILE, Recorder, Sizes
from pallas_kernels.linear.chunks import make_chunks
from pallas_kernels.linear.hopper.da import DropDaConfig, drop_da, drop_da_config
from pallas_kernels.linear.hopper.down import DropDownConfig, drop_down, drop_down_config
from pallas_kernels.linear.hopper.tiling import ROWS, fit
from pallas_kernels.linear.passes import load
from pallas_kernels.linear.passes.config import ExtraConfig, ExtraKind, extra_config
from pallas_kernels.tuning.timing import time_calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "rank_tiles")), help="folder of the run")
    parser.add_argument("--small", action="store_true", help="tiny shapes, a single set of tiles")
    options = parser.parse_args()
    recorder = Recorder(options.out, name="rank_tiles.jsonl")
    recorder.add(part="conditions", **conditions())
    sizes = SMALL if options.small else Sizes()
    if jax.default_backend() == "gpu":
        hopper_passes(recorder, sizes)
    sweep(recorder, sizes, options.small)
    return 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product with extra ranks, of all rows.

    Attributes:
        kind: "down" is S or dS, "up" a part of y or dx, "sums" dA or dB.
        side: "x" has masks, "dy" has none.
    """

    kind: ExtraKind
    side: str
    features: int
    rank: int  # of all its projections


def products(sizes: Sizes) -> list[Product]:
    """Those of a layer with adapters of rank 128."""
    d, f = sizes.width, sizes.inner
    inputs = ((d, 128), (d, 256), (d, 384), (f, 128))  # o; gate and up; q, k and v; down
    outputs = ((sizes.kv, 128), (d, 128), (f, 128))
    return [
        Product(kind=kind, side=side, features=features, rank=rank)
        for kind in ("down", "sums", "up")
        for side, sites in (("x", inputs), ("dy", outputs))
        for features, rank in sites
    ]


def candidates(product: Product, tokens: int) -> list[ExtraConfig]:
    masked = product.side == "x"
    base = extra_config(tokens, product.features, product.rank, TILE, kind=product.kind, masked=masked)
    if product.kind == "down":
        changes = [
            {}, {"num_stages": 4}, {"num_stages": 2}, {"block_m": 128}, {"block_m": 32, "num_stages": 4},
            {"block_t": 64, "num_warps": 4}, {"block_t": 64, "num_warps": 4, "num_stages": 4},
            {"block_t": 64, "block_m": 128, "num_warps": 4}, {"split": max(1, base.split // 2)},
            {"split": base.split * 2},
        ]  # fmt: skip
        if product.rank == 256:
            changes += [{"ranks": 256}, {"ranks": 256, "split": base.split * 2}, {"ranks": 256, "block_t": 64}]
    elif product.kind == "sums":
        changes = [
            {}, {"num_stages": 4}, {"num_stages": 2}, {"num_warps": 4}, {"sum_rows": 128}, {"sum_rows": 32},
            {"sum_rows": 128, "num_stages": 2}, {"block_m": 64, "num_warps": 4}, {"block_m": 256},
            {"blocks_per_chunk": base.blocks_per_chunk // 2}, {"blocks_per_chunk": base.blocks_per_chunk * 2},
        ]  # fmt: skip
        if product.rank == 256:
            changes += [{"ranks": 256, "block_m": 64}, {"ranks": 256}]
        for change in changes:
            if "sum_rows" in change:
                change["blocks_per_chunk"] = base.blocks_per_chunk * base.sum_rows // change["sum_rows"]
    else:
        changes = [
            {}, {"num_stages": 1}, {"num_stages": 2}, {"num_warps": 4}, {"block_t": 64, "num_warps": 4},
            {"block_m": 256}, {"block_m": 64, "num_warps": 4}, {"block_t": 64, "block_m": 256},
        ]  # fmt: skip
    return [dataclasses.replace(base, **change) for change in changes]


def sweep(recorder: Recorder, sizes: Sizes, small: bool) -> None:
    """Tiles of the three products with extra ranks; all rows have 128 of them in each projection."""
    tokens, found = sizes.tokens, {}
    listed = products(sizes)

    def compile_one(product: Product, config: ExtraConfig) -> None:
        compiled = recorder.attempt(f"{product} {config}", lambda: one_product(product, config, tokens))
        if compiled is not None:
            found[product, config] = compiled

    with ThreadPoolExecutor(14) as pool:
        for product in listed:
            for config in candidates(product, tokens)[: 1 if small else None]:
                pool.submit(compile_one, product, config)
    recorder.add(part="tiles compiled", count=len(found))
    for product in listed:
        calls = {str(config): call for (other, config), call in found.items() if other == product}
        timings = time_calls(calls, rounds=5, round_s=0.001 if small else 0.004)
        for other, config in found:
            if other == product:
                us = timings[str(config)].p50_us
                row = dataclasses.asdict(product) | {"us": round(us, 1), "config": dataclasses.asdict(config)}
                recorder.add(part="tiles", **row)


def one_product(product: Product, config: ExtraConfig, tokens: int):
    key, interpret = jax.random.key(0), jax.default_backend() != "gpu"
    features, rank, masked = product.features, product.rank, product.side == "x"

    @jax.jit
    def make():
        x, s = (jax.random.normal(key, (tokens, n), jnp.bfloat16) for n in (features, rank))
        bank = jax.random.normal(key, (4, features, rank), jnp.bfloat16)
        bits = jax.random.bits(key, (tokens, -(-features // 256), 8))
        return x, s, bank if masked else bank.swapaxes(1, 2), bits if masked else None

    x, s, bank, bits = make()

    def tables(rows):
        blocks = tokens // rows
        return (jnp.arange(blocks) * 4 // blocks).astype(jnp.int32), jnp.full(blocks, rank // 64, jnp.int32)

    def down(x, s, bank, bits):
        owner, active = tables(config.block_t)
        return load().extra_down(
            x, bank, owner, active, bits, transposed=not masked, config=config, interpret=interpret
        )

    def up(x, s, bank, bits):
        owner, active = tables(config.block_t)
        return load().extra_up(
            None, s, bank, owner, active, bits, first=0, stride=1, transposed=masked, config=config, interpret=interpret
        )

    def sums(x, s, bank, bits):
        owner, _ = tables(config.sum_rows)
        chunks = make_chunks(owner, 4, config.blocks_per_chunk, single=False)
        active = jnp.full(chunks.adapter.shape, rank // 64, jnp.int32)
        chunks = dataclasses.replace(chunks, count=jnp.where(chunks.adapter < 4, chunks.count, 0))
        return load().extra_sums(x, s, chunks, active, bits, config=config, interpret=interpret)

    work = {"down": down, "up": up, "sums": sums}[product.kind]
    fn = jax.jit(work).lower(x, s, bank, bits).compile()
    jax.block_until_ready(fn(x, s, bank, bits))
    return fn, [(x, s, bank, bits)]


# --- Hopper's passes over x at these ranks -----------------------------------------------------------------------


def hopper_passes(recorder: Recorder, sizes: Sizes) -> None:
    """What the passes of small ranks take at large ones: S with keep bits, and dA with the low-rank part of dx."""
    found = {}

    def compile_one(features: int, rank: int, config: DropDownConfig | DropDaConfig) -> None:
        name = f"{type(config).__name__} {features} {rank} {config}"
        compiled = recorder.attempt(name, lambda: one_hopper_pass(config, sizes.tokens, features, rank))
        if compiled is not None:
            found[features, rank, config] = compiled

    with ThreadPoolExecutor(14) as pool:
        for features, rank in ((sizes.width, 128), (sizes.width, 256), (sizes.inner, 128)):
            for config in hopper_candidates(sizes.tokens, features, rank):
                if fit(config, rank) == config:
                    pool.submit(compile_one, features, rank, config)
    timings = time_calls({str(key): call for key, call in found.items()}, rounds=5, round_s=0.004)
    for key in found:
        features, rank, config = key
        own = dataclasses.asdict(config)
        us = round(timings[str(key)].p50_us, 1)
        recorder.add(part="hopper", kind=type(config).__name__, features=features, rank=rank, us=us, config=own)


def hopper_candidates(tokens: int, features: int, rank: int) -> list[DropDownConfig | DropDaConfig]:
    down, da = drop_down_config(tokens, features), drop_da_config(tokens, features, rank)
    downs = [
        {"split_k": split, "block_k": width, "stages": stages}
        for split in (down.split_k, 2 * down.split_k)
        for width, stages in ((128, 2), (128, 3), (64, 3), (64, 4))
    ]
    das = [
        {"blocks_per_chunk": size, "block_k": width, "stages": stages}
        for size in (da.blocks_per_chunk, da.blocks_per_chunk // 2)
        for width, stages in ((128, 2), (128, 3), (64, 2), (64, 3))
        if width * rank <= 2**14
    ]
    return [dataclasses.replace(down, **each) for each in downs] + [dataclasses.replace(da, **each) for each in das]


def one_hopper_pass(config: DropDownConfig | DropDaConfig, tokens: int, features: int, rank: int):
    @jax.jit
    def make():
        key = jax.random.key(0)
        x, ds = (jax.random.normal(key, shape, jnp.bfloat16) for shape in ((tokens, features), (rank, tokens)))
        bank = jax.random.normal(key, (5, rank, features), jnp.bfloat16)
        return x, ds, bank, jax.random.bits(key, (tokens, features // 256, 8))

    blocks = tokens // ROWS
    owner = (jnp.arange(blocks) * 4 // blocks).astype(jnp.int32)
    numbers = jnp.arange(4, dtype=jnp.uint32)
    dropout = pk.Dropout(rate=jnp.full(4, RATE), key=numbers, row_key=jnp.arange(tokens, dtype=jnp.uint32))

    def run(x, ds, bank, bits):
        if isinstance(config, DropDownConfig):
            return drop_down(x, bank, owner, dropout, config=config)
        chunks = make_chunks(owner, 4, config.blocks_per_chunk, single=False)
        return drop_da(x, ds, bits, chunks, bank, rank=rank, config=config)

    given = make()
    fn = jax.jit(run).lower(*given).compile()
    jax.block_until_ready(fn(*given))
    return fn, [given]


if __name__ == "__main__":
    sys.exit(main())
