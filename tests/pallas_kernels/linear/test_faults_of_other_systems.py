"""Faults that multi-adapter systems have had, each as a test: they are easily made again."""

import jax
import numpy as np
import pytest
from host_arrays import changed
from kernel_problems import TABLE, TILE, draw, ops_and_gradients, ours, relative

BACKENDS = pytest.mark.parametrize("backend", ["xla", "pallas_triton"])


def both_ways(backend, arguments, dys):
    """y, and the gradients of x, A and B."""
    (y,), dx, (da,), (db,) = jax.device_get(ops_and_gradients(ours(backend), arguments, dys))
    return y, dx, da, db


@BACKENDS
def test_dropout_is_on_the_lora_branch_only(backend):
    arguments, dys = draw(table=TABLE, rates=[0.9, 0.9, 0.9])
    arguments["bs"] = [changed(arguments["bs"][0], ..., 0)]
    y, dx, *_ = both_ways(backend, arguments, dys)
    plain_y, plain_dx, *_ = both_ways(backend, arguments | {"dropout": None}, dys)
    np.testing.assert_array_equal(y, plain_y)
    np.testing.assert_array_equal(dx, plain_dx)


@BACKENDS
def test_a_rate_of_zero_drops_nothing(backend):
    arguments, dys = draw(table=TABLE, rates=[0.0, 0.0, 0.0])
    got, want = both_ways(backend, arguments, dys), both_ways(backend, arguments | {"dropout": None}, dys)
    assert all(relative(g, w) < 1e-6 for g, w in zip(got, want, strict=True))


@BACKENDS
def test_the_scale_of_an_adapter_does_not_depend_on_who_shares_the_call(backend):
    arguments, dys = jax.device_get(draw(table=[0, 0, 1, 2, 1, -1]))
    rows = slice(0, 2 * TILE)
    alone = arguments | {name: [arguments[name][0][:1]] for name in ("as_", "bs")}
    alone |= {"tile_adapter": np.array([0, 0, -1, -1, -1, -1], np.int32), "scale": arguments["scale"][:1]}
    assert arguments["scale"][0] == 0.5
    y, dx, da, db = both_ways(backend, arguments, dys)
    own_y, own_dx, own_da, own_db = both_ways(backend, alone, dys)
    for got, want in ((y[rows], own_y[rows]), (dx[rows], own_dx[rows]), (da[0], own_da[0]), (db[0], own_db[0])):
        np.testing.assert_array_equal(got, want)
    low = (arguments["x"] @ arguments["as_"][0][0] @ arguments["bs"][0][0])[rows]
    assert relative(y[rows] - (arguments["x"] @ arguments["ws"][0])[rows], 0.5 * low) < 1e-5


@BACKENDS
def test_more_than_four_adapters(backend):
    arguments, dys = draw(table=[8, 3, 0, 7, 1, 2, 6, 5, 4], adapters=9)
    y, *_ = both_ways(backend, arguments, dys)
    owner = np.repeat(np.asarray(arguments["tile_adapter"]), TILE)
    x, w, a, b = (np.asarray(v, np.float64) for v in (arguments["x"], *(arguments[n][0] for n in ("ws", "as_", "bs"))))
    low = np.einsum("tk,tkr,trn->tn", x, a[owner], b[owner], optimize=True)
    assert relative(y, x @ w + np.asarray(arguments["scale"], np.float64)[owner, None] * low) < 1e-5


@BACKENDS
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["x", "as_", "bs"])
def test_what_is_not_finite_stays_with_its_adapter(backend, poison, where):
    sick, well = 1, np.repeat(np.array(TABLE), TILE) != 1
    arguments, dys = draw(table=TABLE, rates=[0.1, 0.0, 0.5])
    ill = dict(arguments)
    if where == "x":
        ill["x"] = changed(arguments["x"], ~well, poison)
    else:
        ill[where] = [changed(arguments[where][0], sick, poison)]
    got, want = (both_ways(backend, call, dys) for call in (ill, arguments))
    for rows in (0, 1):
        np.testing.assert_array_equal(got[rows][well], want[rows][well])
    for bank in (2, 3):
        np.testing.assert_array_equal(got[bank][[0, 2]], want[bank][[0, 2]])
    assert not np.isfinite(got[0][~well]).all()
