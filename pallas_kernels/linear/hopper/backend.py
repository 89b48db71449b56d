"""Backend "pallas_mosaic_gpu": Hopper GEMMs with the low-rank product inside, and Hopper's or small passes around them.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp

from pallas_kernels import policy
from pallas_kernels.batching import refuse_vmap
from pallas_kernels.checkpoint_names import named_bits, named_s
from pallas_kernels.device import is_hopper, num_sms, wide_integers
from pallas_kernels.dropout import BLOCK
from pallas_kernels.linear import split_graph
from pallas_kernels.linear.extra_ranks import ExtraRanks, split_ranks
from pallas_kernels.linear.hopper.da import LOW_RANK, DropDaConfig, drop_da, drop_da_config
from pallas_kernels.linear.hopper.down import DropDownConfig, drop_down, drop_down_config
from pallas_kernels.linear.hopper.dsdb import WideDsdbConfig, wide_dsdb, wide_dsdb_config
from pallas_kernels.linear.hopper.gemm import gemm
from pallas_kernels.linear.hopper.gemm_config import GemmConfig, gemm_config
from pallas_kernels.linear.hopper.tiling import ROWS, SMEM_BYTES, fit
from pallas_kernels.linear.split_graph import Prepared, prepare
from pallas_kernels.problem import Operands, Static, linear_shape

MIN_DSDB_FEATURES = 8192  # with its sum of partials 90 us against 98 at 14336 features, 34 against 32 at 4096 (H200)
MAX_DSDB_RANK = 64  # more, and the accumulators of four row blocks leave no registers


def unsupported_reason(static: Static, ops: Operands) -> str | None:
    """Says why a call cannot be served; None: it can."""
    if not is_hopper():
        return "it needs a Hopper GPU (sm_90)"
    if wide_integers():
        return "its kernels count in 32 bits: turn jax_enable_x64 off"
    if ops.quantised:
        return "its products read plain weights"
    return policy.hopper_unsupported_reason(linear_shape(static, ops)) or _shared_memory_reason(static, ops)


def _shared_memory_reason(static: Static, ops: Operands) -> str | None:
    """Says which kernel finds no tiles that fit into shared memory; None: all do."""
    rows, num_in = ops.x.shape
    ops, _ = first_and_extra(static, ops)
    prepared = prepare(static, ops)
    for i in ops.with_lora:
        if _forward_config(prepared, i) is None:
            return f"no tiles fit {rows} x {num_in} -> {ops.ws[i].shape[1]} with rank {prepared.layout.ranks[i]}"
        if not _fits(_dsdb_config(prepared, i), prepared.layout.ranks[i]):
            return f"the pass over dY with rank {prepared.layout.ranks[i]} does not fit into shared memory"
    if ops.with_lora and _dx_config(prepared, split_graph.widest(ops)) is None:
        return f"no tiles fit the gradient of x with rank {prepared.layout.total}"
    if ops.with_lora and _drops_here(ops):
        total = prepared.layout.total
        if not (_fits(_down_config(prepared), total) and _fits(_da_config(prepared), total)):
            return f"the passes over x with dropout and rank {total} do not fit into shared memory"
    return None


def _fits(config: DropDownConfig | DropDaConfig | WideDsdbConfig | None, rank: int) -> bool:
    return config is None or (config.stages > 1 and config.smem_bytes(rank) <= SMEM_BYTES)


def first_and_extra(static: Static, ops: Operands) -> tuple[Operands, ExtraRanks | None]:
    """The call with the ranks that the fused kernels take, and the others."""
    return split_ranks(static, ops, max(policy.first_ranks(linear_shape(static, ops)), default=0))


def forward(static: Static, ops: Operands):
    """Returns every y, S (one array for all projections, another one of extra ranks) and the packed keep bits.

    Where all adapters have large ranks, there is S of extra ranks only.
    """
    ops, extra = first_and_extra(static, refuse_vmap(ops))
    prepared = prepare(static, ops)
    ss, bits = input_passes(prepared, extra)
    if extra is not None and not ops.with_lora:  # plain products, which add to the low-rank part
        ys = (extra.matmul(i, ops.x, w.astype(ops.x.dtype), ss[-1]) for i, w in enumerate(ops.arrays))
        return tuple(map(add_bias, ys, ops.biases)), ss, bits
    ys = tuple(project(prepared, i, ss[0] if ss else None) for i in range(len(ops.ws)))
    return ys if extra is None else tuple(extra.up(i, y, ss[-1]) for i, y in enumerate(ys)), ss, bits


def backward(static: Static, ops: Operands, ss: tuple[jax.Array, ...], bits: jax.Array | None, dys):
    """Returns dx, and dA and dB (float32) by projection number."""
    ops, extra = first_and_extra(static, ops)
    prepared = prepare(static, ops)
    if extra is not None and not ops.with_lora:
        ds, das, dbs = extra.gradients(ss[0], bits, dys)
        return add_products(prepared, dys, extra.add_dx(None, ds, bits)), das, dbs
    partials, dbs = output_passes(prepared, ss[0], dys) if ops.with_lora else ([], {})
    das, dx = gradients_from_ds(prepared, partials, bits, dys)
    return (dx, das, dbs) if extra is None else add_extra(extra, ss[-1], bits, dys, dx, das, dbs)


def add_extra(extra: ExtraRanks, s: jax.Array, bits: jax.Array | None, dys, dx: jax.Array, das, dbs):
    """dx, dA and dB of all ranks, from those of the first ones."""
    ds, extra_das, extra_dbs = extra.gradients(s, bits, dys)
    return extra.add_dx(dx, ds, bits), *extra.with_first(das, dbs, extra_das, extra_dbs)


def output_passes(prepared: Prepared, s: jax.Array, dys) -> tuple[list[jax.Array], dict[int, jax.Array]]:
    """Partial sums of dS [parts, T, R] in the order of S, and dB float32 by projection number."""
    s_transposed = jnp.pad(s.T, ((0, 0), (0, ROWS)))
    gradients = {i: output_pass(prepared, i, s, s_transposed, dys[i]) for i in prepared.ops.with_lora}
    return [gradients[i][0] for i in prepared.layout.offsets], {i: db for i, (_, db) in gradients.items()}


def gradients_from_ds(prepared: Prepared, ds_partials: Sequence[jax.Array], bits: jax.Array | None, dys):
    """dA float32 by projection number, and dx.

    Args:
        ds_partials: partial sums of dS [parts, T, R], of one or several projections each, in the order of S.
    """
    ops = prepared.ops
    das, dx, fused = {}, 0.0, None
    if ops.with_lora:
        das, dx, ds = input_gradient_pass(prepared, ds_partials, bits)
        if dx is None:
            fused = split_graph.widest(ops)
            dx = _gemm(
                prepared, dys[fused], ops.arrays[fused], ds, prepared.bank_a(), _dx_config(prepared, fused),
                transposed=True, bits=bits,
            )  # fmt: skip
    return das, add_products(prepared, dys, dx, without=fused)


def add_products(prepared: Prepared, dys, dx: jax.Array | float, *, without: int | None = None) -> jax.Array:
    """dx with dY W^T of all projections but one added."""
    for i, (dy, w) in enumerate(zip(dys, prepared.ops.arrays, strict=True)):
        if i != without:
            # product first: only there does XLA let cuBLAS add to what comes second (see `device.compiler_options`)
            dx = jnp.matmul(dy, w.astype(dy.dtype).T) + dx
    return cast(jax.Array, dx)


def input_passes(prepared: Prepared, extra: ExtraRanks | None) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """S of the first ranks and S of the extra ones, where there are some, and the packed keep bits."""
    ss, bits = (), None
    if prepared.ops.with_lora:
        s, bits = input_pass(prepared)
        ss = (s,)
    elif extra is not None:
        bits = named_bits(split_graph.keep_bits(prepared))
    return ss if extra is None else (*ss, named_s(extra.down(prepared.ops.x, bits))), bits


def input_pass(prepared: Prepared) -> tuple[jax.Array, jax.Array | None]:
    """S of all projections and, with dropout, the packed keep bits: made on the way, not in a pass of their own."""
    ops = prepared.ops
    if not _drops_here(ops):
        bits = named_bits(split_graph.keep_bits(prepared))
        return named_s(split_graph.shared_input(prepared, bits)), bits
    bank = prepared.transposed_bank_a()
    s, bits = drop_down(ops.x, bank, prepared.block_adapter(ROWS), ops.dropout, config=_down_config(prepared))
    return named_s(s), named_bits(bits)


def output_pass(prepared: Prepared, i: int, s: jax.Array, s_transposed: jax.Array, dy: jax.Array):
    """Partial sums of dS [parts, T, R], and dB float32 [A, R, N], of one projection."""
    config = _dsdb_config(prepared, i)
    if config is None:
        return split_graph.output_side(prepared, i, s, dy)
    chunks, offset = prepared.chunks(ROWS, config.blocks_per_chunk), prepared.layout.offsets[i]
    ds_partials, partials = wide_dsdb(dy, s_transposed, prepared.bank_b(i), chunks, rank_offset=offset, config=config)
    return ds_partials, split_graph.output_gradient(prepared, i, partials, chunks.adapter)


def input_gradient_pass(prepared: Prepared, ds_partials: Sequence[jax.Array], bits: jax.Array | None):
    """dA float32 of every projection, and the low-rank part of dx where this pass makes it or else dS [T, R of all]."""
    ops, total = prepared.ops, prepared.layout.total
    if bits is None or not _drops_here(ops):
        (ds,) = split_graph.join_ds(prepared, ds_partials, columns=total)
        return split_graph.input_side(prepared, ds, bits), None, ds
    config = _da_config(prepared)
    chunks = prepared.chunks(ROWS, config.blocks_per_chunk)
    if _makes_low(prepared):
        ds, bank = None, prepared.transposed_bank_a(LOW_RANK)
        (ds_transposed,) = split_graph.join_ds(prepared, ds_partials, rows=bank.shape[1])
    else:
        bank = None
        ds, ds_transposed = split_graph.join_ds(prepared, ds_partials, columns=total, rows=total)
    partials, low = drop_da(ops.x, ds_transposed, bits, chunks, bank, rank=total, config=config)
    return split_graph.input_gradients(prepared, partials, chunks), low, ds


def _makes_low(prepared: Prepared) -> bool:
    """True where cuBLAS makes the product, and where dx is a sum of products anyway.

    With its masked low-rank part written by the pass over x (8 % of the time of a product) they are all plain ones.
    Masking in the last step of a product costs 5 to 15 % of it, the more the larger the rank."""
    return prepared.ops.quantised or len(prepared.ops.ws) > 1 or prepared.layout.total > policy.MIN_RANK


def _drops_here(ops: Operands) -> bool:
    """True where the Hopper passes with dropout serve: words come in blocks of 256 columns, counted from 0."""
    return ops.dropout is not None and ops.dropout.first_column is None and ops.x.shape[1] % BLOCK == 0


def frozen_parts(prepared: Prepared) -> list[jax.Array]:
    """x W of every projection."""
    ops = prepared.ops
    return [jnp.matmul(ops.x, w.astype(ops.x.dtype)) for w in ops.arrays]


def frozen_gradient(prepared: Prepared, i: int, dy: jax.Array) -> jax.Array:
    """dY W^T of one projection."""
    return jnp.matmul(dy, prepared.ops.arrays[i].astype(dy.dtype).T)


def project(prepared: Prepared, i: int, s: jax.Array | None) -> jax.Array:
    ops, layout = prepared.ops, prepared.layout
    if i not in layout.ranks:
        y = jnp.matmul(ops.x, ops.arrays[i].astype(ops.x.dtype))
    else:
        y = _gemm(
            prepared, ops.x, ops.arrays[i], s, prepared.bank_b(i), _forward_config(prepared, i),
            transposed=False, low_offset=layout.offsets[i],
        )  # fmt: skip
    return add_bias(y, ops.biases[i])


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias.astype(y.dtype)


def _gemm(prepared: Prepared, lhs, rhs, low, bank, config: GemmConfig, *, transposed, low_offset=0, bits=None):
    return gemm(
        lhs,
        rhs.astype(lhs.dtype),
        low,
        bank,
        prepared.block_adapter(config.tile_m),
        transposed=transposed,
        low_offset=low_offset,
        bits=bits,
        config=config,
        num_sms=num_sms(),
    )


def _down_config(prepared: Prepared) -> DropDownConfig:
    static, num_in, total = prepared.static, prepared.ops.x.shape[1], prepared.layout.total
    explicit = static.config.drop_down
    heuristic = fit(drop_down_config(prepared.rows, num_in), total)
    return explicit or fit(prepared.tuned("mosaic_down", num_in, 0, total, heuristic), total)


def _da_config(prepared: Prepared) -> DropDaConfig:
    static, num_in, total = prepared.static, prepared.ops.x.shape[1], prepared.layout.total
    explicit = static.config.drop_da
    heuristic = fit(drop_da_config(prepared.rows, num_in, total), total)
    return explicit or fit(prepared.tuned("mosaic_da", num_in, 0, total, heuristic), total)


def _dsdb_config(prepared: Prepared, i: int) -> WideDsdbConfig | None:
    """None where the small pass makes dS and dB."""
    static, num_out, rank = prepared.static, prepared.ops.ws[i].shape[1], prepared.layout.ranks[i]
    explicit = static.config.wide_dsdb
    if not explicit and (rank > MAX_DSDB_RANK or num_out < MIN_DSDB_FEATURES):
        return None
    heuristic = fit(wide_dsdb_config(prepared.rows, num_out), rank)
    return explicit or fit(prepared.tuned("mosaic_dsdb", 0, num_out, rank, heuristic), rank)


def _forward_config(prepared: Prepared, i: int) -> GemmConfig | None:
    static, ops = prepared.static, prepared.ops
    explicit = static.config.forward
    num_in, num_out = ops.ws[i].shape
    rank = prepared.layout.ranks[i]
    config = explicit or gemm_config(prepared.rows, num_in, num_out, rank, static.tile, transposed=False)
    return config and (explicit or prepared.tuned("mosaic_fwd", num_in, num_out, rank, config))


def _dx_config(prepared: Prepared, i: int) -> GemmConfig | None:
    static, ops = prepared.static, prepared.ops
    explicit = static.config.dx
    num_in, num_out = ops.ws[i].shape
    rank = prepared.layout.total
    config = explicit or gemm_config(prepared.rows, num_out, num_in, rank, static.tile, transposed=True)
    return config and (explicit or prepared.tuned("mosaic_dx", num_in, num_out, rank, config))
