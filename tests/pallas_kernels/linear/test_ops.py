"""Values and gradients of the ops against the plain formula, by backend, and what they promise beside values."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_arrays import changed, filled, on_device
from jax.sharding import PartitionSpec as P
from kernel_problems import TABLE, TILE, draw, new_residuals, ops_and_gradients, ours, relative
from more_cases import mostly_nightly, nightly

import pallas_kernels as pk
from benchmarks.kernel_calls import formula

BACKENDS = ["xla", "pallas_triton"]
# float32 sums of a few hundred terms differ by their order: about 1e-7 each; bfloat16 rounds y, S and dS to 8 bits
FLOAT32, BFLOAT16 = 1e-5, 1e-2

CASES = {
    "plain": {},
    "dropout": {"rates": [0.0, 0.1, 0.5]},
    "odd shapes": {"k": 200, "widths": (70,), "ranks": (20,), "rates": [0.3, 0.1, 0.0], "bias": True},
    "ranks": {"ranks": (20,)},
    "siblings": {"k": 90, "widths": (64, 30, 70), "ranks": (8, None, 20), "rates": [0.2, 0.0, 0.1], "bias": True},
}


@pytest.mark.parametrize(
    ("case", "backend"),
    mostly_nightly(
        list(product(CASES, BACKENDS)),
        product(["siblings"], BACKENDS),
    ),
)
def test_values_and_gradients(backend, case):
    arguments, dys = draw(table=TABLE, **CASES[case])
    got, want = ops_and_gradients(ours(backend), arguments, dys), formula(arguments, dys)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(g, w) < FLOAT32


@pytest.mark.parametrize("backend", [nightly("xla"), "pallas_triton"])
def test_half_precision_input_with_float32_adapters(backend):
    arguments, dys = draw(table=TABLE, rates=[0.0, 0.1, 0.5], dtype=jnp.bfloat16)
    got = ops_and_gradients(ours(backend), arguments, dys)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(formula(arguments, dys)), strict=True):
        assert relative(g, w) < BFLOAT16
    ys, dx, das, dbs = got
    assert (ys[0].dtype, dx.dtype, das[0].dtype, dbs[0].dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_of_one_adapter_changes_no_bit_of_another(backend):
    arguments, dys = draw(table=TABLE, rates=[0.0, 0.1, 0.5])
    clean = jax.device_get(ops_and_gradients(ours(backend), arguments, dys))
    sick = 1
    rows = np.repeat(TABLE, TILE) == sick
    bad = {
        **arguments,
        "x": changed(arguments["x"], rows, np.nan),
        "as_": [changed(arguments["as_"][0], sick, np.inf)],
        "bs": [changed(arguments["bs"][0], sick, np.nan)],
    }
    bad_dys = [changed(dy, rows, np.nan) for dy in dys]
    ys, dx, das, dbs = jax.device_get(ops_and_gradients(ours(backend), bad, bad_dys))
    others = np.array([0, 2])
    np.testing.assert_array_equal(ys[0][~rows], clean[0][0][~rows])
    np.testing.assert_array_equal(dx[~rows], clean[1][~rows])
    np.testing.assert_array_equal(das[0][others], clean[2][0][others])
    np.testing.assert_array_equal(dbs[0][others], clean[3][0][others])
    assert np.isnan(ys[0][rows]).all()
    assert np.isnan(das[0][sick]).any()
    assert np.isnan(dbs[0][sick]).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_padding_rows_reaches_nobody(backend):
    arguments, dys = draw(table=TABLE, rates=[0.1, 0.1, 0.1])
    clean = jax.device_get(ops_and_gradients(ours(backend), arguments, dys))
    rows = np.repeat(TABLE, TILE) == -1
    bad = {**arguments, "x": changed(arguments["x"], rows, np.nan)}
    bad_dys = [changed(dy, rows, np.nan) for dy in dys]
    ys, _, das, dbs = jax.device_get(ops_and_gradients(ours(backend), bad, bad_dys))
    np.testing.assert_array_equal(ys[0][~rows], clean[0][0][~rows])
    np.testing.assert_array_equal(das[0], clean[2][0])
    np.testing.assert_array_equal(dbs[0], clean[3][0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_company_does_not_change_an_adapter(backend):
    """Adapter 1 beside others, and the same rows alone: another T may cut sums differently, so equal to rounding."""
    arguments, dys = jax.device_get(draw(table=TABLE, rates=[0.0, 0.1, 0.5]))
    together = jax.device_get(ops_and_gradients(ours(backend), arguments, dys))
    rows = np.repeat(TABLE, TILE) == 1
    alone = {
        **arguments,
        "x": arguments["x"][rows],
        "as_": [arguments["as_"][0][1:2]],
        "bs": [arguments["bs"][0][1:2]],
        "tile_adapter": np.zeros(TABLE.count(1), np.int32),
        "scale": arguments["scale"][1:2],
        "dropout": pk.Dropout(
            rate=arguments["dropout"].rate[1:2],
            key=arguments["dropout"].key[1:2],
            row_key=arguments["dropout"].row_key[rows],
        ),
    }
    ys, dx, das, dbs = ops_and_gradients(ours(backend), alone, [dy[rows] for dy in dys])
    assert relative(together[0][0][rows], ys[0]) < 1e-6
    assert relative(together[1][rows], dx) < 1e-6
    assert relative(together[2][0][1], das[0][0]) < 1e-6
    assert relative(together[3][0][1], dbs[0][0]) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_owns_the_other_tiles_changes_no_bit_of_an_adapter(backend):
    arguments, dys = draw(table=TABLE, rates=[0.0, 0.1, 0.5])
    rows = np.repeat(TABLE, TILE) == 1
    once = jax.device_get(ops_and_gradients(ours(backend), arguments, dys))
    for table in ([1, 0, 2, 1, -1, 2], [1, -1, -1, 1, -1, -1], [1, 2, 0, 1, 0, -1]):
        owned = {**arguments, "tile_adapter": on_device(table, np.int32)}
        again = jax.device_get(ops_and_gradients(ours(backend), owned, dys))
        mine = [(ys[0][rows], dx[rows], das[0][1], dbs[0][1]) for ys, dx, das, dbs in (once, again)]
        for want, got in zip(*mine, strict=True):
            np.testing.assert_array_equal(got, want)
        assert (again[0][0][~rows] != once[0][0][~rows]).any()


@pytest.mark.nightly  # test_random_calls.py has values and gradients of it
@pytest.mark.parametrize("backend", BACKENDS)
def test_single_adapter_op_is_the_same_op(backend):
    arguments, _ = draw(table=[0, 0, 0], adapters=1, rates=[0.1])
    x, w, a, b = arguments["x"][:70], arguments["ws"][0], arguments["as_"][0][0], arguments["bs"][0][0]
    drop = arguments["dropout"]
    drop = pk.Dropout(rate=drop.rate, key=drop.key, row_key=drop.row_key[:70])
    y = pk.lora_linear(x, w, a, b, scale=0.5, dropout=drop, implementation=backend)
    ((want,), *_) = formula(arguments, [np.zeros((3 * TILE, w.shape[1]))])
    assert relative(y, want[:70]) < FLOAT32
    assert pk.lora_linear(x.reshape(2, 35, -1), w, a, b, scale=0.5).shape == (2, 35, w.shape[1])


def test_the_frozen_weight_gets_no_gradient_work():
    arguments, dys = draw(table=TABLE, k=96, widths=(160,))

    def loss(x, a, b):
        y = pk.multi_lora_linear(
            x, arguments["ws"][0], a, b, tile_adapter=arguments["tile_adapter"], scale=arguments["scale"]
        )
        return jnp.vdot(y, dys[0])

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(arguments["x"], arguments["as_"][0], arguments["bs"][0]))
    assert "96,160]" in text  # w itself is there ...
    assert ":f32[96,160] = dot_general" not in text  # ... but nothing computes its gradient


@pytest.mark.nightly  # `test_transformations.py` has it with three layers
def test_scan_remat_and_saved_names():
    arguments, _ = draw(table=TABLE, widths=(128,), rates=[0.0, 0.1, 0.5])
    drop = arguments["dropout"]
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 0.5]), (arguments["as_"][0], arguments["bs"][0]))

    def loss(banks, x, wrap):
        def body(h, layer):
            (a, b), number = layer
            site = pk.Dropout(rate=drop.rate, key=pk.fold_key(drop.key, number), row_key=drop.row_key)
            y = pk.multi_lora_linear(
                h, arguments["ws"][0], a, b, tile_adapter=arguments["tile_adapter"], scale=arguments["scale"],
                dropout=site,
            )  # fmt: skip
            return y, None

        y, _ = jax.lax.scan(wrap(body), x, (banks, jnp.arange(2)))
        return jnp.sum(y**2)

    policy = jax.checkpoint_policies.save_only_these_names("lora_s")
    plain = jax.jit(jax.grad(lambda banks, x: loss(banks, x, lambda f: f)))(stacked, arguments["x"])
    again = jax.jit(jax.grad(lambda banks, x: loss(banks, x, lambda f: jax.checkpoint(f, policy=policy))))(
        stacked, arguments["x"]
    )
    for p, q in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        assert relative(q, p) < 1e-6  # recomputed with the same dropout


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("names", [None, ("lora_s", "lora_bits")])
@pytest.mark.parametrize("case", ["one", "siblings"])
def test_residuals_are_the_callers_own_arrays_besides_s_and_bits(backend, names, case):
    siblings = {"widths": (64, 96, 64), "ranks": (8, None, 16)} if case == "siblings" else {}
    arguments, _ = draw(table=TABLE, rates=[0.0, 0.1, 0.5], bias=True, **siblings)
    made = new_residuals(ours(backend), arguments, names)
    rows = TILE * len(TABLE)
    ranks = {"one": [8], "siblings": [8, 16]}[case]
    if backend == "xla":  # S by tiles; the mask is made again
        assert made == [(len(TABLE), TILE, rank) for rank in ranks]
    else:  # S of all projections side by side, ranks padded to 16; packed bits
        assert sorted(made) == sorted([(rows, 16 * len(ranks)), (rows, 1, 8)])


# under check_vma=True jax cannot interpret Pallas kernels (it says so); that they lower there is tested beside them
@pytest.mark.parametrize(
    ("backend", "check_vma"), [("xla", True), nightly("xla", False), nightly("pallas_triton", False)]
)
def test_shard_map_sums_adapter_gradients(backend, check_vma):
    arguments, dys = draw(table=TABLE, rates=[0.0, 0.1, 0.5])
    want = ops_and_gradients(ours("xla"), arguments, dys)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = P("data")
    layer = jax.shard_map(
        lambda x, w, a, b, table, scale, drop: pk.multi_lora_linear(
            x, w, a, b, tile_adapter=table, scale=scale, dropout=drop, implementation=backend
        ),
        mesh=mesh,
        in_specs=(rows, P(), P(), P(), rows, P(), pk.Dropout(rate=P(), key=P(), row_key=rows)),
        out_specs=rows,
        check_vma=check_vma,
    )

    @jax.jit
    def gradients(x, a, b):
        def loss(x, a, b):
            table, scale, drop = arguments["tile_adapter"], arguments["scale"], arguments["dropout"]
            y = layer(x, arguments["ws"][0], a, b, table, scale, drop)
            return jnp.vdot(y, dys[0]), y

        return jax.grad(loss, (0, 1, 2), has_aux=True)(x, a, b)

    (dx, da, db), y = gradients(arguments["x"], arguments["as_"][0], arguments["bs"][0])
    assert relative(y, want[0][0]) < 1e-6
    assert relative(dx, want[1]) < 1e-6
    assert relative(da, want[2][0]) < 1e-6
    assert relative(db, want[3][0]) < 1e-6


@pytest.mark.parametrize("backend", [nightly("xla"), "pallas_triton"])
def test_without_a_table_every_row_is_of_adapter_0(backend):
    arguments, _ = draw(table=[0, 0], rates=[0.1, 0.0, 0.5])

    def step(table):
        def loss(x, a, b):
            rest = {name: arguments[name] for name in ("scale", "dropout")}
            y = pk.multi_lora_linear(x, arguments["ws"][0], a, b, tile_adapter=table, implementation=backend, **rest)
            return (y**2).sum(), y

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*(arguments["x"], *arguments["as_"], *arguments["bs"]))

    got, want = step(None), step(arguments["tile_adapter"])
    for actual, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(actual, other) < 1e-6


@pytest.mark.wrong_types
def test_names_and_shapes_are_checked():
    arguments, _ = draw(table=TABLE)
    x, w, a, b = arguments["x"], arguments["ws"][0], arguments["as_"][0], arguments["bs"][0]
    rest = {"tile_adapter": arguments["tile_adapter"], "scale": arguments["scale"]}
    with pytest.raises(ValueError, match="choose one of pallas_mosaic_gpu, pallas_triton, xla"):
        pk.multi_lora_linear(x, w, a, b, **rest, implementation="cuda")
    with pytest.raises(NotImplementedError, match="Hopper"):
        pk.multi_lora_linear(x, w, a, b, **rest, implementation="pallas_mosaic_gpu")
    with pytest.raises(ValueError, match=r"b of projection 0 .*; scale has shape \(2,\), expected \(3,\)"):
        pk.multi_lora_linear(x, w, a, b[:, :4], tile_adapter=rest["tile_adapter"], scale=filled(1.0, 2))
    with pytest.raises(ValueError, match="must split into that many equal tiles"):
        pk.multi_lora_linear(x, w, a, b, tile_adapter=on_device(np.zeros(5, np.int32)), scale=rest["scale"])
    table = on_device(np.zeros(24, np.int32))
    with pytest.raises(NotImplementedError, match="multiple of 16"):
        pk.multi_lora_linear(x, w, a, b, tile_adapter=table, scale=rest["scale"], implementation="pallas_triton")


@pytest.mark.wrong_types
@pytest.mark.parametrize("backend", [nightly(None), *BACKENDS])
def test_no_rows_and_scales_of_other_shapes(backend):
    arguments, _ = draw(table=TABLE)
    x, w, a, b = arguments["x"], arguments["ws"][0], arguments["as_"][0], arguments["bs"][0]
    table, scale = arguments["tile_adapter"], arguments["scale"]

    def op(x=x, **others):
        rest = {"tile_adapter": table, "scale": scale, **others}
        return pk.multi_lora_linear(x, w, a, b, **rest, implementation=backend)

    for number in (0.5, on_device(0.5), filled(1.0, 3, 1)):
        with pytest.raises(ValueError, match=r"scale has shape .*, expected \[A\]: one number per adapter"):
            op(scale=number)
    with pytest.raises(ValueError, match=r"scale has shape \(3,\), expected one number"):
        pk.lora_linear(x, w, a[0], b[0], scale=scale, implementation=backend)
    with pytest.raises(ValueError, match=r"x has shape \(3, 0\), expected \[..., K\] with at least one feature"):
        op(filled(1.0, 3, 0))
    with pytest.raises(ValueError, match="x is float8_e4m3fn, expected bfloat16"):
        op(on_device(x, jnp.float8_e4m3fn))
    np.testing.assert_array_equal(op(scale=scale.tolist()), op())


@pytest.mark.wrong_types
def test_a_call_without_rows_gives_none_and_has_zero_gradients():
    arguments, _ = draw(table=TABLE)
    w, a, b = arguments["ws"][0], arguments["as_"][0], arguments["bs"][0]

    def op(a, shape, **others):
        x = filled(1.0, *shape, 128)
        return pk.multi_lora_linear(x, w, a, b, scale=arguments["scale"], **others)

    for shape, table in (((0,), np.zeros(0, np.int32)), ((2, 0), TABLE), ((0, 3), None)):
        assert op(a, shape, tile_adapter=table).shape == (*shape, w.shape[1])
    assert not jax.grad(lambda a: op(a, (0,), tile_adapter=None).sum())(a).any()
    half = pk.lora_linear(filled(1.0, 0, 128).astype(jnp.bfloat16), w, a[0], b[0], scale=0.5)
    assert half.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="expected"):
        op(a[:, 1:], (0,), tile_adapter=None)


@pytest.mark.parametrize("backend", ["xla", nightly("pallas_triton")])  # the rule is one of all backends
def test_scale_gets_a_zero_gradient(backend):
    arguments, _ = draw(table=TABLE)

    def loss(scale):
        return jnp.sum(ours(backend)({**arguments, "scale": scale}, *(arguments[n] for n in ("x", "as_", "bs")))[0])

    assert loss(arguments["scale"]) != loss(2 * arguments["scale"])
    assert not jax.grad(loss)(arguments["scale"]).any()


@pytest.mark.parametrize("backend", [nightly(None), *BACKENDS])
def test_ranks_change_nothing_where_the_other_columns_are_zero(backend):
    arguments, _ = draw(table=TABLE)
    ranks = (8, 3, 5)
    in_rank = np.arange(8) < np.array(ranks)[:, None]
    rest = {name: arguments[name] for name in ("tile_adapter", "scale")}
    a = on_device(arguments["as_"][0] * in_rank[:, None, :], np.float32)
    b = on_device(arguments["bs"][0] * in_rank[:, :, None], np.float32)

    def op(**options):
        return pk.multi_lora_linear(arguments["x"], arguments["ws"][0], a, b, **rest, implementation=backend, **options)

    np.testing.assert_array_equal(op(ranks=ranks), op())
    traced = jax.jit(lambda ranks: op(ranks=ranks))(on_device(ranks))
    np.testing.assert_array_equal(traced, jax.jit(op)())  # one program and single operations round apart on some CPUs


@pytest.mark.wrong_types
def test_ranks_of_other_kinds_are_named():
    arguments, _ = draw(table=TABLE)
    given = [arguments["x"], *(arguments[name][0] for name in ("ws", "as_", "bs"))]
    rest = {name: arguments[name] for name in ("tile_adapter", "scale")}
    with pytest.raises(ValueError, match=r"ranks has shape \(2,\), expected \(3,\)"):
        pk.multi_lora_linear(*given, **rest, ranks=(8, 8))
    with pytest.raises(ValueError, match=r"ranks\[1\] is -1, expected 0 or more"):
        pk.multi_lora_linear(*given, **rest, ranks=(8, -1, 8))
    with pytest.raises(TypeError, match="ranks is float32, expected int32"):
        pk.multi_lora_linear(*given, **rest, ranks=(0.5, 1.0, 8.0))


@pytest.mark.wrong_types
def test_what_is_of_another_kind_is_named():
    x, w, a, b = filled(1.0, 4, 8), filled(1.0, 8, 6), filled(1.0, 2, 8, 4), filled(0.0, 2, 4, 6)
    table, scale = on_device([0, 1]), on_device([2.0, 1.0])

    def call(x=x, a=a, b=b, tile_adapter=table, scale=scale, dropout=None):
        return pk.multi_lora_linear(x, w, a, b, tile_adapter=tile_adapter, scale=scale, dropout=dropout)

    assert call().shape == (4, 6)
    assert call(tile_adapter=[0, 1], scale=[2.0, 1.0]).shape == (4, 6)
    with pytest.raises(ValueError, match=r"^scale has shape \(3,\), expected \(2,\)$"):  # a and b are as they should be
        call(scale=filled(1.0, 3))
    with pytest.raises(ValueError, match="no adapter"):
        call(a=a[:0], b=b[:0], scale=scale[:0])
    with pytest.raises(TypeError, match=r"dropout is 0\.1, expected None or a Dropout"):
        call(dropout=0.1)
    with pytest.raises(TypeError, match=r"dropout is 0\.1, expected None or a Dropout"):
        pk.lora_linear(x, w, a[0], b[0], scale=2.0, dropout=0.1)
    with pytest.raises(TypeError, match="x is a list, expected an array"):
        call(x=[[1.0] * 8] * 4)
    for wrong in (on_device([0.0, 1.0]), on_device([False, True])):
        with pytest.raises(TypeError, match=r"tile_adapter is (float32|bool), expected int32"):
            call(tile_adapter=wrong)


@pytest.mark.wrong_types
@pytest.mark.parametrize("backend", ["xla", nightly("pallas_triton")])  # lists are arrays before a backend sees them
def test_dropout_takes_lists_and_one_adapter_takes_one_rate(backend):
    arguments, _ = draw(table=TABLE, rates=[0.0, 0.1, 0.5])
    x, w, a, b = arguments["x"], arguments["ws"][0], arguments["as_"][0], arguments["bs"][0]
    rest, drop = {name: arguments[name] for name in ("tile_adapter", "scale")}, arguments["dropout"]
    lists = pk.Dropout(
        rate=drop.rate.tolist(), key=np.asarray(drop.key).tolist(), row_key=np.asarray(drop.row_key).tolist()
    )
    want = pk.multi_lora_linear(x, w, a, b, **rest, dropout=drop, implementation=backend)
    np.testing.assert_array_equal(pk.multi_lora_linear(x, w, a, b, **rest, dropout=lists, implementation=backend), want)
    with pytest.raises(ValueError, match=r"^dropout.rate has shape \(3,\); dropout.key .*, expected one number"):
        pk.lora_linear(x, w, a[0], b[0], scale=0.5, dropout=drop, implementation=backend)
    settings = {"w": w, "a": a[0], "b": b[0], "scale": 0.5, "implementation": backend}
    by_number = pk.Dropout(rate=0.1, key=2**32 - 1, row_key=drop.row_key)
    by_array = pk.Dropout(rate=on_device([0.1]), key=on_device([2**32 - 1], jnp.uint32), row_key=drop.row_key)
    got, want = (pk.lora_linear(x, **settings, dropout=dropout) for dropout in (by_number, by_array))
    np.testing.assert_array_equal(got, want)
