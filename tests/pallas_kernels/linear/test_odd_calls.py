"""Calls at the edge of what is allowed, and just past it."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_arrays import filled, on_device
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from kernel_problems import TABLE, TILE, draw, ours, relative

import pallas_kernels as pk
from pallas_kernels.arg_specs import LinearSpec, make_arrays

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
BACKENDS = pytest.mark.parametrize("backend", ["xla", "pallas_triton"])


@BACKENDS
@pytest.mark.parametrize("ranks", [(0,), (0, 8)])
def test_a_rank_of_zero_is_the_frozen_layer(backend, ranks):
    arguments, dys = draw(table=[0, 1, -1], widths=(64,) * len(ranks), ranks=ranks, rates=[0.1, 0.5, 0.0])

    @jax.jit
    def both_ways(x, as_, bs):
        ys, vjp = jax.vjp(partial(ours(backend), arguments), x, as_, bs)
        return ys, *vjp(tuple(dys))

    ys, dx, das, dbs = jax.device_get(both_ways(*(arguments[name] for name in ("x", "as_", "bs"))))
    np.testing.assert_allclose(ys[0], np.asarray(arguments["x"]) @ np.asarray(arguments["ws"][0]), rtol=1e-5, atol=1e-5)
    assert (das[0].shape, dbs[0].shape) == ((3, 128, 0), (3, 0, 64))
    assert np.isfinite(dx).all()
    if len(ranks) > 1:
        assert das[1].any(), "the sibling has LoRA"


def test_a_rank_of_zero_lowers_on_hopper():
    spec = LinearSpec(tokens=2048, in_features=4096, out_features=4096, adapters=2)
    arrays = jax.eval_shape(lambda: make_arrays(spec))
    arrays |= {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in (("a", (2, 4096, 0)), ("b", (2, 0, 4096)))
    }

    def layer(arrays):
        rest = {name: arrays[name] for name in ("tile_adapter", "scale", "dropout")}
        return pk.multi_lora_linear(*(arrays[name] for name in ("x", "w", "a", "b")), **rest)

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        text = jax.jit(layer).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" not in text


@BACKENDS
def test_a_traced_tile_of_an_adapter_that_does_not_exist_is_nobodys(backend):
    arguments, _ = draw(table=[0, 1, 2, 0])

    @jax.jit
    def run(table):
        return ours(backend)(arguments | {"tile_adapter": table}, *(arguments[n] for n in ("x", "as_", "bs")))[0]

    tables = [0, 7, 3, 0], [0, -1, -1, 0], [0, 1, 2, 0]
    got, want, theirs = (np.asarray(run(on_device(table, np.int32))) for table in tables)
    np.testing.assert_array_equal(got, want)
    assert (got[TILE : 3 * TILE] != theirs[TILE : 3 * TILE]).any()


@pytest.mark.wrong_types
def test_values_out_of_range_are_named():
    x, w, a, b = filled(1.0, 4, 8), filled(1.0, 8, 6), filled(1.0, 2, 8, 4), filled(0.0, 2, 4, 6)

    def call(tile_adapter=(0, 1), rate=(0.1, 0.0)):
        key, row_key = on_device(np.zeros(2, np.uint32)), on_device(np.zeros(4, np.uint32))
        drop = pk.Dropout(rate=on_device(rate), key=key, row_key=row_key)
        return pk.multi_lora_linear(x, w, a, b, tile_adapter=on_device(tile_adapter), scale=[1.0, 1.0], dropout=drop)

    assert call(tile_adapter=(-1, 1)).shape == (4, 6)
    for number in (2, -2):
        with pytest.raises(
            ValueError, match=rf"tile_adapter\[1\] is {number}, expected -1 .* to 1: .* hold 2 adapters"
        ):
            call(tile_adapter=(0, number))
    for rate in (1.0, -0.5, np.nan):
        with pytest.raises(ValueError, match=rf"rate of adapter 1 is {rate}, expected 0 <= rate < 1"):
            call(rate=(0.1, rate))


@pytest.mark.wrong_types
def test_what_is_no_array_is_named():
    arrays: list[Any] = [filled(1.0, 4, 8), filled(1.0, 8, 6), filled(1.0, 8, 4), filled(0.0, 4, 6)]
    x, w, a, b = arrays
    rest: dict[str, Any] = {"tile_adapter": on_device([0]), "scale": on_device([1.0])}
    with pytest.raises(TypeError, match=r"^a is a list, expected an array: jnp.asarray\(a\)$"):
        pk.lora_linear(x, w, a.tolist(), b, scale=1.0)
    with pytest.raises(TypeError, match=r"^w of projection 0 is a list, expected an array"):
        pk.multi_lora_linear(x, w.tolist(), a[None], b[None], **rest)
    with pytest.raises(TypeError, match=r"^b of projection 1 is a list, expected an array"):
        pk.multi_lora_linears(x, [w, w], [a[None]] * 2, [b[None], b.tolist()], **rest)


@pytest.mark.wrong_types
def test_float64_is_refused_as_sums_are_in_float32():
    with jax.enable_x64(True):
        x, w, a, b = (jnp.ones(shape, jnp.float64) for shape in ((4, 8), (8, 6), (8, 4), (4, 6)))
        with pytest.raises(ValueError, match="x is float64, but all sums are in float32"):
            pk.lora_linear(x, w, a, b, scale=1.0)


@pytest.mark.wrong_types
def test_the_shapes_of_one_adapter_are_told_as_they_were_given():
    x, w, a, b = filled(1.0, 4, 8), filled(1.0, 8, 6), filled(1.0, 8, 4), filled(0.0, 4, 6)
    with pytest.raises(ValueError, match=r"^a has shape \(9, 4\), expected \(8, 4\)$"):
        pk.lora_linear(x, w, filled(1.0, 9, 4), b, scale=1.0)
    with pytest.raises(ValueError, match=r"^b has shape \(1, 4, 6\), expected \[R, N\]$"):
        pk.lora_linear(x, w, a, b[None], scale=1.0)


def test_an_entry_per_row_is_a_table_of_tiles_and_isolates_adapters():
    arguments, dys = draw(table=TABLE, widths=(64, 32), ranks=(8, 4), rates=[0.1, 0.5, 0.0])

    @jax.jit
    def both_ways(table, x, as_, bs):
        ys, vjp = jax.vjp(partial(ours("xla"), arguments | {"tile_adapter": table}), x, as_, bs)
        return ys, *vjp(tuple(dys))

    per_row = on_device(np.repeat(TABLE, TILE), np.int32)
    inputs = [arguments[name] for name in ("x", "as_", "bs")]
    got, want = both_ways(per_row, *inputs), both_ways(arguments["tile_adapter"], *inputs)
    assert max(jax.tree.leaves(jax.tree.map(relative, got, want))) < 1e-6
    broken = [array.at[2].set(np.nan) for array in inputs[1]]
    ys, dx, das, dbs = both_ways(per_row, inputs[0], broken, inputs[2])
    others = np.repeat(TABLE, TILE) != 2
    for rows in (*(np.asarray(y)[others] for y in ys), np.asarray(dx)[others]):
        assert np.isfinite(rows).all()
    chex.assert_trees_all_equal(*([array[:2] for array in (*das, *dbs)] for das, dbs in ((das, dbs), got[2:])))


def test_memory_of_an_entry_per_row_grows_with_the_rows():
    def temporaries(rows, adapters):
        def loss(x, a, b, w, table):
            y = pk.multi_lora_linear(x, w, a, b, tile_adapter=table, scale=filled(1.0, adapters), implementation="xla")
            return jnp.sum(y * y)

        shapes = (rows, 256), (adapters, 256, 8), (adapters, 8, 256), (256, 256)
        floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*floats, jax.ShapeDtypeStruct((rows,), jnp.int32))
        memory = program.compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    copies = jax.__version_info__ < (0, 12)  # XLA of jax 0.11 copies tiles of one row: 6.1 arrays, not 5.1
    for rows, adapters in ((512, 8), (1024, 8), (512, 512)):
        most = (6 + copies) * rows * 256 * 4
        assert temporaries(rows, adapters) < most, "a few arrays of the size of the input"
