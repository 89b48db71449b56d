"""The split graph of a call: its padded banks and tables, and the passes around the products of either backend.

    forward    S = drop(x) A                      one pass over x for all projections
               y_i = x W_i + S_i (scale B_i)      inside the GEMM
    backward   dS_i = scale dY_i B_i^T, dB_i      one pass over dY_i
               dA = drop(x)^T dS                  one pass over x for all projections
               dx = sum_i dY_i W_i^T + mask (dS A^T) / keep

Ranks are padded to powers of two from 16 on, and the projections' ranks lie side by side in S and dS. Padding rows
are served by one more adapter that is zero.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import config_store
from pallas_kernels.device import device_kind, shared_memory_bytes
from pallas_kernels.dropout import inverse_keep, keep_words
from pallas_kernels.linear import passes
from pallas_kernels.linear.chunks import Chunks, make_chunks
from pallas_kernels.linear.passes.config import da_config, down_config, dsdb_config, fit_pass
from pallas_kernels.policy import joint_rank, padded_rank
from pallas_kernels.problem import Operands, Static
from pallas_kernels.sizes import row_block
from pallas_kernels.tiles import spread


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Where the ranks of each projection lie in S and dS."""

    ranks: dict[int, int]  # projection -> padded rank
    offsets: dict[int, int]
    total: int


