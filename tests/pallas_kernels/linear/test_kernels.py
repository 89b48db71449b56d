"""Kernels below the ops: the table of chunks, Hopper GEMMs in the GPU interpreter, lowering for CUDA without a GPU."""

import dataclasses
from functools import partial
from itertools import product

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import kernel_problems
import numpy as np
import pytest
from cuda_lowering import A100, H200, chosen_kernels, lowered, num_kernels
from gpu_interpreter import needs_gpu_interpreter
from host_arrays import filled, on_device
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from kernel_problems import draw, keep_mask, keep_words, make_chunks, new_residuals, ours, relative
from more_cases import mostly_nightly, nightly

import pallas_kernels as pk
from pallas_kernels.arg_specs import LinearSpec, make_arrays
from pallas_kernels.linear.hopper.gemm import GemmConfig, gemm
from pallas_kernels.linear.passes.pallas.bits import keep_words as keep_bits
from pallas_kernels.linear.passes.pallas.sums import sum_partials

SMALL = AbstractDevice(device_kind="NVIDIA H200", num_cores=3, platform="gpu")


@pytest.mark.parametrize(
    ("seed", "size"), mostly_nightly(list(product(range(5), [1, 2, 3, 8])), [(0, 8), (1, 8), (2, 2), (3, 3), (4, 1)])
)
def test_chunks_hold_every_block_once_and_one_adapter_each(seed, size):
    random = np.random.default_rng(seed)
    table = random.integers(-1, 4, 13).astype(np.int32)
    chunks = jax.device_get(make_chunks(table, 4, size, single=False))
    listed = chunks.blocks[chunks.blocks >= 0]
    np.testing.assert_array_equal(np.sort(listed), np.arange(13))
    for blocks, count, adapter in zip(chunks.blocks, chunks.count, chunks.adapter, strict=True):
        assert count == (blocks >= 0).sum() == (blocks[:count] >= 0).sum()
        owners = np.where(table[blocks[:count]] < 0, 4, table[blocks[:count]])
        assert (owners == adapter).all()
    for adapter in range(4):  # in order, cut every `size` blocks: independent of the other adapters
        rows = chunks.adapter == adapter
        mine = [block for blocks in chunks.blocks[rows] for block in blocks if block >= 0]
        np.testing.assert_array_equal(mine, np.flatnonzero(table == adapter))
        assert (chunks.count[chunks.adapter == adapter][:-1] == size).all()


