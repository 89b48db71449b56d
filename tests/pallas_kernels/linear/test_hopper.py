"""Hopper's passes over x and dY in the GPU interpreter: masks bit for bit, sums per adapter, nothing foreign met."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import H200, lowered
from gpu_interpreter import needs_gpu_interpreter
from hopper_problems import ADAPTERS, BF16, BLOCKS, COLUMNS, OWNER, RANK, by_adapter, interpreted, normal
from host_arrays import changed, on_device
from jax.sharding import AbstractMesh, use_abstract_mesh
from kernel_problems import draw, keep_mask, keep_words, make_chunks, relative
from more_cases import nightly

import pallas_kernels as pk
from pallas_kernels.arg_specs import LinearSpec, make_arrays
from pallas_kernels.linear.hopper import backend
from pallas_kernels.linear.hopper.da import LOW_RANK, DropDaConfig, drop_da
from pallas_kernels.linear.hopper.down import DropDownConfig, drop_down
from pallas_kernels.linear.hopper.dsdb import WideDsdbConfig, wide_dsdb
from pallas_kernels.linear.passes.pallas.bank import transposed_bank
from pallas_kernels.linear.passes.pallas.join import join
from pallas_kernels.problem import KernelConfigs, Operands, Static


def in_float32(array):
    return on_device(array, np.float32)


@pytest.fixture(scope="module")
def problem():
    rows = OWNER.size
    drop = pk.Dropout(
        rate=on_device([0.1, 0.5]), key=on_device([1, 2], np.uint32), row_key=on_device(np.arange(rows) * 7, np.uint32)
    )
    adapter_rows = np.minimum(OWNER, ADAPTERS - 1)
    return {
        "x": normal(0, rows, COLUMNS),
        "bank": changed(normal(1, ADAPTERS + 1, RANK, COLUMNS), ADAPTERS, 0),
        "drop": drop,
        "words": keep_words(drop, adapter_rows, COLUMNS),
        "keep": np.asarray(keep_mask(drop, adapter_rows, COLUMNS)),
        "chunks": make_chunks(np.where(BLOCKS == ADAPTERS, -1, BLOCKS), ADAPTERS, 2, single=False),
    }


@needs_gpu_interpreter
@pytest.mark.parametrize(
    "config", [nightly(DropDownConfig(split_k=1)), DropDownConfig(split_k=2, stages=2, block_k=256)]
)
def test_s_and_the_keep_bits_come_out_of_one_pass(problem, config):
    with interpreted():
        s, bits = drop_down(problem["x"], problem["bank"], on_device(BLOCKS), problem["drop"], config=config)
        s, bits = np.asarray(s, np.float32), np.asarray(bits)
    dropped = np.where(problem["keep"], np.asarray(problem["x"], np.float32), 0)
    assert relative(s, np.einsum("tk,trk->tr", dropped, np.asarray(problem["bank"], np.float32)[OWNER])) < BF16
    np.testing.assert_array_equal(bits, problem["words"])


@needs_gpu_interpreter
@pytest.mark.parametrize("with_low", [nightly(False), True])
def test_da_and_the_masked_low_rank_part_of_dx(problem, with_low):
    chunks, ds = problem["chunks"], normal(2, OWNER.size, RANK)
    more = LOW_RANK - RANK if with_low else 0
    bank = on_device(np.pad(problem["bank"], ((0, 0), (0, more), (0, 0)))) if with_low else None
    with interpreted():
        config = DropDaConfig(blocks_per_chunk=2, stages=2)
        ds_transposed = on_device(np.pad(np.asarray(ds).T, ((0, more), (0, 0))))
        args = (problem["x"], ds_transposed, problem["words"], chunks, bank)
        partials, low = jax.tree.map(np.asarray, drop_da(*args, rank=RANK, config=config))
    keep, ds = problem["keep"], np.asarray(ds, np.float32)
    dropped = np.where(keep, np.asarray(problem["x"], np.float32), 0)
    for k in range(ADAPTERS):
        assert relative(by_adapter(partials, chunks, k), dropped[k == OWNER].T @ ds[k == OWNER]) < 1e-6
    if with_low:
        wide = np.einsum("tr,trk->tk", ds, np.asarray(problem["bank"], np.float32)[OWNER])
        assert relative(low, np.where(keep, wide, 0)) < BF16


@needs_gpu_interpreter
def test_ds_and_db_of_one_pass_and_a_nan_stays_with_its_adapter(problem):
    chunks, sick = problem["chunks"], 0
    dy, s = normal(3, OWNER.size, COLUMNS), normal(4, OWNER.size, 2 * RANK)
    dy = changed(dy, sick == OWNER, np.nan)
    with interpreted():
        config = WideDsdbConfig(blocks_per_chunk=2, stages=2, split_n=2)
        s_transposed = on_device(np.pad(np.asarray(s).T, ((0, 0), (0, 64))))
        ds, partials = wide_dsdb(dy, s_transposed, problem["bank"], chunks, rank_offset=RANK, config=config)
        ds, partials = np.asarray(ds).sum(0), np.asarray(partials)
    dy, s = np.asarray(dy, np.float32), np.asarray(s, np.float32)[:, RANK:]
    well = OWNER == 1
    want = np.einsum("tn,trn->tr", dy[well], np.asarray(problem["bank"], np.float32)[OWNER[well]])
    assert relative(ds[well], want) < BF16
    assert (ds[OWNER == ADAPTERS] == 0).all()
    assert relative(by_adapter(partials, chunks, 1), dy[well].T @ s[well]) < 1e-6
    assert np.isnan(by_adapter(partials, chunks, sick)).all()


def test_transposed_bank_lays_projections_below_each_other_and_ends_in_a_zero_adapter():
    pieces = [in_float32(normal(5, 2, 128, 32)), changed(normal(6, 2, 128, 16), 1, np.nan)]
    factor = on_device([2.0, 0.5])
    got = transposed_bank(pieces, factor, 64, jnp.bfloat16, interpret=True)
    want = np.concatenate([np.asarray(piece, np.float32) for piece in pieces], 2).swapaxes(1, 2)
    want = want * np.asarray(factor)[:, None, None]
    got, want = (np.asarray(value, np.float32) for value in (got, want.astype(jnp.bfloat16)))
    np.testing.assert_array_equal(got[:2, :48], want)
    assert (got[:2, 48:] == 0).all()
    assert (got[2] == 0).all()


@pytest.mark.parametrize(("columns", "rows"), [(64, 0), (0, 128), (64, 64), (48, 60)])
@pytest.mark.parametrize("num_rows", [48, 256])
def test_join_adds_up_casts_and_lays_projections_side_by_side(columns, rows, num_rows):
    single = normal(9, 1, num_rows, 16)  # of one part, it comes rounded
    pieces = [in_float32(normal(7, 8, num_rows, 16)), in_float32(normal(8, 3, num_rows, 16)), single]
    got = join(pieces, jnp.bfloat16, columns=columns, rows=rows, interpret=True)

    want = np.concatenate([np.asarray(piece).sum(0).astype(jnp.bfloat16) for piece in pieces], axis=1)
    joined = [np.pad(want, ((0, 0), (0, columns - 48)))] if columns else []
    transposed = [np.pad(want.T, ((0, rows - 48), (0, 0)))] if rows else []
    for ours, plain in zip(got, joined + transposed, strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_join_takes_projections_of_different_ranks():
    pieces = [in_float32(normal(7, 2, 64, 128)), in_float32(normal(8, 4, 64, 16))]
    (got,) = join(pieces, jnp.float32, rows=256, interpret=True)
    got, want = np.asarray(got), np.concatenate([np.asarray(piece).sum(0) for piece in pieces], axis=1).T
    np.testing.assert_array_equal(got[:144], want)
    assert (got[144:] == 0).all()


# together 256: three stages take 245784 bytes
@pytest.mark.parametrize(("rank", "siblings"), [nightly(256, 1), (64, 3)])
def test_large_ranks_with_dropout_fit_into_shared_memory(rank, siblings):
    spec = LinearSpec(tokens=2048, in_features=1024, out_features=1024, rank=rank, adapters=2, rate=0.1, tile=64)
    arrays = jax.eval_shape(lambda: make_arrays(spec))

    def step(arrays):
        def layer(x, a, b):
            rest = {name: arrays[name] for name in ("tile_adapter", "scale", "dropout")}
            lists = [arrays["w"]] * siblings, [a] * siblings, [b] * siblings
            return pk.multi_lora_linears(x, *lists, implementation="pallas_mosaic_gpu", **rest)

        ys, vjp = jax.vjp(layer, arrays["x"], arrays["a"], arrays["b"])
        return ys, vjp((arrays["dy"],) * siblings)

    text = lowered(H200, step, arrays)
    assert "lora_drop_down" in text
    assert "lora_drop_da" in text


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (KernelConfigs(), None),
        (KernelConfigs(drop_down=DropDownConfig(stages=8)), "passes over x with dropout and rank 64 do not fit"),
        (KernelConfigs(drop_da=DropDaConfig(stages=8)), "passes over x with dropout and rank 64 do not fit"),
        (
            KernelConfigs(wide_dsdb=WideDsdbConfig(stages=6)),
            "pass over dY with rank 64 does not fit",
        ),
    ],
)
def test_tiles_too_large_for_shared_memory_are_refused(config, reason):
    arguments, _ = draw(table=[0, 1], k=1024, widths=(1024,), ranks=(64,), adapters=2, rates=[0.1, 0.1], tile=64)
    lists = {name: tuple(arguments.pop(name)) for name in ("ws", "as_", "bs", "biases")}
    ops = Operands(x=on_device(arguments.pop("x"), jnp.bfloat16), **lists, **arguments)
    static = Static(tile=64, num_adapters=2, single=False, config=config)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        unsupported = backend.unsupported_reason(static, ops)
    assert unsupported is None if reason is None else reason in unsupported
