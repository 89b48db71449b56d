"""The ops on meshes of eight simulated devices: equal to one device, and nothing is sent that need not be."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_arrays import changed
from jax.sharding import PartitionSpec as P
from kernel_problems import TILE, draw, keep_mask, normal, relative
from more_cases import mostly_nightly, nightly
from sharded_problems import KINDS, collectives, gathered, mesh_of, put

import pallas_kernels as pk
from benchmarks.kernel_calls import formula

# XLA partitions its own form on automatic axes, so little of that is ours: a case of it stands in the first test.
WAYS = [("explicit", "xla"), ("explicit", "pallas_triton"), ("automatic", "pallas_triton")]
HARDEST = [  # weights are gathered, and every other way of splitting is part of one of these
    ("columns-fsdp", "explicit", "pallas_triton"),
    ("inner-fsdp", "automatic", "pallas_triton"), ("inner-fsdp", "explicit", "xla"),
    ("columns-fsdp", "automatic", "xla"),
]  # fmt: skip
ROWS, K, N, ADAPTERS, RANK = 8 * TILE, 64, 96, 3, 8
TABLE = [0, 1, 2, -1, 1, 1, 0, 2]
MESHES = {  # mesh, x, W, A, B
    "rows": ({"data": 8}, ("data",), (), (), ()),
    "columns": ({"data": 4, "tensor": 2}, ("data",), (None, "tensor"), (), (None, None, "tensor")),
    "inner": ({"data": 4, "tensor": 2}, ("data", "tensor"), ("tensor",), (None, "tensor"), ()),
    "columns-fsdp": (
        {"data": 2, "fsdp": 2, "tensor": 2}, (("data", "fsdp"),), ("fsdp", "tensor"), (), (None, None, "tensor"),
    ),
    "inner-fsdp": (
        {"data": 2, "fsdp": 2, "tensor": 2}, (("data", "fsdp"), "tensor"), ("tensor", "fsdp"), (None, "tensor"), (),
    ),
    "both": ({"data": 2, "tensor": 2}, (("data", "tensor"),), ("tensor", "data"), (), ()),
}  # fmt: skip
RATES = [0.1, 0.5, 0.0]


def value_and_gradients(layer):
    """y and the gradients of x, as, bs; the incoming gradient is y's own."""

    def loss(x, as_, bs, rest):
        ys = layer(x, as_, bs, rest)
        return sum((y * y).sum() for y in ys) / 2, ys

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))  # op by op would compile a hundred programs


@cache
def siblings_and_gradients(implementation):
    return value_and_gradients(siblings(implementation))


def on_one_device(arguments):
    """In float64 on the host, where nothing compiles; the incoming gradient is y."""
    ys, *_ = formula(arguments, [np.zeros((ROWS, w.shape[1])) for w in arguments["ws"]])
    ys, *gradients = formula(arguments, ys)
    return (sum((y * y).sum() for y in ys) / 2, ys), tuple(gradients)


def siblings(implementation):
    def layer(x, as_, bs, rest):
        rest = dict(rest)
        return pk.multi_lora_linears(x, rest.pop("ws"), as_, bs, implementation=implementation, **rest)

    return layer


def split(arguments) -> tuple:
    rest = {name: arguments[name] for name in ("ws", "biases", "tile_adapter", "scale", "dropout")}
    return arguments["x"], arguments["as_"], arguments["bs"], rest


def put_on_mesh(mesh, arguments, x, ws, a, b):
    """The arguments on a mesh: tables lie as the rows do."""
    rows = x[:1]
    dropout = arguments["dropout"]
    if dropout is not None:
        whole = {name: put(mesh, getattr(dropout, name)) for name in ("rate", "key")}
        dropout = pk.Dropout(**whole, row_key=put(mesh, dropout.row_key, *rows))
    return arguments | {
        "x": put(mesh, arguments["x"], *x),
        "ws": [put(mesh, w, *spec) for w, spec in zip(arguments["ws"], ws, strict=True)],
        "as_": [None if v is None else put(mesh, v, *a) for v in arguments["as_"]],
        "bs": [None if v is None else put(mesh, v, *b) for v in arguments["bs"]],
        "biases": [None if v is None else put(mesh, v) for v in arguments["biases"]],
        "tile_adapter": put(mesh, arguments["tile_adapter"], *rows),
        "scale": put(mesh, arguments["scale"]),
        "dropout": dropout,
    }


