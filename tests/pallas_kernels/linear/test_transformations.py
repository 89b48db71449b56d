"""jax's transformations around the ops: right, or refused with the way out."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import H200, num_kernels
from jax.sharding import AbstractMesh, AxisType, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from kernel_problems import draw, normal, relative
from more_cases import mostly_nightly, nightly
from sharded_problems import mesh_of, put

import pallas_kernels as pk
from pallas_kernels.arg_specs import LinearSpec, make_arrays

BACKENDS = ["xla", "pallas_triton"]
TABLE = [0, 1, -1, 2]
BATCH = 3


def layer_of(arguments, backend):
    def layer(x, a, b, table):
        rest = {name: arguments[name] for name in ("scale", "dropout")}
        return pk.multi_lora_linear(x, arguments["ws"][0], a, b, tile_adapter=table, implementation=backend, **rest)

    return layer


def gradients(layer):
    def loss(x, a, b, table):
        y = layer(x, a, b, table)
        return (y**2).sum(), y

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)


def assert_equal_trees(got, want):
    for actual, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(actual, other) < 1e-6


@pytest.mark.parametrize(
    ("axes", "backend"),
    mostly_nightly(
        list(product([(0, None, None, None), (0, 0, 0, None), (0, None, None, 0)], BACKENDS)),
        [((0, 0, 0, None), "xla"), ((0, None, None, 0), "pallas_triton")],
    ),
    ids=str,
)
def test_vmap_is_a_loop_over_calls(backend, axes):
    """x alone; adapters of its own for each element; a table of its own for each element."""
    arguments, _ = draw(table=TABLE, rates=[0.1, 0.5, 0.0])
    layer, of_element = layer_of(arguments, backend), jax.jit(gradients(layer_of(arguments, "xla")))
    operands = jax.device_get([arguments["x"], arguments["as_"][0], arguments["bs"][0], arguments["tile_adapter"]])
    batch = [
        v if axis is None else np.stack([np.roll(v, i, axis=0) for i in range(BATCH)])
        for v, axis in zip(operands, axes, strict=True)
    ]
    results = [
        jax.device_get(of_element(*(v if axis is None else v[i] for v, axis in zip(batch, axes, strict=True))))
        for i in range(BATCH)
    ]
    (values, ys), slopes = jax.tree.map(lambda *leaves: np.stack(leaves), *results)
    slopes = tuple(s.sum(0) if axis is None else s for s, axis in zip(slopes, axes[:3], strict=True))
    assert_equal_trees(jax.jit(gradients(jax.vmap(layer, axes)))(*batch), ((values.sum(), ys), slopes))


def test_vmap_of_one_adapter():
    random = np.random.default_rng(0)
    x, w, a, b = (normal(random, *shape) for shape in ((BATCH, 8, 16), (16, 12), (16, 4), (4, 12)))

    def layer(x):
        return pk.lora_linear(x, w, a, b, scale=2.0)

    assert relative(jax.vmap(layer)(x), layer(x)) < 1e-6  # a batch axis is a leading dimension


def test_hoppers_kernels_refuse_vmap_and_say_what_to_do():
    arguments, _ = draw(table=[0, 1], tile=128, k=256, widths=(256,), ranks=(16,), dtype=jnp.bfloat16)
    layer = layer_of(arguments, "pallas_mosaic_gpu")
    operands = arguments["as_"][0], arguments["bs"][0], arguments["tile_adapter"]
    with (
        use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)),
        pytest.raises(NotImplementedError, match=r'leave the batch dimension to x.*implementation="xla"'),
    ):
        jax.eval_shape(jax.vmap(lambda x: layer(x, *operands)), np.stack([arguments["x"]] * 2))


def test_forward_mode_is_refused():
    """The ops have a rule of their own for backward; jax says so, and names the rule."""
    arguments, _ = draw(table=TABLE)
    layer = layer_of(arguments, "xla")
    operands = arguments["as_"][0], arguments["bs"][0], arguments["tile_adapter"]
    with pytest.raises(TypeError, match=r"forward-mode.*custom_vjp"):
        jax.jvp(lambda x: layer(x, *operands), (arguments["x"],), (arguments["x"],))


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        nightly(None, "pallas_triton"), ("automatic", "pallas_triton"), nightly("explicit", "xla"),
        nightly(None, "xla"), nightly("automatic", "xla"), nightly("explicit", "pallas_triton"),
    ],
)  # fmt: skip
def test_layers_in_a_scan_with_rematerialisation(kind, backend):
    """Two layers in a scan, S and bits kept by name: on one device and on a mesh."""
    arguments, _ = draw(table=TABLE, k=64, widths=(64,), rates=[0.1, 0.5, 0.0])
    banks = jax.device_get((arguments["as_"][0], arguments["bs"][0]))
    stack = [np.stack([v * np.float32(0.5 + i) for i in range(3)]) for v in banks]
    policy = jax.checkpoint_policies.save_only_these_names("lora_s", "lora_bits")

    def step(x, as_, bs, w, table, row_key):
        drop = pk.Dropout(rate=arguments["dropout"].rate, key=arguments["dropout"].key, row_key=row_key)
        shared = {"tile_adapter": table, "scale": arguments["scale"], "dropout": drop, "implementation": backend}

        @partial(jax.checkpoint, policy=policy)
        def block(h, bank):
            return jnp.tanh(pk.multi_lora_linear(h, w, *bank, **shared) / 8), None

        return jax.value_and_grad(lambda x, a, b: (jax.lax.scan(block, x, (a, b))[0] ** 2).sum(), (0, 1, 2))(x, as_, bs)

    operands = [arguments["x"], *stack, arguments["ws"][0], arguments["tile_adapter"], arguments["dropout"].row_key]
    layer = layer_of(arguments, "xla")

    def plain(x, as_, bs):
        for a, b in zip(as_, bs, strict=True):
            x = jnp.tanh(layer(x, a, b, arguments["tile_adapter"]) / 8)
        return (x**2).sum()

    want = jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(*operands[:3])
    if kind is not None:
        mesh = mesh_of(kind, data=2, tensor=4)
        specs = [("data",), (), (), (), ("data",), ("data",)]
        operands = [put(mesh, v, *spec) for v, spec in zip(operands, specs, strict=True)]
    got = jax.jit(step)(*operands)
    for actual, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(actual, other) < 1e-6  # float32; / 8 keeps tanh from its ends, which magnify roundings


def test_vmap_on_a_mesh_with_explicit_axes():
    arguments, _ = draw(table=TABLE, k=64, rates=[0.1, 0.5, 0.0])
    x = np.stack([arguments["x"], np.asarray(arguments["x"]) * 2])
    layer = layer_of(arguments, "xla")
    operands = arguments["as_"][0], arguments["bs"][0], arguments["tile_adapter"]
    axes = (0, None, None, None)
    want = gradients(jax.vmap(layer, axes))(x, *operands)
    mesh = mesh_of("explicit", data=4, tensor=2)
    placed = put(mesh, x, None, "data"), *(put(mesh, v) for v in operands)
    assert_equal_trees(jax.jit(gradients(jax.vmap(layer, axes)))(*placed), want)


def test_kernels_on_automatic_axes_refuse_vmap():
    arguments, _ = draw(table=TABLE, k=64)
    layer = layer_of(arguments, "pallas_triton")
    operands = arguments["as_"][0], arguments["bs"][0], arguments["tile_adapter"]
    x = put(mesh_of("automatic", data=8), np.stack([arguments["x"]] * 2), None, "data")
    with pytest.raises(NotImplementedError, match=r"automatic axes, do not run under jax\.vmap"):
        jax.jit(jax.vmap(lambda x: layer(x, *operands)))(x)


COLUMNS = {"x": P("data"), "dy": P("data", "tensor"), "w": P(None, "tensor"), "tile_adapter": P("data")}
ROWS = COLUMNS | {"x": P("data", "tensor"), "w": P("tensor", "data")}  # summed over "tensor", and left split over it


@pytest.mark.parametrize(
    ("backend", "specs", "kernels"),
    [
        nightly(None, COLUMNS, (5, 4)),
        ("pallas_triton", COLUMNS, (9, 0)),
        nightly("xla", COLUMNS, (0, 0)),
        (None, ROWS, (5, 3)),
    ],
)
def test_a_sharded_call_lowers_for_cuda_with_the_kernels_of_one_shard(backend, specs, kernels):
    spec = LinearSpec(tokens=2 * 2048, in_features=4096, out_features=2 * 4096, adapters=4, rate=0.1)
    mesh = AbstractMesh((2, 2), ("data", "tensor"), (AxisType.Explicit,) * 2, abstract_device=H200)

    def on_mesh(path, leaf):
        name = path[0].key
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, specs.get(name, P())))

    arrays = jax.tree_util.tree_map_with_path(on_mesh, jax.eval_shape(lambda: make_arrays(spec)))

    def step(arrays):
        rest = {name: arrays[name] for name in ("tile_adapter", "scale", "dropout")} | {"out_sharding": specs["dy"]}
        x, w, a, b, dy = (arrays[name] for name in ("x", "w", "a", "b", "dy"))
        y, vjp = jax.vjp(lambda x, a, b: pk.multi_lora_linear(x, w, a, b, implementation=backend, **rest), x, a, b)
        return y, vjp(dy)

    with use_abstract_mesh(mesh):
        text = jax.jit(step).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert num_kernels(text) == kernels
    assert ("reduce_scatter" in text) == (specs is ROWS)


def test_second_derivatives_of_kernels_are_refused_with_the_way_out():
    arguments, _ = draw(table=TABLE, rates=[0.0, 0.0, 0.0])
    operands = [arguments["as_"][0], arguments["bs"][0], arguments["tile_adapter"]]

    def slope(backend):
        layer = layer_of(arguments, backend)
        first = jax.grad(lambda x: (layer(x, *operands) ** 2).sum())
        return jax.jit(jax.grad(lambda x: (first(x) ** 2).sum()))

    with pytest.raises(NotImplementedError, match=r'second derivatives.*pass implementation="xla"'):
        slope("pallas_triton")(arguments["x"])
    assert np.isfinite(slope("xla")(arguments["x"])).all()
