"""Hopper's kernels in the GPU interpreter: NaN and infinity of one adapter change no bit of what others get."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import needs_gpu_interpreter
from host_arrays import changed, on_device
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from kernel_problems import keep_words, make_chunks
from more_cases import mostly_nightly, nightly

import pallas_kernels as pk
from pallas_kernels.dropout import unpack
from pallas_kernels.linear.hopper.da import LOW_RANK, DropDaConfig, drop_da
from pallas_kernels.linear.hopper.down import DropDownConfig, drop_down
from pallas_kernels.linear.hopper.gemm import GemmConfig, gemm

pytestmark = [
    needs_gpu_interpreter,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # the interpreter's numpy meets inf
]
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=2, platform="gpu")
RANK, ADAPTERS, COLUMNS, SICK = 16, 2, 256, 0
BLOCKS = np.array([1, 0, 2, 1, 1, 0], np.int32)  # 2: padding rows
OWNER = np.repeat(BLOCKS, 64)
POISONS = {"both": (np.nan, np.inf), "nan": (np.nan,), "inf": (np.inf,)}  # in turn, along rows or features
every_poison = pytest.mark.parametrize("poison", mostly_nightly(POISONS, ["both"]))


def normal(seed, *shape):
    return on_device(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def poisons(poison, values, axis):
    """Alternating along an axis of the values."""
    return np.resize(np.array(POISONS[poison], values.dtype), values.shape[axis])


def rows_poisoned(values, poison):
    """The sick adapter's rows, all of them that poison."""
    if poison is None:
        return values
    return changed(values, OWNER == SICK, poisons(poison, values, 0)[OWNER == SICK, None])


def bank_poisoned(bank, poison):
    return bank if poison is None else changed(bank, SICK, poisons(poison, bank, -1))


def interpreted(kernel, *arguments, **options):
    with (
        use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()),
    ):
        return jax.tree.map(np.asarray, kernel(*arguments, **options))


def of_others(rows):
    return rows[OWNER != SICK].astype(np.float32)


def finite(values):
    return np.isfinite(values.astype(np.float32))


@pytest.fixture(scope="module")
def dropout():
    rows = np.arange(OWNER.size, dtype=np.uint32)
    return pk.Dropout(rate=on_device([0.1, 0.5]), key=on_device([1, 2], np.uint32), row_key=on_device(rows * 7))


@pytest.fixture(scope="module")
def words(dropout):
    return keep_words(dropout, np.minimum(OWNER, ADAPTERS - 1), COLUMNS)


@every_poison
@pytest.mark.parametrize("mode", ["forward", nightly("backward"), "backward with dropout"])
def test_products(mode, poison, words):
    transposed, depth = mode != "forward", 128
    shape = (COLUMNS, RANK) if transposed else (RANK, COLUMNS)
    rhs = normal(1, COLUMNS, depth) if transposed else normal(1, depth, COLUMNS)
    bank = changed(normal(3, ADAPTERS + 1, *shape), ADAPTERS, 0)

    def run(poison):
        lhs, low = (
            rows_poisoned(normal(0, OWNER.size, depth), poison),
            rows_poisoned(normal(2, OWNER.size, RANK), poison),
        )
        options = {"transposed": transposed, "bits": words if mode.endswith("dropout") else None}
        config = GemmConfig(tile_m=64, tile_n=128, stages=2, split_n=False)
        blocks = on_device(BLOCKS)
        return interpreted(
            gemm, lhs, rhs, low, bank_poisoned(bank, poison), blocks, config=config, num_sms=2, **options
        )

    clean = run(None)
    got = run(poison)
    np.testing.assert_array_equal(of_others(got), of_others(clean))
    assert not finite(got[OWNER == SICK]).any()
    assert finite(clean).all()


@every_poison
@pytest.mark.parametrize("split_k", [nightly(1), 2])
def test_s_of_dropped_x(split_k, poison, dropout):
    columns = COLUMNS * split_k
    x, bank = normal(4, OWNER.size, columns), changed(normal(5, ADAPTERS + 1, RANK, columns), ADAPTERS, 0)

    def run(poison):
        arguments = rows_poisoned(x, poison), bank_poisoned(bank, poison), on_device(BLOCKS), dropout
        return interpreted(drop_down, *arguments, config=DropDownConfig(split_k=split_k))

    s, bits = run(None)
    got, got_bits = run(poison)
    np.testing.assert_array_equal(of_others(got), of_others(s))
    np.testing.assert_array_equal(got_bits, bits)
    assert not finite(got[OWNER == SICK]).any()
    assert finite(s).all()


@every_poison
@pytest.mark.parametrize("with_low", [True, nightly(False)])
def test_da_and_the_low_rank_part_of_dx(with_low, poison, words):
    """In chunks of two blocks: the last one of the well adapter is half empty, and the sick one's follows it."""
    chunks = make_chunks(np.where(BLOCKS == ADAPTERS, -1, BLOCKS), ADAPTERS, 2, single=False)
    x, ds = normal(6, OWNER.size, COLUMNS), normal(7, OWNER.size, RANK)
    more = LOW_RANK - RANK if with_low else 0
    bank = np.array(normal(8, ADAPTERS + 1, RANK, COLUMNS))
    bank[ADAPTERS] = 0
    bank = on_device(np.pad(bank, ((0, 0), (0, more), (0, 0))))

    def run(poison):
        ds_transposed = on_device(np.pad(np.asarray(rows_poisoned(ds, poison)).T, ((0, more), (0, 0))))
        arguments = [rows_poisoned(x, poison), ds_transposed, words, chunks]
        arguments += [bank_poisoned(bank, poison)] if with_low else []
        return interpreted(drop_da, *arguments, rank=RANK, config=DropDaConfig(blocks_per_chunk=2, stages=2))

    partials, low = run(None)
    owner = np.asarray(chunks.adapter)
    used = np.asarray(chunks.count) > 0
    got, got_low = run(poison)
    np.testing.assert_array_equal(got[owner != SICK], partials[owner != SICK])
    assert not finite(got[(owner == SICK) & used]).any()
    if with_low:
        np.testing.assert_array_equal(of_others(got_low), of_others(low))
        kept = np.asarray(unpack(words, COLUMNS))[OWNER == SICK]
        assert not finite(got_low[OWNER == SICK])[kept].any()
    assert finite(partials).all()
