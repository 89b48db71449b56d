"""Ranks that the fused kernels do not take: right at ranks 1 to 256 in one call, and nobody suffers from others.

The passes are interpreted, and compared with sums in float64.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_arrays import changed, filled, on_device
from kernel_problems import keep_mask
from more_cases import nightly

from pallas_kernels.dropout import Dropout, inverse_keep, keep_words
from pallas_kernels.linear import passes
from pallas_kernels.linear.extra_ranks import split_ranks
from pallas_kernels.linear.hopper import backend
from pallas_kernels.linear.passes import pallas, xla
from pallas_kernels.policy import first_ranks
from pallas_kernels.problem import Operands, Static, linear_shape

FIRST, TILE, K, WIDTHS = 16, 64, 128, (128, 64, 64)
SEVERAL = (1, 16, 17, 40, 81, 130, 256)
MANY = tuple(1 + 7 * i % 96 for i in range(300))


@functools.cache
def drawn(ranks, seed=0):
    """A call whose projections have their own largest rank; the last has none beyond the first ones."""
    random = np.random.default_rng(seed)
    count, tiles = len(ranks), 9
    table = random.permutation(np.arange(tiles) % count) if count < tiles else random.integers(0, count, tiles)
    table[2] = -1
    rows = tiles * TILE
    largest = (max(ranks), max(ranks) - 3, FIRST)

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    def fit_rank(bank, axis):
        number = np.arange(bank.shape[axis]).reshape((1, 1, -1) if axis == 2 else (1, -1, 1))
        return on_device(np.where(number < np.array(ranks)[:, None, None], bank, 0))

    ops = Operands(
        x=on_device(normal(rows, K)), ws=tuple(filled(0.0, K, n) for n in WIDTHS),
        as_=tuple(fit_rank(normal(count, K, rank), 2) for rank in largest),
        bs=tuple(fit_rank(normal(count, rank, n), 1) for rank, n in zip(largest, WIDTHS, strict=True)),
        biases=(None,) * 3,
        tile_adapter=on_device(table, np.int32), scale=on_device(1 + random.random(count), np.float32),
        dropout=Dropout(
            rate=on_device(0.5 * random.random(count), np.float32), key=on_device(np.arange(count), np.uint32),
            row_key=on_device(np.arange(rows), np.uint32),
        ),
        ranks=on_device(ranks, np.int32),
    )  # fmt: skip
    dys = tuple(on_device(normal(rows, n)) for n in WIDTHS)
    return Static(tile=TILE, num_adapters=count, single=False, interpret=True), ops, dys


@functools.partial(jax.jit, static_argnums=(0, 1))
def evaluated(name, static, ops, dys):
    """What the extra ranks add to y, dx, dA and dB, by an implementation that is in use."""
    _, extra = split_ranks(static, ops, FIRST)
    assert extra is not None
    bits = keep_words(ops.dropout, jnp.repeat(ops.tile_adapter, TILE), K)
    s = extra.down(ops.x, bits)
    ys = [extra.up(i, jnp.zeros_like(dy), s) for i, dy in enumerate(dys)]
    sides = {i: extra.output_side(i, s, dys[i]) for i in extra.numbers}
    ds = extra.join([ds for ds, _ in sides.values()])
    dx = extra.add_dx(jnp.zeros_like(ops.x), ds, bits)
    return {"y": ys, "dx": dx, "da": extra.input_side(ops.x, ds, bits), "db": {i: db for i, (_, db) in sides.items()}}


def formula(ops, dys, first=FIRST):
    """The same in float64."""
    wide = functools.partial(np.asarray, dtype=np.float64)
    owner = np.repeat(np.asarray(ops.tile_adapter), TILE)
    rate = wide(jax.jit(inverse_keep)(ops.dropout.rate))[np.maximum(owner, 0)][:, None]
    factor = rate * wide(keep_mask(ops.dropout, owner, K))
    x, scale = factor * wide(ops.x), wide(ops.scale)
    ys, dx, das, dbs = [np.zeros(dy.shape) for dy in dys], np.zeros(x.shape), {}, {}
    for i in range(2):
        as_, bs, dy = wide(ops.as_[i])[:, :, first:], wide(ops.bs[i])[:, first:], wide(dys[i])
        das[i], dbs[i] = np.zeros(as_.shape), np.zeros(bs.shape)
        for adapter, (a, b) in enumerate(zip(as_, bs, strict=True)):
            rows = owner == adapter
            s, ds = x[rows] @ a, scale[adapter] * dy[rows] @ b.T
            ys[i][rows] = scale[adapter] * s @ b
            dx[rows] += factor[rows] * (ds @ a.T)
            das[i][adapter], dbs[i][adapter] = x[rows].T @ ds, scale[adapter] * s.T @ dy[rows]
    return {"y": ys, "dx": dx, "da": das, "db": dbs}


def use(name, monkeypatch):
    without_kernels = SimpleNamespace(**{name: getattr(xla, name) for name in pallas.__dict__ if hasattr(xla, name)})
    chosen = pallas if name == "pallas" else without_kernels
    monkeypatch.setattr(passes, "load", lambda: chosen)
    return name


@pytest.fixture(params=["pallas", "xla"])
def implementation(request, monkeypatch):
    return use(request.param, monkeypatch)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("pallas", SEVERAL), ("xla", SEVERAL), nightly("pallas", MANY)],
    ids=["kernels, ranks 1 to 256", "xla, ranks 1 to 256", "kernels, 300 adapters"],
)
def test_values_and_gradients_are_those_of_the_formula(monkeypatch, name, ranks):
    use(name, monkeypatch)
    static, ops, dys = drawn(ranks)
    got, want = evaluated(name, static, ops, dys), formula(ops, dys)
    for path, error in jax.tree_util.tree_leaves_with_path(jax.tree.map(relative, got, want)):
        assert error < 1e-5, (jax.tree_util.keystr(path), error)


def test_what_an_adapter_gets_does_not_depend_on_the_others(implementation):
    static, ops, dys = drawn(SEVERAL)
    sick = 5
    rows = np.repeat(np.asarray(ops.tile_adapter) != sick, TILE)
    broken = {name: tuple(changed(bank, sick, np.nan) for bank in getattr(ops, name)) for name in ("as_", "bs")}
    before = evaluated(implementation, static, ops, dys)
    after = evaluated(implementation, static, ops.__class__(**{**fields(ops), **broken}), dys)
    for old, new in zip([*before["y"], before["dx"]], [*after["y"], after["dx"]], strict=True):
        np.testing.assert_array_equal(np.asarray(old)[rows], np.asarray(new)[rows])
    others = [k for k in range(len(SEVERAL)) if k != sick]
    for old, new in zip(jax.tree.leaves((before["da"], before["db"])), jax.tree.leaves((after["da"], after["db"])),
                        strict=True):  # fmt: skip
        np.testing.assert_array_equal(np.asarray(old)[others], np.asarray(new)[others])
    assert np.isnan(after["dx"]).any()


def test_rows_of_small_adapters_are_not_visited(implementation):
    """Whatever lies in columns that an adapter does not use: nobody looks at it."""
    static, ops, dys = drawn(SEVERAL)
    small = [k for k, rank in enumerate(SEVERAL) if rank <= FIRST]
    wrong = {
        "as_": tuple(changed(a, np.s_[small, :, FIRST:], np.nan) for a in ops.as_),
        "bs": tuple(changed(b, np.s_[small, FIRST:], np.nan) for b in ops.bs),
    }
    again = evaluated(implementation, static, ops.__class__(**{**fields(ops), **wrong}), dys)
    jax.tree.map(np.testing.assert_array_equal, again, evaluated(implementation, static, ops, dys))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("pallas", (130,)), ("xla", (70, 130, 256)), nightly("pallas", (70, 130, 256)), nightly("xla", (130,))],
)  # one goes without a table
def test_a_call_of_large_ranks_alone_is_plain_products_that_add_them(name, ranks, monkeypatch):
    use(name, monkeypatch)
    static, ops, dys = drawn(ranks)
    static = dataclasses.replace(static, ranks=ranks)
    if len(ranks) == 1:
        static = dataclasses.replace(static, single=True, tile=len(ops.x))
        ops = dataclasses.replace(ops, tile_adapter=on_device(np.zeros(len(ops.tile_adapter), np.int32)), ranks=None)
    random = np.random.default_rng(1)
    ws = tuple(on_device(random.normal(size=(K, n)), np.float32) for n in WIDTHS)
    biases = (on_device(random.normal(size=WIDTHS[0]), np.float32), None, None)
    without = {name: (*getattr(ops, name)[:2], None) for name in ("as_", "bs")}  # the third has no LoRA
    ops = dataclasses.replace(ops, ws=ws, biases=biases, **without)
    assert first_ranks(linear_shape(static, ops)) == (0, 0, 0)

    @jax.jit
    def run(ops, dys):
        ys, ss, bits = backend.forward(static, ops)
        dx, das, dbs = backend.backward(static, ops, ss, bits, dys)
        return {"y": list(ys), "dx": dx, "da": das, "db": dbs}

    want = formula(ops, dys, first=0)
    wide = functools.partial(np.asarray, dtype=np.float64)
    want["y"] = [low + wide(ops.x) @ wide(w) for low, w in zip(want["y"], ops.ws, strict=True)]
    want["y"][0] += wide(biases[0])
    want["dx"] += sum(wide(dy) @ wide(w).T for dy, w in zip(dys, ops.ws, strict=True))
    for path, error in jax.tree_util.tree_leaves_with_path(jax.tree.map(relative, run(ops, dys), want)):
        assert error < 1e-5, (jax.tree_util.keystr(path), error)


def relative(got, want) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / max(np.linalg.norm(want), 1e-30))


def fields(ops):
    return {name: getattr(ops, name) for name in ops.__dataclass_fields__}
