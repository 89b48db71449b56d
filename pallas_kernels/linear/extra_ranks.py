"""Ranks beyond those that the fused kernels take: LoRA of rank 128 is LoRA of its first 16 ranks and of 112 more.

The fused kernels serve the first ranks of all adapters, or none where all adapters have large ranks.  The extra ones
add their part to what those return, visiting only the row tiles whose adapter has any:

    forward    S = drop(x) A           S and dS hold the blocks of 64 ranks of all projections, block by block: those
               y += S (scale B)        that a tile has are the first ones
    backward   dS = scale dY B^T
               dB, dA                  sums over the rows of an adapter
               dx += mask * (dS A^T)

The passes of one large adapter among small ones cost what its own rows cost.

T packed tokens · K in features · N out features · R extra ranks · P projections · A adapters
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.dropout import inverse_keep
from pallas_kernels.linear import passes
from pallas_kernels.linear.chunks import Chunks, make_chunks
from pallas_kernels.linear.passes.config import ExtraConfig, ExtraKind, extra_config
from pallas_kernels.policy import RANK_BLOCK, extra_blocks
from pallas_kernels.problem import Operands, Static
from pallas_kernels.tiles import spread


def split_ranks(static: Static, ops: Operands, first: int) -> tuple[Operands, ExtraRanks | None]:
    """The call with the first ranks only, and the others; None: there are none."""
    numbers = tuple(i for i in ops.with_lora if ops.lora(i)[0].shape[2] > first)
    if not numbers:
        return ops, None
    first_ranks = {
        "as_": tuple(a[:, :, :first] if a is not None and first else None for a in ops.as_),
        "bs": tuple(b[:, :first] if b is not None and first else None for b in ops.bs),
    }
    return dataclasses.replace(ops, **first_ranks), ExtraRanks(static=static, ops=ops, first=first, numbers=numbers)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExtraRanks:
    """The ranks of a call from `first` on, of the projections that have some."""

    static: Static
    ops: Operands  # with all ranks
    first: int
    numbers: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """Blocks of ranks of each projection."""
        return extra_blocks(tuple(self.ops.lora(i)[0].shape[2] for i in self.numbers), self.first)

    def down(self, x: jax.Array, bits: jax.Array | None) -> jax.Array:
        """S [T, R of all projections]."""
        return self._down(x, self._bank_a(), bits, transposed=False, projections=len(self.numbers))

    @property
    def of_most(self) -> bool:
        """Whether most adapters have some, as far as is known while tracing.

        Then S B is written for all rows and added inside a product that is a plain one, which hides the reading;
        otherwise it is added to what the product wrote, where there is something to add.
        """
        if self.static.ranks is None:
            return self.ops.ranks is None
        return 2 * sum(rank > self.first for rank in self.static.ranks) >= len(self.static.ranks)

    def matmul(self, i: int, x: jax.Array, w: jax.Array, s: jax.Array) -> jax.Array:
        """x W with S B of a projection added; x may be another array than the call's, of as many rows."""
        if i in self.numbers and self.of_most:
            return jnp.matmul(x, w) + self.up(i, None, s)  # product first, see `hopper.backend.gradients_from_ds`
        return self.up(i, jnp.matmul(x, w), s)

    def matmul_dx(self, dy: jax.Array, w: jax.Array, ds: jax.Array, bits: jax.Array | None) -> jax.Array:
        """dY W^T with mask * (dS A^T) added."""
        if self.of_most:
            return jnp.matmul(dy, w.T) + self.add_dx(None, ds, bits)
        return self.add_dx(jnp.matmul(dy, w.T), ds, bits)

    def up(self, i: int, y: jax.Array | None, s: jax.Array) -> jax.Array:
        """y, or zero, with S B of a projection added."""
        if i not in self.numbers:
            assert y is not None
            return y
        first, stride = self.numbers.index(i), len(self.numbers)
        return self._up(y, s, self._bank_b(i), None, first=first, stride=stride, transposed=False, projections=1)

    def output_side(self, i: int, s: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        """dS [T, R] and dB float32 [A, R, N] of one projection, in two passes over dY: one would write partial sums of
        more bytes than the second reads."""
        ds = self._down(dy, self._bank_b(i), None, transposed=True, projections=1)
        s_i = s.reshape(len(s), self.blocks, len(self.numbers), RANK_BLOCK)[:, :, self.numbers.index(i)]
        s_i = s_i.reshape(len(s), -1)
        sums = self._sums(dy, s_i, None, self.ops.scale, projections=1, transposed=True)  # [A, ranks, groups * N]
        db = sums.reshape(*sums.shape[:2], -1, dy.shape[1]).swapaxes(1, 2).reshape(sums.shape[0], -1, dy.shape[1])
        return ds, db[:, : self._width(i)]

    def gradients(
        self, s: jax.Array, bits: jax.Array | None, dys: Sequence[jax.Array]
    ) -> tuple[jax.Array, dict[int, jax.Array], dict[int, jax.Array]]:
        """dS of all projections, and dA and dB by projection number."""
        sides = {i: self.output_side(i, s, dys[i]) for i in self.numbers}
        ds = self.join([ds for ds, _ in sides.values()])
        return ds, self.input_side(self.ops.x, ds, bits), {i: db for i, (_, db) in sides.items()}

    def join(self, dss: Sequence[jax.Array]) -> jax.Array:
        """dS of all projections, in the order of S."""
        if len(dss) == 1:
            return dss[0]
        rows = dss[0].shape[0]
        return jnp.stack([ds.reshape(rows, self.blocks, RANK_BLOCK) for ds in dss], axis=2).reshape(rows, -1)

    def input_side(self, x: jax.Array, ds: jax.Array, bits: jax.Array | None) -> dict[int, jax.Array]:
        """dA float32 [A, K, R] by projection number."""
        dropout, count = self.ops.dropout, len(self.numbers)
        factor = jnp.ones_like(self.ops.scale) if dropout is None else inverse_keep(dropout.rate)
        sums = self._sums(x, ds, bits, factor, projections=count, transposed=False)  # [A, groups * K, ranks]
        num_adapters, num_in = sums.shape[0], x.shape[1]
        sums = sums.reshape(num_adapters, -1, num_in, sums.shape[2] // RANK_BLOCK, RANK_BLOCK).swapaxes(2, 3)
        sums = sums.reshape(num_adapters, self.blocks, count, num_in, RANK_BLOCK)
        das = {i: sums[:, :, p].swapaxes(1, 2).reshape(num_adapters, num_in, -1) for p, i in enumerate(self.numbers)}
        return {i: da[:, :, : self._width(i)] for i, da in das.items()}

    def add_dx(self, dx: jax.Array | None, ds: jax.Array, bits: jax.Array | None) -> jax.Array:
        """dx, or zero, with mask * (dS A^T) added."""
        count = len(self.numbers)
        return self._up(dx, ds, self._bank_a(), bits, first=0, stride=1, transposed=True, projections=count)

    def with_first(
        self, das: dict[int, jax.Array], dbs: dict[int, jax.Array], extra_das: dict[int, jax.Array],
        extra_dbs: dict[int, jax.Array],
    ) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:  # fmt: skip
        """dA and dB of all ranks."""
        if not self.first:
            return extra_das, extra_dbs
        whole_das = {i: jnp.concatenate([das[i], da], axis=2) for i, da in extra_das.items()}
        whole_dbs = {i: jnp.concatenate([dbs[i], db], axis=1) for i, db in extra_dbs.items()}
        return das | whole_das, dbs | whole_dbs

    def _down(self, x: jax.Array, bank: jax.Array, bits: jax.Array | None, *, transposed: bool, projections: int):
        config = self._config(x.shape[1], projections, kind="down", masked=bits is not None)
        owner, active = self._tables(config.block_t, projections)
        interpret = self.static.interpret
        return passes.load().extra_down(
            x, bank, owner, active, bits, transposed=transposed, config=config, interpret=interpret
        )

    def _up(
        self,
        y: jax.Array | None,
        s: jax.Array,
        bank: jax.Array,
        bits: jax.Array | None,
        *,
        projections: int,
        transposed: bool,
        **options,
    ):
        features = bank.shape[1 if transposed else 2]
        config = self._config(features, projections, kind="up", masked=bits is not None)
        owner, active = self._tables(config.block_t, projections)
        interpret = self.static.interpret
        return passes.load().extra_up(
            y, s, bank, owner, active, bits, transposed=transposed, config=config, interpret=interpret, **options
        )

    def _sums(
        self, x: jax.Array, s: jax.Array, bits: jax.Array | None, factor: jax.Array, *, projections: int,
        transposed: bool,
    ) -> jax.Array:  # fmt: skip
        """[A, groups * M, ranks of a group], or [A, ranks of a group, groups * M] transposed."""
        config = self._config(x.shape[1], projections, kind="sums", masked=bits is not None)
        interpret = self.static.interpret
        chunks, active = self._chunks(config, projections)
        partials = passes.load().extra_sums(x, s, chunks, active, bits, config=config, interpret=interpret)
        partials = partials.reshape(len(partials), -1, config.ranks)
        (sums,) = passes.load().sum_partials(
            partials, chunks.adapter, factor, [(0, config.ranks)], transposed=transposed, interpret=interpret
        )
        return sums

    def _config(self, num_features: int, projections: int, *, kind: ExtraKind, masked: bool) -> ExtraConfig:
        rank = self.blocks * projections * RANK_BLOCK
        return extra_config(self.ops.x.shape[0], num_features, rank, self.static.tile, kind=kind, masked=masked)

    def _width(self, i: int) -> int:
        return self.ops.lora(i)[0].shape[2] - self.first

    def _per_adapter(self) -> jax.Array:
        """Blocks of ranks that each adapter has, int32 [A]."""
        if self.ops.ranks is None:
            return jnp.full(self.static.num_adapters, self.blocks, jnp.int32)
        return jnp.clip(-(-(self.ops.ranks - self.first) // RANK_BLOCK), 0, self.blocks).astype(jnp.int32)

    def _tables(self, rows: int, projections: int) -> tuple[jax.Array, jax.Array]:
        """The adapter of every row block, and the number of rank blocks of its rows; padding has none."""
        num_adapters, blocks = self.static.num_adapters, self._per_adapter() * projections
        if self.static.single:
            owner = jnp.zeros(self.ops.x.shape[0] // rows, jnp.int32)
            return owner, jnp.broadcast_to(blocks, owner.shape)
        table = self.ops.tile_adapter
        owner = jnp.clip(table, 0, num_adapters - 1)
        active = jnp.where((table >= 0) & (table < num_adapters), blocks[owner], 0)
        times = self.static.tile // rows
        return spread(owner, times), spread(active, times)

    def _chunks(self, config: ExtraConfig, projections: int) -> tuple[Chunks, jax.Array]:
        """Chunks of the row blocks with extra ranks, and how many blocks of ranks theirs have."""
        num_adapters = self.static.num_adapters
        owner, active = self._tables(config.sum_rows, projections)
        owner = jnp.where(active > 0, owner, -1)
        chunks = make_chunks(owner, num_adapters, config.blocks_per_chunk, single=self.static.single)
        padding = (chunks.adapter < 0) | (chunks.adapter >= num_adapters)
        chunks = dataclasses.replace(
            chunks, count=jnp.where(padding, 0, chunks.count), adapter=jnp.where(padding, -1, chunks.adapter)
        )
        return chunks, (self._per_adapter() * projections)[jnp.clip(chunks.adapter, 0, num_adapters - 1)]

    def _bank_a(self) -> jax.Array:
        """[A, K, R of all projections], the dropout scale folded in."""
        pieces = [self.ops.lora(i)[0][:, :, self.first :] for i in self.numbers]
        size = self.blocks * RANK_BLOCK
        padded = [jnp.pad(piece, ((0, 0), (0, 0), (0, size - piece.shape[2]))) for piece in pieces]
        num_adapters, num_in = padded[0].shape[:2]
        bank = jnp.stack([piece.reshape(num_adapters, num_in, -1, RANK_BLOCK) for piece in padded], axis=3)
        bank = bank.reshape(num_adapters, num_in, -1)
        if self.ops.dropout is not None:
            bank = bank.astype(jnp.float32) * inverse_keep(self.ops.dropout.rate)[:, None, None]
        return bank.astype(self.ops.x.dtype)

    def _bank_b(self, i: int) -> jax.Array:
        """[A, R, N] of one projection, its scale folded in."""
        bank = self.ops.lora(i)[1][:, self.first :].astype(jnp.float32) * self.ops.scale[:, None, None]
        bank = jnp.pad(bank, ((0, 0), (0, self.blocks * RANK_BLOCK - bank.shape[1]), (0, 0)))
        return bank.astype(self.ops.x.dtype)