@needs_gpu_interpreter
@pytest.mark.parametrize(
    ("mode", "split_n"),
    [
        nightly("forward", True), nightly("forward", False), ("backward", False), nightly("backward", True),
        ("backward with dropout", True), nightly("backward with dropout", False),
    ],
)  # fmt: skip
def test_hopper_gemm_in_the_interpreter(mode, split_n):
    random = np.random.default_rng(0)
    rows, columns, depth, rank, adapters = 256, 256, 128, 16, 2
    config = GemmConfig(tile_m=64 if not split_n else 128, tile_n=128, stages=2, split_n=split_n)
    transposed = mode != "forward"

    normal = partial(kernel_problems.normal, random, dtype=jnp.bfloat16)
    lhs, low = normal(rows, depth), normal(rows, 3 * rank)
    rhs = normal(columns, depth, scale=0.1) if transposed else normal(depth, columns, scale=0.1)
    bank = normal(adapters + 1, columns, rank) if transposed else normal(adapters + 1, rank, columns)
    blocks = np.array([1, 0, 2, 1][: rows // config.tile_m], np.int32)
    owner = np.repeat(blocks, config.tile_m)
    bits, keep = None, True
    if mode.endswith("dropout"):
        drop = pk.Dropout(
            rate=on_device([0.1, 0.5]), key=on_device([1, 2], np.uint32), row_key=on_device(np.arange(rows), np.uint32)
        )
        adapter = np.where(owner == adapters, -1, owner)
        bits, keep = keep_words(drop, adapter, columns), keep_mask(drop, adapter, columns)
    spec = "tr,tnr->tn" if transposed else "tr,trn->tn"
    wide = [np.asarray(array, np.float32) for array in (lhs, rhs, low, bank)]
    product_of_all = wide[0] @ (wide[1].T if transposed else wide[1])
    want = product_of_all + np.where(keep, np.einsum(spec, wide[2][:, 16:32], wide[3][owner]), 0)
    with (
        use_abstract_mesh(AbstractMesh((), (), abstract_device=SMALL)),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()),
    ):
        got = gemm(
            lhs,
            rhs,
            low,
            bank,
            on_device(blocks),
            transposed=transposed,
            low_offset=16,
            bits=bits,
            config=config,
            num_sms=3,
        )
        got = np.asarray(got, np.float32)
    assert relative(got, want) < 4e-3  # one rounding to bfloat16


TRITON = {"plain": (8, 0), "dropout": (9, 0), "rank 64": (9, 0)}
HOPPER = {"plain": (6, 2), "dropout": (5, 4), "rank 64": (6, 3)}  # rank 64: the pass over x makes part of dx


@pytest.mark.parametrize(
    ("device", "backend", "kernels"),
    [(A100, "pallas_triton", TRITON), nightly(H200, "pallas_triton", TRITON), (H200, "pallas_mosaic_gpu", HOPPER)],
)
@pytest.mark.parametrize(
    ("case", "change"),
    [("plain", {}), ("dropout", {"rate": 0.1}), ("rank 64", {"rate": 0.1, "adapters": 4, "rank": 64})],
)
def test_ops_lower_for_cuda(device, backend, kernels, case, change):
    spec = LinearSpec(tokens=2048, in_features=1024, out_features=1024, **change)
    arrays = jax.eval_shape(lambda: make_arrays(spec))

    def step(arrays):
        def layer(x, a, b):
            rest = {name: arrays[name] for name in ("tile_adapter", "scale", "dropout")}
            return pk.multi_lora_linear(x, arrays["w"], a, b, implementation=backend, **rest)

        y, vjp = jax.vjp(layer, arrays["x"], arrays["a"], arrays["b"])
        return y, *vjp(arrays["dy"])

    text = lowered(device, step, arrays)
    assert num_kernels(text) == kernels[case]


@pytest.mark.parametrize(
    ("device", "changes", "kernels"),
    [
        (H200, {"in_features": 4096, "out_features": 4096}, (6, 2)),
        (H200, {"in_features": 4096, "out_features": 8192}, (5, 3)),  # a wide dY goes through the copy engine
        (H200, {"tokens": 512}, (0, 0)),  # too few rows to fill the card
        (H200, {"in_features": 4096, "out_features": 4096, "rank": 128}, (8, 0)),  # large ranks have their passes
        (H200, {"in_features": 5120, "out_features": 5120}, (0, 0)),  # a badly filled last round of tiles
        (H200, {"in_features": 5120, "out_features": 5120, "rate": 0.1}, (5, 4)),  # what XLA's dropout costs is more
        (H200, {"in_features": 5120, "out_features": 5120, "rank": 64}, (6, 2)),  # or several adapters of rank 64
        (H200, {"in_features": 5120, "out_features": 5120, "rank": 64, "adapters": 1}, (0, 0)),  # but not one
        (H200, {"in_features": 4352, "out_features": 5120, "rate": 0.1}, (0, 0)),  # worse filled: never measured
        (H200, {"dtype": "float32"}, (0, 0)),  # tensor cores would round to tf32
        (A100, {}, (0, 0)),  # nothing measured there
    ],
)
def test_default_takes_kernels_only_where_they_measured_faster(device, changes, kernels):
    spec = dataclasses.replace(LinearSpec(tokens=2048, in_features=1024, out_features=1024, adapters=2), **changes)
    arrays = jax.eval_shape(lambda: make_arrays(spec))

    def step(arrays):
        def layer(x, a, b):
            rest = {name: arrays[name] for name in ("tile_adapter", "scale", "dropout")}
            return pk.multi_lora_linear(x, arrays["w"], a, b, **rest)

        y, vjp = jax.vjp(layer, arrays["x"], arrays["a"], arrays["b"])
        return y, *vjp(arrays["dy"])

    assert chosen_kernels(device, step, arrays) == kernels


@pytest.mark.parametrize("device", [A100, H200])
def test_with_64_bit_integers_the_default_is_xla_and_kernels_say_why_not(device):
    spec = LinearSpec(tokens=2048, in_features=4096, out_features=4096, adapters=2, rate=0.1)
    arrays = jax.eval_shape(lambda: make_arrays(spec))

    def step(backend, arrays):
        def layer(x, a, b):
            rest = {name: arrays[name] for name in ("tile_adapter", "scale", "dropout")}
            return pk.multi_lora_linear(x, arrays["w"], a, b, implementation=backend, **rest)

        y, vjp = jax.vjp(layer, arrays["x"], arrays["a"], arrays["b"])
        return y, *vjp(arrays["dy"])

    with jax.enable_x64(True):
        text = lowered(device, partial(step, None), arrays)
        assert num_kernels(text) == (0, 0)
        for backend in ["pallas_triton"] + ["pallas_mosaic_gpu"] * (device is H200):
            with pytest.raises(NotImplementedError, match="turn jax_enable_x64 off"):
                lowered(device, partial(step, backend), arrays)


@pytest.mark.parametrize(
    ("backend", "kernels", "check_vma"),
    [
        (None, (5, 4), True), nightly(None, (5, 4), False), ("pallas_triton", (9, 0), True),
        ("pallas_triton", (9, 0), False), ("xla", (0, 0), True), ("xla", (0, 0), False),
    ],
)  # fmt: skip
def test_ops_lower_inside_shard_map_and_the_default_is_the_fast_backend(backend, kernels, check_vma):
    spec = LinearSpec(tokens=2 * 2048, in_features=4096, out_features=4096, adapters=4, rate=0.1)
    arrays = jax.eval_shape(lambda: make_arrays(spec))
    mesh = AbstractMesh((2,), ("data",), (AxisType.Auto,), abstract_device=H200)

    def local(x, w, a, b, dy, rest):
        y, vjp = jax.vjp(lambda x, a, b: pk.multi_lora_linear(x, w, a, b, implementation=backend, **rest), x, a, b)
        dx, *banks = vjp(dy)
        return y, dx, *(banks if check_vma else jax.lax.psum(banks, "data"))  # summed by jax where it knows the axes

    rows = P("data")
    rest_specs = {"tile_adapter": rows, "scale": P(), "dropout": pk.Dropout(rate=P(), key=P(), row_key=rows)}
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(rows, P(), P(), P(), rows, rest_specs), out_specs=(rows, rows, P(), P()),
        check_vma=check_vma,
    )  # fmt: skip

    def step(arrays):
        rest = {name: arrays[name] for name in rest_specs}
        return sharded(*(arrays[name] for name in ("x", "w", "a", "b", "dy")), rest)

    with use_abstract_mesh(mesh):
        text = jax.jit(step).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert num_kernels(text) == kernels