def rank_layout(ops: Operands) -> RankLayout:
    ranks = {i: padded_rank(ops.lora(i)[0].shape[2]) for i in ops.with_lora}
    offsets, start = {}, 0
    for i in sorted(ranks, key=lambda i: -ranks[i]):  # largest first: every offset is a multiple of its rank
        offsets[i] = start
        start += ranks[i]
    return RankLayout(ranks=ranks, offsets=offsets, total=joint_rank(tuple(ranks.values())))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Tables and padded banks of one call."""

    static: Static
    ops: Operands
    layout: RankLayout

    @property
    def rows(self) -> int:
        return self.ops.x.shape[0]

    def block_adapter(self, rows: int) -> jax.Array:
        """Adapter 0..A of every block of `rows` rows."""
        if self.static.single:
            return jnp.zeros(self.rows // rows, jnp.int32)
        table = self.ops.tile_adapter
        table = jnp.where((table < 0) | (table > self.static.num_adapters), self.static.num_adapters, table)
        return spread(table, self.static.tile // rows)

    def tuned(self, kernel: str, num_in: int, num_out: int, rank: int, heuristic: Any) -> Any:
        """The measured tile sizes of this device where they clearly beat the heuristic's and fit the tiles."""
        item, drops = self.ops.x.dtype.itemsize, self.ops.dropout is not None
        key = config_store.key(kernel, self.rows, num_in, num_out, rank, dropout=drops)
        config = config_store.best_config(device_kind(), key, heuristic)
        # Tables are measured with two bytes per element: what ran then fits, but in float32 a tile is twice as large.
        if (
            item > 2
            and hasattr(config, "shared_bytes")
            and config.shared_bytes(rank, item, drops=drops) > shared_memory_bytes()
        ):
            return heuristic
        names = ("chunk", "tile_m", "block_t", "block_m")  # the first one a kernel has is what one adapter must own
        rows = next(getattr(config, name) for name in names if hasattr(config, name))
        return config if self.static.tile % rows == 0 else heuristic

    def tuned_pass(self, kernel: str, num_in: int, num_out: int, rank: int, heuristic: Any) -> Any:
        """The same for a small pass, whose heuristic is first fitted into shared memory, as the tuner measures it."""
        item, drops = self.ops.x.dtype.itemsize, self.ops.dropout is not None
        return self.tuned(kernel, num_in, num_out, rank, fit_pass(heuristic, rank, item, drops=drops))

    def chunks(self, rows: int, size: int):
        blocks = self.block_adapter(rows)
        blocks = jnp.where(blocks == self.static.num_adapters, -1, blocks)
        return make_chunks(blocks, self.static.num_adapters, size, single=self.static.single)

    def contiguous(self, rows: int, size: int) -> bool:
        return self.static.single and self.rows % (rows * size) == 0

    def bank_a(self) -> jax.Array:
        """[A (+ 1), K, R of all projections], the dropout scale folded in: serves S and dx alike."""
        pieces = [self._bank(self.ops.lora(i)[0], self.layout.ranks[i], axis=2) for i in self.layout.offsets]
        padding = self.layout.total - sum(self.layout.ranks.values())
        bank = jnp.pad(jnp.concatenate(pieces, axis=2), ((0, 0), (0, 0), (0, padding)))
        if self.ops.dropout is not None:
            bank = bank.astype(jnp.float32) * inverse_keep(self.ops.dropout.rate)[:, None, None]
        return self._finish(bank)

    def transposed_bank_a(self, multiple: int = 1) -> jax.Array:
        """[A + 1, R of all projections rounded up, K]: the same for Hopper's passes over x."""
        pieces = [self._bank(self.ops.lora(i)[0], self.layout.ranks[i], axis=2) for i in self.layout.offsets]
        dropout, total = self.ops.dropout, -(-self.layout.total // multiple) * multiple
        factor = jnp.ones_like(self.ops.scale) if dropout is None else inverse_keep(dropout.rate)
        return passes.load().transposed_bank(pieces, factor, total, self.ops.x.dtype, interpret=self.static.interpret)

    def bank_b(self, i: int) -> jax.Array:
        """[A (+ 1), R, N] of one projection, its scale folded in: serves y and dS alike."""
        bank = self._bank(self.ops.lora(i)[1], self.layout.ranks[i], axis=1)
        return self._finish(bank.astype(jnp.float32) * self.ops.scale[:, None, None])

    def _finish(self, bank: jax.Array) -> jax.Array:
        """Casts, and appends the zero adapter of padding rows where there can be some."""
        bank = bank.astype(self.ops.x.dtype)
        return bank if self.static.single else jnp.pad(bank, ((0, 1), (0, 0), (0, 0)))

    def _bank(self, bank: jax.Array, rank: int, axis: int) -> jax.Array:
        pads = [(0, 0)] * 3
        pads[axis] = (0, rank - bank.shape[axis])
        return jnp.pad(bank, pads)


def prepare(static: Static, ops: Operands) -> Prepared:
    return Prepared(static=static, ops=ops, layout=rank_layout(ops))


def keep_bits(prepared: Prepared) -> jax.Array | None:
    """Makes the packed keep bits once per call; every kernel of forward and backward reads them."""
    ops = prepared.ops
    if ops.dropout is None:
        return None
    block_t = row_block(prepared.static.tile, 64)
    if ops.dropout.first_column is not None:  # the kernels count columns from 0
        owner = jnp.clip(spread(prepared.block_adapter(block_t), block_t), 0, prepared.static.num_adapters - 1)
        return keep_words(ops.dropout, owner, ops.x.shape[1])
    return passes.load().keep_words(
        ops.dropout,
        prepared.block_adapter(block_t),
        ops.x.shape[1],
        block_t=block_t,
        interpret=prepared.static.interpret,
    )


def shared_input(prepared: Prepared, bits: jax.Array | None) -> jax.Array:
    """S of all projections, [T, R of all]."""
    static, ops = prepared.static, prepared.ops
    config = static.config.down or prepared.tuned_pass(
        "down", ops.x.shape[1], 0, prepared.layout.total,
        down_config(prepared.rows, ops.x.shape[1], prepared.layout.total, static.tile),
    )  # fmt: skip
    return passes.load().down(
        ops.x,
        prepared.bank_a(),
        prepared.block_adapter(config.block_t),
        bits,
        config=config,
        interpret=static.interpret,
    )


def output_side(prepared: Prepared, i: int, s: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Partial sums of dS [parts, T, R], and dB float32 [A, R, N], of one projection."""
    static, layout = prepared.static, prepared.layout
    config = static.config.dsdb or prepared.tuned_pass(
        "dsdb", 0, dy.shape[1], layout.ranks[i],
        dsdb_config(prepared.rows, dy.shape[1], layout.ranks[i], static.tile),
    )  # fmt: skip
    chunk_adapter = prepared.block_adapter(config.chunk)
    ds_partials, partials_CNR = passes.load().dsdb(
        dy,
        s,
        prepared.bank_b(i),
        chunk_adapter,
        rank_offset=layout.offsets[i],
        config=config,
        interpret=static.interpret,
    )
    return ds_partials, output_gradient(prepared, i, partials_CNR, chunk_adapter)


def output_gradient(prepared: Prepared, i: int, partials_CNR: jax.Array, chunk_adapter: jax.Array) -> jax.Array:
    """Adds up partial sums of dB, without the padded ranks."""
    ranks = [(0, prepared.ops.lora(i)[1].shape[1])]
    (db_ARN,) = _sum(prepared, partials_CNR, chunk_adapter, prepared.ops.scale, ranks, transposed=True)
    return db_ARN


def input_side(prepared: Prepared, ds: jax.Array, bits: jax.Array | None) -> dict[int, jax.Array]:
    """dA float32 [A, K, R] of every projection."""
    static, ops, layout = prepared.static, prepared.ops, prepared.layout
    config = static.config.da or prepared.tuned_pass(
        "da", ops.x.shape[1], 0, layout.total,
        da_config(prepared.rows, ops.x.shape[1], layout.total, static.tile),
    )  # fmt: skip
    chunks = prepared.chunks(config.block_t, config.blocks_per_chunk)
    partials_CKR = passes.load().da(
        ops.x,
        ds,
        bits,
        chunks,
        config=config,
        contiguous=prepared.contiguous(config.block_t, config.blocks_per_chunk),
        interpret=static.interpret,
    )
    return input_gradients(prepared, partials_CKR, chunks)


def input_gradients(prepared: Prepared, partials_CKR: jax.Array, chunks: Chunks) -> dict[int, jax.Array]:
    """Adds up partial sums of dA by projection, without the padded ranks."""
    ops, layout = prepared.ops, prepared.layout
    factor = jnp.ones_like(ops.scale) if ops.dropout is None else inverse_keep(ops.dropout.rate)
    parts = [(start, ops.lora(i)[0].shape[2]) for i, start in layout.offsets.items()]
    das = _sum(prepared, partials_CKR, chunks.adapter, factor, parts, transposed=False)
    return dict(zip(layout.offsets, das, strict=True))


def join_ds(
    prepared: Prepared, partials: Sequence[jax.Array], *, columns: int = 0, rows: int = 0
) -> tuple[jax.Array, ...]:
    """dS [T, columns] of all projections, side by side as S is, and dS^T [rows, T]: what is asked for.

    Args:
        partials: partial sums [parts, T, R], of one or several projections each, in the order of S.
    """
    dtype, interpret = prepared.ops.x.dtype, prepared.static.interpret
    return passes.load().join(partials, dtype, columns=columns, rows=rows, interpret=interpret)


def widest(ops: Operands) -> int:
    """The projection whose dx product also takes the low-rank part: the one with most work to hide it in."""
    return max(ops.with_lora, key=lambda i: ops.ws[i].shape[1])


def _sum(
    prepared: Prepared,
    partials: jax.Array,
    adapter: jax.Array,
    factor: jax.Array,
    parts: Sequence[tuple[int, int]],
    *,
    transposed: bool,
) -> tuple[jax.Array, ...]:
    """Adds up the partial sums in `parts` per adapter and scales them; one adapter is one plain reduction for XLA."""
    if not prepared.static.single:
        interpret = prepared.static.interpret
        return passes.load().sum_partials(partials, adapter, factor, parts, transposed=transposed, interpret=interpret)
    total = partials.sum(0)[None] * factor[:, None, None]
    slices = (total[:, :, start : start + width] for start, width in parts)
    return tuple(part.swapaxes(1, 2) if transposed else part for part in slices)
