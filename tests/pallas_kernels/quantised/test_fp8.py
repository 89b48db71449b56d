"""Ops on a weight of 8-bit floats: against float64 of its values, and what rows may and may not see of each other."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import H200, lowered, num_kernels
from host_arrays import changed, normal, on_device
from jax.sharding import AbstractMesh, AxisType, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from sharded_problems import mesh_of, put

import pallas_kernels as pk
from pallas_kernels.frozen_weight import frozen_product
from pallas_kernels.quantised import fp8
from pallas_kernels.quantised.passes import pallas, xla
from pallas_kernels.quantised.rows import E4M3, round_rows

T, K, N, R, TILE = 64, 96, 80, 4, 16
TABLE, SCALE = on_device([0, 1, -1, 0], np.int32), on_device([2.0, 0.5], np.float32)
HALF_STEP = 2.0**-4  # e4m3 keeps three bits of mantissa


@pytest.fixture(scope="module")
def arrays():
    x, w, dy = (normal(seed, shape) for seed, shape in enumerate(((T, K), (K, N), (T, N))))
    a, b = normal(3, (2, K, R), 0.1), normal(4, (2, R, N), 0.1)
    return {"x": x, "w": fp8.quantise(w), "a": a, "b": b, "dy": dy}


def op(x, w, a, b):
    return pk.multi_lora_linear(x, w, a, b, tile_adapter=TABLE, scale=SCALE)


@jax.jit
def step(x, w, a, b, dy):
    y, pullback = jax.vjp(lambda x, a, b: op(x, w, a, b), x, a, b)
    return {"y": y} | dict(zip(("dx", "da", "db"), pullback(dy), strict=True))


def wide(array) -> np.ndarray:
    return np.asarray(np.asarray(array, np.float32), np.float64)


def rounded(rows_TK) -> np.ndarray:
    values, scales = jax.jit(round_rows)(rows_TK)
    return wide(values) * np.float64(scales)


def test_a_weight_is_rounded_to_half_a_step(arrays):
    w = on_device(np.asarray(normal(7, (K, N))) * np.exp(np.arange(N) / 8 - 5), np.float32)
    error = np.abs(wide(fp8.dequantise(fp8.quantise(w), jnp.float32)) - wide(w))
    smallest = np.abs(wide(w)).max(0) * 2.0**-15  # below it steps are even
    assert (error <= np.maximum(HALF_STEP * np.abs(wide(w)), smallest)).all()


def test_the_op_is_exact_for_rounded_rows_in_float64(arrays):
    """Only rows of x and dY are rounded, so with rounded rows in float64 nothing but float32 sums is left."""
    got = step(**arrays)
    x, dy, a, b = (wide(arrays[name]) for name in ("x", "dy", "a", "b"))
    w = wide(fp8.dequantise(arrays["w"], jnp.float32))
    y = rounded(arrays["x"]) @ w
    dx = rounded(on_device(np.asarray(arrays["dy"]) * np.asarray(arrays["w"].scales))) @ wide(arrays["w"].values)
    da, db = np.zeros_like(a), np.zeros_like(b)
    for tile, adapter in enumerate(TABLE.tolist()):
        if adapter < 0:
            continue
        members, scale = slice(tile * TILE, tile * TILE + TILE), float(SCALE[adapter])
        ds = scale * dy[members] @ b[adapter].T
        y[members] += scale * x[members] @ a[adapter] @ b[adapter]
        dx[members] += ds @ a[adapter].T
        da[adapter] += x[members].T @ ds
        db[adapter] += scale * (x[members] @ a[adapter]).T @ dy[members]
    for name, exact in {"y": y, "dx": dx, "da": da, "db": db}.items():
        np.testing.assert_allclose(got[name], exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max(), err_msg=name)


def test_rows_do_not_see_each_other(arrays):
    """Other rows a hundred times as large, or full of NaN: the same bits."""
    before = step(**arrays)
    for spoil in (lambda rows_TK: rows_TK * 100, lambda rows_TK: rows_TK * np.nan):
        rest = slice(TILE, None)
        other = {name: changed(arrays[name], rest, spoil(np.asarray(arrays[name])[rest])) for name in ("x", "dy")}
        after = step(**arrays | other)
        for name in ("y", "dx"):
            np.testing.assert_array_equal(np.asarray(after[name])[:TILE], np.asarray(before[name])[:TILE])


def test_siblings_and_layers_without_adapters_take_them_too(arrays):
    x, w, a, b = (arrays[name] for name in ("x", "w", "a", "b"))
    both = pk.multi_lora_linears(x, [w, w], [a, None], [b, None], tile_adapter=TABLE, scale=SCALE)
    np.testing.assert_array_equal(both[0], op(x, w, a, b))
    np.testing.assert_array_equal(both[1], frozen_product(x, w))
    dx = jax.grad(lambda x: (frozen_product(x, w) * arrays["dy"]).sum())(x)
    np.testing.assert_array_equal(dx, w.multiply_transposed(arrays["dy"]))


def test_weights_in_both_orders_multiply_alike(arrays):
    w = arrays["w"]
    twice = fp8.Fp8Weight(values=w.values, scales=w.scales, transposed=w.values.T)
    np.testing.assert_array_equal(twice.multiply_transposed(arrays["dy"]), w.multiply_transposed(arrays["dy"]))


@pytest.mark.parametrize("passes", [pallas, xla])
@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize("columns", [96, 384])
def test_the_passes_round_as_the_formula_does(passes, factor, columns):
    x = changed(changed(on_device(normal(1, (32, columns)), jnp.bfloat16), 0, 0), (1, 5), 3e38)
    f = on_device(np.exp(normal(2, (columns,)))) if factor else None
    got = passes.round_rows(x, f, interpret=True)
    x = np.asarray(x, np.float32)
    f = np.float32(1) if f is None else np.asarray(f)
    wanted = round_rows(jax.jit(jnp.multiply)(x, f))
    for actual, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(wide(actual), wide(other))


@pytest.mark.parametrize("passes", [pallas, xla])
def test_the_last_step_of_a_product_adds_each_blocks_adapter(passes):
    sums, s, bank = normal(10, (64, 128)), normal(11, (64, 48)), normal(12, (3, 16, 128))
    scales, columns = on_device(np.exp(normal(13, (64, 1)))), on_device(np.arange(1.0, 129.0), np.float32)
    owners = on_device([2, 0, 0, 1], np.int32)
    got = passes.finish(sums, scales, columns, s, bank, owners, rank_offset=32, interpret=True)
    low = np.concatenate([wide(s)[i * 16 : i * 16 + 16, 32:] @ wide(bank)[k] for i, k in enumerate((2, 0, 0, 1))])
    np.testing.assert_allclose(got, wide(sums) * wide(scales) * wide(columns) + low, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("dtype", "name"), [(jnp.bfloat16, "bf16"), (jnp.float16, "f16")])
def test_on_hopper_both_sides_of_every_product_are_eight_bits(dtype, name):
    """Our own products serve bfloat16, cuBLAS's float16."""
    rows_, shape = 2048, jax.ShapeDtypeStruct
    ws = [
        fp8.Fp8Weight(values=shape((n, 4096), E4M3), scales=shape((n,), jnp.float32)) for n in (4096, 1024)
    ]  # fmt: skip
    banks = [(shape((4, 4096, 16), jnp.float32), shape((4, 16, w.shape[1]), jnp.float32)) for w in ws]
    dys = [shape((rows_, w.shape[1]), dtype) for w in ws]

    def both(x, ws, as_, bs, dys):
        keys = {"key": jnp.arange(4, dtype=jnp.uint32), "row_key": jnp.arange(rows_, dtype=jnp.uint32)}
        call = partial(
            pk.multi_lora_linears, tile_adapter=jnp.zeros(rows_ // 128, jnp.int32), scale=jnp.ones(4),
            dropout=pk.Dropout(rate=jnp.full(4, 0.1), **keys),
        )  # fmt: skip
        ys, pullback = jax.vjp(lambda x, a, b: call(x, ws, a, b), x, as_, bs)
        return ys, pullback(tuple(dys))

    text = lowered(H200, both, shape((rows_, 4096), dtype), ws, *map(list, zip(*banks, strict=True)), dys)
    products = [line for line in text.splitlines() if "dot_general" in line]
    own_products = 4 if dtype == jnp.bfloat16 else 0
    assert len([line for line in products if line.count("f8E4M3FN") == 2]) == 4 - own_products
    assert not [line for line in products if f"4096x4096x{name}" in line.split("->")[0]]
    assert num_kernels(text)[1] == 2 + own_products  # Hopper's passes over x


def test_on_a_mesh_of_hoppers_shards_multiply_eight_bits_and_bytes_are_gathered():
    """N over tensor devices, K over the devices of the rows."""
    mesh = AbstractMesh((2, 2), ("data", "tensor"), (AxisType.Explicit,) * 2, abstract_device=H200)

    def on_mesh(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    x, dy = (on_mesh((8192, 4096), jnp.bfloat16, "data", axis) for axis in (None, "tensor"))
    values, scales = on_mesh((4096, 4096), E4M3, "tensor", "data"), on_mesh((4096,), jnp.float32, "tensor")
    a, b = on_mesh((4, 4096, 16), jnp.float32), on_mesh((4, 16, 4096), jnp.float32)
    table = on_mesh((64,), jnp.int32, "data")

    def both(x, values, scales, a, b, table, dy):
        w = fp8.Fp8Weight(values=values, scales=scales)
        y, pullback = jax.vjp(
            lambda x, a, b: pk.multi_lora_linear(x, w, a, b, tile_adapter=table, scale=jnp.ones(4)), x, a, b
        )
        return y, pullback(dy)

    with use_abstract_mesh(mesh):
        traced = jax.jit(both).trace(x, values, scales, a, b, table, dy)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = [line for line in text.splitlines() if "mosaic_gpu_v2" in line and line.count("f8E4M3FN") == 2]
    assert len(kernels) == 2  # our own products
    assert "2048x4096xf8E4M3FN" in kernels[0]  # W of a shard
    moved = re.findall(r"sharding_constraint %\S+ .*: tensor<4096x4096x(\w+)>", text)
    assert set(moved) == {"f8E4M3FN"}


def test_a_device_rounds_its_part_of_a_row(arrays):
    """K over two devices: scales of parts are powers of two as well, so only the smallest values round otherwise."""
    mesh = mesh_of("explicit", data=2, tensor=2)
    with jax.set_mesh(mesh):
        weight = fp8.Fp8Weight(
            values=put(mesh, arrays["w"].values, None, "tensor"), scales=put(mesh, arrays["w"].scales)
        )
        whole = {name: put(mesh, arrays[name]) for name in ("a", "b")}
        rows = {"x": put(mesh, arrays["x"], "data", "tensor"), "dy": put(mesh, arrays["dy"], "data")}
        got = step(w=weight, **whole, **rows)
    for name, want in step(**arrays).items():
        np.testing.assert_allclose(got[name], want, rtol=0, atol=1e-5 * np.abs(want).max(), err_msg=name)


def test_a_weight_that_cannot_be_split_is_refused_on_a_mesh(arrays):
    class Whole(fp8.Fp8Weight):
        def dimensions(self):
            return None

    jax.tree_util.register_dataclass(Whole, ["values", "scales"], ["transposed"])
    mesh = mesh_of("explicit", data=2)
    with jax.set_mesh(mesh):
        x = put(mesh, arrays["x"], "data")
        whole = Whole(values=arrays["w"].values, scales=arrays["w"].scales)
        with pytest.raises(NotImplementedError, match="quantise it where it lies on the mesh"):
            op(x, whole, arrays["a"], arrays["b"])