@pytest.mark.parametrize("names", [None, ("lora_s", "lora_bits")])
@pytest.mark.parametrize("ranks", [(16,), (16, 8)])
def test_the_hopper_backend_keeps_nothing_besides_s_and_bits(names, ranks):
    arguments, _ = draw(table=[0, 1, -1, 2], tile=128, k=256, widths=(256,) * len(ranks), ranks=ranks,
                        rates=[0.1, 0.0, 0.2], dtype=jnp.bfloat16, bias=True)  # fmt: skip
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        made = new_residuals(ours("pallas_mosaic_gpu"), arguments, names)
    assert made == [(512, 16 * len(ranks)), (512, 1, 8)]


# Before 0.12 jax hands a Triton kernel that nobody needs on to XLA, which removes it: there is nothing to count.
removes = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax 0.11 leaves unused Triton kernels to XLA")


@pytest.mark.parametrize(
    ("backend", "kind", "spared"),
    [
        pytest.param("pallas_triton", "__gpu$xla.gpu.triton", 2, marks=removes),  # bits have a pass of their own
        ("pallas_mosaic_gpu", "mosaic_gpu_v2", 1),
        ("xla", "stablehlo.dot_general", 1),
    ],
)
def test_a_policy_that_keeps_s_and_bits_spares_their_pass_over_x(backend, kind, spared):
    arguments, _ = draw(table=[0, 1, -1, 2], tile=128, k=256, widths=(256,), ranks=(16,), rates=[0.1, 0.0, 0.2],
                        dtype=jnp.bfloat16)  # fmt: skip

    def work(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)

        def loss(lora):
            layer = jax.checkpoint(
                lambda a, b: jnp.tanh(ours(backend)(arguments, arguments["x"], a, b)[0]), policy=policy
            )
            return jnp.sum(layer(*lora).astype(jnp.float32))

        with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
            lora = arguments["as_"], arguments["bs"]
            text = jax.jit(jax.value_and_grad(loss)).trace(lora).lower(lowering_platforms=("cuda",)).as_text()
        return text.count(kind)

    assert work("nothing") - work("lora_s", "lora_bits") == spared


