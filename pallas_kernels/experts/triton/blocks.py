"""How the products of experts are cut, and the low-rank term of a tile that may have rows of several adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import shared_memory_bytes
from pallas_kernels.triton_call import dot


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How the frozen product is cut: most columns of a program, contracted features of a step, and Triton's numbers."""

    columns: int = 256
    depth: int = 64
    num_warps: int = 8
    num_stages: int = 3

    def shared_bytes(self, tile: int, item: int) -> int:
        """Shared memory of a program."""
        return self.num_stages * self.depth * (tile + self.columns) * item


# Fastest first, on an H200. Low-rank terms in a tile of 256 columns leave room for one program at a time.
CUTS = (Blocks(), Blocks(columns=128), Blocks(columns=128, num_stages=2), Blocks(columns=128, depth=32, num_stages=2))
# Of 8-bit floats: as many bytes in a step.
FP8_CUTS = (Blocks(depth=128), Blocks(columns=128, depth=128), Blocks(columns=128, depth=128, num_stages=2))


def fastest_blocks(tile: int, item: int, cuts: Sequence[Blocks] = CUTS) -> Blocks:
    """The first of the cuts that fits into the device's shared memory.

    >>> fastest_blocks(128, 2).columns
    256
    """
    return next((blocks for blocks in cuts if blocks.shared_bytes(tile, item) <= shared_memory_bytes()), cuts[-1])


def add_low_rank(
    acc: jax.Array, number: jax.Array, own_rows: Any, own_columns: Any, experts: int, refs: list[Any], *,
    transposed: bool,
) -> jax.Array:  # fmt: skip
    """Adds each adapter's product to its rows of a tile.

    Rows of others get zero times its bank, so values of the bank that are not finite are cut out before, and what they
    reach of its own rows is NaN. To select the product would take a second accumulator, and half as many programs fit.
    """
    low_ref, bank_ref, tile_segment_ref, segment_run_ref, start_ref, stop_ref = refs
    runs_of_expert = len(start_ref) // experts

    def add(segment, acc):
        run = segment_run_ref[segment]
        pair = run % runs_of_expert * experts + run // runs_of_expert
        inside = lambda width: is_inside(own_rows.start, (len(acc), width), start_ref[run], stop_ref[run])  # noqa: E731
        s_tile = jnp.where(inside(low_ref.shape[1]), low_ref[own_rows, :], 0)
        bank = bank_ref[pair, own_columns, :] if transposed else bank_ref[pair, :, own_columns]
        finite = jnp.abs(bank.astype(jnp.float32)) < jnp.inf
        acc = acc + dot(s_tile, jnp.where(finite, bank, 0), trans_rhs=transposed)
        broken = jnp.where(finite, 0, 1).max(1 if transposed else 0) > 0
        return jnp.where(inside(1) & broken[None, :], jnp.nan, acc)

    return lax.fori_loop(tile_segment_ref[number], tile_segment_ref[number + 1], add, acc)


def is_inside(row0: jax.Array, shape: tuple[int, int], start: jax.Array, stop: jax.Array) -> jax.Array:
    row = row0 + lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= start) & (row < stop)