def assert_equal_trees(got, want, bound=1e-6):
    for actual, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(actual, other) < bound


@pytest.mark.parametrize(
    ("case", "kind", "backend"),
    mostly_nightly([*((case, *way) for case in MESHES for way in WAYS), ("columns-fsdp", "automatic", "xla")], HARDEST),
)
def test_a_mesh_changes_no_result_and_gathers_nothing_but_fsdp_weights(case, kind, backend):
    axes, x, w, a, b = MESHES[case]
    arguments, _ = draw(table=TABLE, k=K, widths=(N,), rates=RATES, bias=True)
    want = on_one_device(arguments)
    sharded = split(put_on_mesh(mesh_of(kind, **axes), arguments, x, [w], a, b))
    step = siblings_and_gradients(backend)
    compiled = step.lower(*sharded).compile()
    assert_equal_trees(compiled(*sharded), want)
    sent = collectives(compiled)
    halves = {"columns-fsdp": {(K, N // 2), (N // 2, K)}, "inner-fsdp": {(K // 2, N), (N, K // 2)},
              "both": {(K // 2, N), (K, N // 2), (K, N)}}  # fmt: skip
    assert set(gathered(sent)) <= halves.get(case, set())
    assert len(gathered(sent)) <= 2  # of W once forward and once backward, as plain XLA does
    sizes = [shape for how, shape in sent if how in ("all-reduce", "reduce-scatter")]
    banks = [shape for shape in sizes if shape[-1:] == (RANK,) or shape[-2:-1] == (RANK,)]
    if backend != "xla":  # XLA's own form keeps partial sums in shapes of its choice
        assert sorted(banks) == sorted([(ADAPTERS, K // (1 + case.startswith("inner")), RANK),
                                        (ADAPTERS, RANK, N // (1 + case.startswith("columns")))])  # fmt: skip


def test_a_plain_product_gathers_the_same_weights():
    """What `halves` above allows is what XLA does with x @ W."""
    axes, x, w, _, _ = MESHES["columns-fsdp"]
    mesh = mesh_of("automatic", **axes)
    operands = put(mesh, np.ones((ROWS, K), np.float32), *x), put(mesh, np.ones((K, N), np.float32), *w)
    compiled = jax.jit(lambda x, w: x @ w).lower(*operands).compile()
    assert gathered(collectives(compiled)) == [(K, N // 2)]


@pytest.mark.parametrize("kind", ["automatic", nightly("explicit")])
def test_projections_on_different_axes_share_a_call(kind):
    """q on the tensor axis, k whole, v without LoRA: every gradient is summed over its own axes."""
    arguments, _ = draw(table=TABLE, k=K, widths=(64, 96, 32), ranks=(8, 4, None), rates=RATES, bias=True)
    step = siblings_and_gradients("pallas_triton")
    mesh = mesh_of(kind, data=4, tensor=2)
    sharded = split(put_on_mesh(mesh, arguments, ("data",), [(None, "tensor"), (), (None, "tensor")], (), ()))
    assert_equal_trees(step(*sharded), on_one_device(arguments))


@pytest.mark.parametrize(("kind", "backend"), mostly_nightly(WAYS, WAYS[:1]))
def test_leading_dimensions_may_each_be_split_and_tiles_need_not_divide(kind, backend):
    """[2, 128, K] with both leading dimensions split; one tile of 128 rows lies on four devices."""
    arguments, _ = draw(table=[0] * 4 + [2] * 4, k=K, widths=(N,), rates=RATES, bias=True)
    want = on_one_device(arguments)
    mesh = mesh_of(kind, data=2, sequence=4)
    on_mesh = put_on_mesh(mesh, arguments, (), [()], (), ())
    on_mesh["tile_adapter"] = put(mesh, np.array([0, 2], np.int32))
    on_mesh["x"] = put(mesh, np.asarray(arguments["x"]).reshape(2, 128, K), "data", "sequence")
    (value, ys), gradients = jax.device_get(siblings_and_gradients(backend)(*split(on_mesh)))
    gradients = gradients[0].reshape(-1, K), *gradients[1:]
    assert_equal_trees(((value, [y.reshape(-1, N) for y in ys]), gradients), want)


@pytest.mark.parametrize(("kind", "backend"), mostly_nightly(WAYS, WAYS[2:]))
def test_a_single_adapter_without_a_table(kind, backend):
    arguments, _ = draw(table=[0] * 8, k=K, widths=(N,), adapters=1, rates=[0.3])
    x, w = arguments["x"].reshape(8, TILE, K), arguments["ws"][0]
    a, b, scale, dropout = arguments["as_"][0][0], arguments["bs"][0][0], arguments["scale"][0], arguments["dropout"]

    @jax.jit
    def step(x, a, b, w, row_key):
        drop = pk.Dropout(rate=dropout.rate, key=dropout.key, row_key=row_key)

        def loss(x, a, b):
            return (pk.lora_linear(x, w, a, b, scale=scale, dropout=drop, implementation=backend) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(x, a, b)

    mesh = mesh_of(kind, data=4, tensor=2)
    sharded = put(mesh, x, "data"), put(mesh, a), put(mesh, b), put(mesh, w, None, "tensor"), put(mesh, dropout.row_key)
    assert_equal_trees(step(*sharded), step(x, a, b, w, dropout.row_key))


@pytest.mark.parametrize(("kind", "backend"), mostly_nightly(WAYS, WAYS[:1]))
def test_the_mlp_column_then_row_parallel(kind, backend):
    random = np.random.default_rng(0)
    shapes = [(K, N), (K, N), (N, K)]
    ws = [normal(random, *s, scale=s[0] ** -0.5) for s in shapes]
    as_ = [normal(random, ADAPTERS, s[0], RANK, scale=s[0] ** -0.5) for s in shapes]
    bs = [normal(random, ADAPTERS, RANK, s[1]) for s in shapes]
    arguments, _ = draw(table=TABLE, k=K, rates=RATES)

    @jax.jit
    def step(x, as_, bs, ws, table, dropout):
        def loss(x, as_, bs):
            shared = {"tile_adapter": table, "scale": [0.5, 1.0, 2.0], "implementation": backend}
            y = pk.multi_lora_mlp(x, ws, as_, bs, dropout=dropout, down_dropout=dropout, **shared)
            return (y**2).sum(), y

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, as_, bs)

    mesh = mesh_of(kind, data=4, tensor=2)
    columns, inner = (None, "tensor"), ("tensor",)
    placed = [put(mesh, w, *spec) for w, spec in zip(ws, (columns, columns, inner), strict=True)]
    on_mesh = put_on_mesh(mesh, arguments, ("data",), [()], (), ())
    whole = jax.tree.map(lambda v: put(mesh, v), (as_, bs))
    sharded = on_mesh["x"], *whole, placed, on_mesh["tile_adapter"], on_mesh["dropout"]
    want = step(arguments["x"], as_, bs, ws, arguments["tile_adapter"], arguments["dropout"])
    assert_equal_trees(step(*sharded), want)


def test_keep_bits_of_a_shard_are_those_of_its_columns():
    dropout = pk.Dropout(
        rate=np.float32([0.5, 0.1]), key=np.array([3, 4], np.uint32), row_key=np.arange(6, dtype=np.uint32)
    )
    rows, columns = np.array([0, 1, 0, 1, 1, 0]), 300
    whole = np.asarray(keep_mask(dropout, rows, 1024))
    for first in (0, 8, 100, 256, 300, 511):
        part = dataclasses.replace(dropout, first_column=np.int32(first))
        kept = np.asarray(keep_mask(part, rows, columns))
        np.testing.assert_array_equal(kept, whole[:, first : first + columns], err_msg=str(first))


@pytest.mark.parametrize(("kind", "backend"), WAYS)
def test_dropout_draws_the_same_bits_on_a_mesh(kind, backend):
    """With W = 0, A and B ones and x = 1, y counts the kept columns of a row: equal numbers, exactly."""
    arguments, _ = draw(table=TABLE, k=512, widths=(16,), rates=[0.5, 0.25, 0.0])
    arguments |= {"x": np.ones((ROWS, 512)), "ws": [np.zeros((512, 16))], "scale": np.ones(ADAPTERS)}
    powers = 2.0 ** (np.arange(512) % 16)  # not only how many: which ones
    arguments["as_"] = [np.broadcast_to(powers[None, :, None], (ADAPTERS, 512, RANK))]
    arguments["bs"] = [np.ones((ADAPTERS, RANK, 16))]
    arguments = jax.tree.map(lambda leaf: np.float32(leaf) if leaf.dtype == np.float64 else leaf, arguments)
    ((want,), *_) = formula(arguments, [np.zeros((ROWS, 16))])
    mesh = mesh_of(kind, data=2, tensor=4)
    on_mesh = split(put_on_mesh(mesh, arguments, ("data", "tensor"), [("tensor",)], (None, "tensor"), ()))
    (got,) = jax.jit(siblings(backend))(*on_mesh)
    assert relative(got, want) < 1e-6


@pytest.mark.parametrize("kind", ["explicit", nightly("automatic")])
def test_nan_of_one_adapter_stays_its_own_on_a_mesh(kind):
    arguments, _ = draw(table=TABLE, k=K, widths=(N,), rates=RATES)
    sick = arguments | {"as_": [changed(arguments["as_"][0], 1, np.nan)]}
    step = siblings_and_gradients("pallas_triton")
    mesh = mesh_of(kind, data=4, tensor=2)
    got = step(*split(put_on_mesh(mesh, sick, ("data",), [(None, "tensor")], (), ())))
    want = step(*split(put_on_mesh(mesh, arguments, ("data",), [(None, "tensor")], (), ())))
    (_, ys), (dx, das, dbs) = jax.device_get(got)
    (_, want_ys), (want_dx, want_das, want_dbs) = jax.device_get(want)
    rows, others = np.repeat(TABLE, TILE) != 1, [0, 2]
    assert_equal_trees((ys[0][rows], dx[rows]), (want_ys[0][rows], want_dx[rows]))
    assert_equal_trees((das[0][others], dbs[0][others]), (want_das[0][others], want_dbs[0][others]))
    assert np.isnan(das[0][1]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_out_sharding_leaves_a_row_parallel_result_split(kind):
    arguments, _ = draw(table=TABLE, k=K, widths=(N,))
    mesh = mesh_of(kind, data=4, tensor=2)
    x, as_, bs, rest = split(put_on_mesh(mesh, arguments, ("data", "tensor"), [("tensor",)], (None, "tensor"), ()))

    def layer(x, out_sharding=None):
        shared = {"tile_adapter": rest["tile_adapter"], "scale": rest["scale"], "out_sharding": out_sharding}
        return pk.multi_lora_linear(x, rest["ws"][0], as_[0], bs[0], **shared)

    with jax.set_mesh(mesh):
        summed, parts = jax.jit(layer)(x), jax.jit(lambda x: layer(x, P("data", "tensor")))(x)
    assert summed.sharding.shard_shape(summed.shape) == (ROWS // 4, N)
    assert parts.sharding.shard_shape(parts.shape) == (ROWS // 4, N // 2)
    assert relative(parts, summed) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_too_small_for_a_backend_after_the_cut_are_an_error_that_says_so(kind):
    arguments, _ = draw(table=[0, 1], k=K, widths=(N,), tile=48)
    mesh = mesh_of(kind, data=8)
    on_mesh = split(arguments | {"x": put(mesh, arguments["x"], "data")})
    with pytest.raises((NotImplementedError, jax.errors.JaxRuntimeError), match="tiles cut from 48 to 12 rows"):
        jax.jit(siblings("pallas_triton"))(*on_mesh)


def test_shards_of_different_sizes_are_not_used():
    """XLA may carry a sharding to an array that does not split evenly: 14 of 16 rows on eight devices."""
    arguments, _ = draw(table=[0, 1, 1, 2, 0, 1, 2], k=K, widths=(N,), tile=16)
    step = siblings_and_gradients("pallas_triton")
    x, *rest = split(arguments)
    x = jnp.concatenate([x, x[:16]]).reshape(8, 16, K)

    @jax.jit
    def cut(x, *rest):
        return step(jnp.tanh(x)[:7], *rest)

    mesh = mesh_of("automatic", data=8)
    assert_equal_trees(cut(put(mesh, x, "data"), *rest), cut(x, *rest))


def test_without_a_mesh_nothing_changes():
    """No shard_map, no custom_partitioning and no sharding constraint in the program of one device."""
    arguments, _ = draw(table=TABLE, k=K, widths=(N,), rates=RATES)
    for backend in ("xla", "pallas_triton"):
        text = str(jax.make_jaxpr(value_and_gradients(siblings(backend)))(*split(arguments)))
        assert not any(word in text for word in ("shard_map", "custom_partitioning", "reshard", "psum", "axis_index"))