def test_only_hopper_has_compiler_options():
    assert pk.compiler_options() == {}
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        assert pk.compiler_options() == {"xla_gpu_enable_triton_gemm": False}


@pytest.mark.parametrize(
    ("chunks", "rank", "transposed"),
    mostly_nightly(
        [
            (chunks, rank, turned)
            for chunks, rank in [(7, 16), (33, 32), (100, 128), (300, 16)]
            for turned in (True, False)
        ],
        [(7, 16, False), (100, 128, True), (300, 16, False)],
    ),
)
def test_partial_sums_of_an_adapter_ignore_the_others(chunks, rank, transposed):
    random = np.random.default_rng(0)
    partials = random.normal(size=(chunks, 64, rank)).astype(np.float32)
    adapter = random.integers(-1, 4, chunks).astype(np.int32)  # nobody's, three adapters, padding
    adapter[:4] = 1, 0, 2, 1
    partials[adapter == 2] = np.nan
    factor = np.array([2.0, 0.5, 1.0], np.float32)

    def summed(*arrays):
        (total,) = sum_partials(*map(on_device, arrays), [(0, rank)], transposed=transposed, interpret=True)
        return np.asarray(total)

    got = summed(partials, adapter, factor)
    for k in (0, 1):
        want = factor[k] * partials[adapter == k].astype(np.float64).sum(0)
        np.testing.assert_allclose(got[k], want.T if transposed else want, rtol=1e-5, atol=1e-5)
    assert np.isnan(got[2]).all()
    members = partials[adapter == 1]
    np.testing.assert_array_equal(got[1], summed(members, np.zeros(len(members), np.int32), factor[1:2])[0])


def test_an_adapter_without_partial_sums_gets_zeros():
    partials, adapter = filled(1.0, 3, 32, 16), on_device([0, -1, 2], np.int32)
    (got,) = sum_partials(partials, adapter, on_device([1.0, 1.0]), [(0, 16)], transposed=False, interpret=True)
    assert np.asarray(got).sum(axis=(1, 2)).tolist() == [32 * 16, 0]


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("parts", [[(0, 32), (32, 16), (48, 16)], [(0, 24), (32, 5)], nightly([(0, 8)])])
def test_parts_of_a_sum_are_its_columns_bit_for_bit(parts, transposed):
    random = np.random.default_rng(1)
    partials = on_device(random.normal(size=(20, 64, 64)), np.float32)
    adapter = on_device(random.integers(-1, 3, 20), np.int32)
    factor = on_device([2.0, 0.3])

    def summed(parts):
        return jax.device_get(sum_partials(partials, adapter, factor, parts, transposed=transposed, interpret=True))

    (whole,) = summed([(0, 64)])
    for (start, rank), part in zip(parts, summed(parts), strict=True):
        columns = slice(start, start + rank)
        np.testing.assert_array_equal(part, whole[:, columns, :] if transposed else whole[:, :, columns])


@pytest.mark.parametrize(("rank", "passes_over_x"), [(16, 1), (64, 3)])
def test_siblings_share_a_pass_over_x_while_their_ranks_fit(rank, passes_over_x):
    spec = LinearSpec(tokens=2048, in_features=4096, out_features=4096, adapters=2, rank=rank)
    arrays = jax.eval_shape(lambda: make_arrays(spec))

    def siblings(arrays):
        rest = {name: arrays[name] for name in ("tile_adapter", "scale", "dropout")}
        widths = 4096, 3840, 3584
        ws, bs = ([arrays[name][..., :width] for width in widths] for name in ("w", "b"))
        return pk.multi_lora_linears(arrays["x"], ws, [arrays["a"]] * 3, bs, **rest)

    assert chosen_kernels(H200, siblings, arrays) == (passes_over_x, 3)


@pytest.mark.parametrize("columns", [256, 768, 1000])
def test_bits_of_the_kernel_are_the_bits_of_the_reference(columns):
    drop = pk.Dropout(
        rate=on_device([0.1, 0.0, 0.7]),
        key=on_device([5, 6, 7], np.uint32),
        row_key=on_device(np.arange(64), np.uint32),
    )
    table = np.array([2, 0, 1, 2], np.int32)
    got = keep_bits(drop, on_device(table), columns, block_t=16, interpret=True)
    np.testing.assert_array_equal(got, keep_words(drop, np.repeat(table, 16), columns))


def test_hopper_backend_says_what_it_cannot_serve():
    spec = LinearSpec(tokens=2048, in_features=1000, out_features=1024)
    arrays = jax.eval_shape(lambda: make_arrays(spec))

    def layer(arrays, x):
        rest = {name: arrays[name] for name in ("tile_adapter", "scale", "dropout")}
        return pk.multi_lora_linear(
            x, arrays["w"], arrays["a"], arrays["b"], implementation="pallas_mosaic_gpu", **rest
        )

    with pytest.raises(NotImplementedError, match="1000 in features: it needs a multiple of 128"):
        lowered(H200, layer, arrays, arrays["x"])
    with pytest.raises(NotImplementedError, match="Hopper"):
        lowered(A100, layer, arrays, arrays["x"])


def test_siblings_with_padding_lower_for_hopper():
    arguments, _ = draw(table=[0, 1, -1, 2], k=256, widths=(256, 128, 128), ranks=(16, None, 8), rates=[0.1, 0.0, 0.2],
                        dtype=jnp.bfloat16)  # fmt: skip
    arguments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)

    # tiles of 32 rows are too short for a warpgroup: the Hopper backend says so, Triton serves them
    def layer(arguments, backend):
        rest = {name: arguments[name] for name in ("tile_adapter", "scale", "dropout", "biases")}
        return pk.multi_lora_linears(
            arguments["x"], arguments["ws"], arguments["as_"], arguments["bs"], implementation=backend, **rest
        )

    with pytest.raises(NotImplementedError, match="multiple of 64"):
        lowered(H200, lambda arguments: layer(arguments, "pallas_mosaic_gpu"), arguments)
    text = lowered(H200, lambda arguments: layer(arguments, "pallas_triton"), arguments)
    assert text.count("__gpu$xla.gpu.triton") == 4  # bits, S of all; two products


@pytest.mark.parametrize(("name", "kernels"), [("h200", True), ("h100", True), ("a100", False), ("l40s", False)])
def test_a_named_target_decides_which_kernels_are_lowered(name, kernels):
    """The call of a user; tracing again without the target gives this machine's program."""
    shapes = [(8192, 4096), (4096, 4096), (4096, 16), (16, 4096)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    layer = jax.jit(partial(pk.lora_linear, scale=2.0))
    with pk.target(name):
        named = layer.trace(*arguments)
        assert ("core_map" in str(named.jaxpr) or "mpmd_map" in str(named.jaxpr)) is kernels
    assert "core_map" not in str(layer.trace(*arguments).jaxpr)
    if kernels and name == "h100":
        assert num_kernels(named.lower(lowering_platforms=("cuda",)).as_text())[1] > 0
    with pytest.raises(ValueError, match="'b200' is not known: one of h200"), pk.target("b200"):
        pass
