"""Packed attention against its definition, and isolation of segments."""

import inspect
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from more_cases import mostly_nightly

from lorafusion_jax.models import Segments, attention
from lorafusion_jax.models.attention import default_implementation

C = 8
# T, H, K, lengths: what is left over is padding.
SHAPES = {
    "one segment over several blocks": (300, 4, 2, [300]),
    "many short": (300, 4, 2, [7, 1, 120, 64, 40]),
    "segment borders on block borders": (384, 4, 1, [128, 256]),
    "less than a block": (20, 2, 2, [5, 9]),
    "all rows in one block": (200, 4, 2, [7, 1, 120, 30]),
}


def inputs(T, H, K, lengths, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(T, heads, C)).astype(dtype) for heads in (H, K, K, H)]
    return arrays, Segments.from_lengths(lengths, T)


def meaning(q, k, v, do, ids, *, scale=C**-0.5, window=None, soft_cap=None):
    """float64 numpy: o and the gradients of Σ o·do, by the book."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    group = q.shape[1] // k.shape[1]
    k_all, v_all = np.repeat(k, group, 1), np.repeat(v, group, 1)
    rows = np.arange(len(q))
    seen = (ids[:, None] == ids) & (rows[:, None] >= rows) & (rows[:, None] - rows < (window or len(q)))
    z = np.einsum("thc,shc->hts", q, k_all) * scale
    capped = z if soft_cap is None else soft_cap * np.tanh(z / soft_cap)
    s = np.where(seen, capped, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = np.einsum("hts,shc->thc", p, v_all)
    dp = np.einsum("thc,shc->hts", do, v_all)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    ds = ds if soft_cap is None else ds * (1 - (capped / soft_cap) ** 2)
    fold = lambda x: x.reshape(len(q), -1, group, q.shape[-1]).sum(2)  # noqa: E731
    dk, dv = fold(np.einsum("hts,thc->shc", ds, q)), fold(np.einsum("hts,thc->shc", p, do))
    return o, np.einsum("hts,shc->thc", ds, k_all), dk, dv


@partial(jax.jit, static_argnames="implementation")
def run(q, k, v, do, segments, implementation="xla"):
    o, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, segments, implementation=implementation), q, k, v)
    return o, *pullback(do)


def results(*arrays, **options) -> list[np.ndarray]:
    """In numpy, where parts of arrays are no programs."""
    return [np.asarray(array) for array in run(*arrays, **options)]


def spoil(array: np.ndarray, row: int, bad: float) -> np.ndarray:
    spoiled = array.copy()
    spoiled[row] = bad
    return spoiled


RULES = {  # T is a multiple of Triton's blocks; windows end inside and on borders of blocks of 64
    "window of one row": {"window": 1},
    "window within a block": {"window": 17},
    "window of a block and soft cap": {"window": 64, "soft_cap": 1.5, "scale": 0.9},
    "window over several blocks": {"window": 100, "scale": 0.2},
    "window beyond all segments": {"window": 1000, "soft_cap": 0.5},
}


@pytest.mark.parametrize(("implementation", "T"), [("xla", 320), ("xla", 200), ("pallas_triton", 320)])
@pytest.mark.parametrize("name", mostly_nightly(RULES, set(RULES) - {"window within a block"}))
def test_windows_and_soft_caps_match_the_definition(name, implementation, T):
    rng, wide = np.random.default_rng(1), 16
    q, k, v, do = (rng.normal(size=(T, heads, wide)).astype(np.float32) for heads in (4, 2, 2, 4))
    lengths = [150, 1, 80, 40] if T == 320 else [110, 1, 60]
    segments, rule = Segments.from_lengths(lengths, T), {"scale": wide**-0.5} | RULES[name]

    @jax.jit
    def passes(q, k, v, do):
        o, pullback = jax.vjp(lambda *qkv: attention(*qkv, segments, implementation=implementation, **rule), q, k, v)
        return o, *pullback(do)

    for got, wanted in zip(passes(q, k, v, do), meaning(q, k, v, do, segments.ids, **rule), strict=True):
        # A softmax of one key has no gradient of q and k.
        np.testing.assert_allclose(got, wanted, atol=5e-6 * max(np.abs(wanted).max(), 1))


def test_what_has_no_windows_or_caps_says_so():
    arrays, segments = inputs(*SHAPES["less than a block"])
    for name, rule, words in (
        ("cudnn", {"window": 4}, "no windows"),
        ("cudnn", {"soft_cap": 4.0}, "no soft cap"),
        ("pallas_mosaic_gpu", {"soft_cap": 4.0}, "no soft cap"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            attention(*arrays[:3], segments, implementation=name, **rule)


@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_match_the_definition(shape):
    arrays, segments = inputs(*SHAPES[shape])
    for got, wanted in zip(results(*arrays, segments), meaning(*arrays, segments.ids), strict=True):
        # float32 sums of at most 300 terms: 1e-6 of the largest, five times that for room.
        np.testing.assert_allclose(got, wanted, atol=5e-6 * np.abs(wanted).max())


def test_bfloat16_inputs_give_bfloat16_results_near_the_definition():
    arrays, segments = inputs(*SHAPES["many short"], dtype=jnp.bfloat16)
    for got, wanted in zip(results(*arrays, segments), meaning(*arrays, segments.ids), strict=True):
        assert got.dtype == jnp.bfloat16
        # Probabilities, their gradients and the result are rounded to 8 bits.
        np.testing.assert_allclose(got.astype(np.float32), wanted, atol=2**-6 * np.abs(wanted).max())


@pytest.mark.parametrize("shape", ["many short", "all rows in one block"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
def test_nan_stays_in_its_segment(where, bad, shape):
    arrays, segments = inputs(*SHAPES[shape])
    clean = results(*arrays, segments)
    spoiled = dict(zip(("q", "k", "v", "do"), arrays, strict=True))
    row = 50  # in the third segment
    spoiled[where] = spoil(spoiled[where], row, bad)
    changed = results(*spoiled.values(), segments)
    others = segments.ids != segments.ids[row]
    for got, wanted in zip(changed, clean, strict=True):
        np.testing.assert_array_equal(got[others], wanted[others])
    own_o, *own_grads = (x[~others] for x in changed)
    assert np.isnan(own_o).any() == (where != "do")
    assert all(np.isnan(grad).any() for grad in own_grads)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", range(4), ids=["q", "k", "v", "do"])
def test_nan_stays_in_its_segment_in_triton_kernels(where, bad):
    rng, segments = np.random.default_rng(0), Segments.from_lengths([7, 1, 100], 128)
    arrays = [rng.normal(size=(128, heads, 16)).astype(np.float32) for heads in (2, 1, 1, 2)]
    clean = results(*arrays, segments, implementation="pallas_triton")
    arrays[where] = spoil(arrays[where], 50, bad)  # in the third segment
    changed = results(*arrays, segments, implementation="pallas_triton")
    others = segments.ids != segments.ids[50]
    for got, wanted in zip(changed, clean, strict=True):
        np.testing.assert_array_equal(got[others], wanted[others])
    own_o, *own_grads = (x[~others] for x in changed)
    assert np.isnan(own_o).any() == (where < 3)
    assert all(np.isnan(grad).any() for grad in own_grads)


@pytest.mark.parametrize("shape", ["many short", "all rows in one block"])
def test_nan_does_not_reach_earlier_rows_in_forward(shape):
    arrays, segments = inputs(*SHAPES[shape])
    clean = results(*arrays, segments)[0]
    arrays[2] = spoil(arrays[2], 50, np.nan)
    o = results(*arrays, segments)[0]
    np.testing.assert_array_equal(o[:50], clean[:50])
    assert np.isnan(o[50:128]).all()


def test_segment_result_equals_separate_attention():
    arrays, segments = inputs(*SHAPES["many short"])
    whole = results(*arrays, segments)
    part = slice(8, 128)
    alone = results(*(x[part] for x in arrays), Segments.from_lengths([120], 120))
    for got, wanted in zip(whole, alone, strict=True):
        # Other blocks, so other orders of the same float32 sums.
        np.testing.assert_allclose(got[part], wanted, atol=5e-6 * np.abs(wanted).max())


def test_memory_is_not_quadratic_in_rows():
    T = 4096
    shapes = [jax.ShapeDtypeStruct((T, 2, C), jnp.float32)] * 4
    memory = run.lower(*shapes, Segments.from_lengths([T], T)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < T * T * 4


def test_unknown_implementation_is_refused():
    arrays, segments = inputs(*SHAPES["less than a block"])
    with pytest.raises(ValueError, match="is not one of 'xla', 'cudnn', 'pallas_triton', 'pallas_mosaic_gpu'"):
        attention(*arrays[:3], segments, implementation="flash")


def test_cudnn_names_unsupported_inputs():
    arrays, segments = inputs(*SHAPES["less than a block"])
    with pytest.raises(NotImplementedError, match="bfloat16 or float16"):
        attention(*arrays[:3], segments, implementation="cudnn")
    narrow = [jnp.zeros((8, 2, 12), jnp.bfloat16)] * 3
    with pytest.raises(NotImplementedError, match="multiple of 8"):
        attention(*narrow, Segments.from_lengths([8], 8), implementation="cudnn")


@pytest.mark.parametrize(
    ("platform", "capability", "dtype", "shape", "chosen"),
    [
        ("gpu", "9.0", jnp.bfloat16, (256, 4, 128), "pallas_mosaic_gpu"),
        ("gpu", "9.0", jnp.float16, (256, 4, 64), "pallas_mosaic_gpu"),
        ("gpu", "9.0", jnp.bfloat16, (200, 4, 128), "cudnn"),
        ("gpu", "9.0", jnp.bfloat16, (256, 4, 96), "cudnn"),
        ("gpu", "10.0", jnp.float16, (256, 4, 128), "cudnn"),
        ("gpu", "9.0", jnp.float32, (256, 4, 128), "xla"),
        ("gpu", "8.0", jnp.bfloat16, (256, 4, 128), "xla"),
        ("gpu", "gfx942", jnp.bfloat16, (256, 4, 128), "xla"),
        ("cpu", None, jnp.bfloat16, (256, 4, 128), "xla"),
    ],
)
def test_default_is_the_fastest_supported_implementation(monkeypatch, platform, capability, dtype, shape, chosen):
    device = SimpleNamespace(platform=platform, compute_capability=capability, device_kind="a test's")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert default_implementation(jnp.zeros(shape, dtype), jnp.zeros((shape[0], 2, shape[2]), dtype)) == chosen


KEEP_ATTENTION = jax.checkpoint_policies.save_only_these_names("attention")


def checkpointed(policy, implementation):
    """A product, attention and another product, as in a layer, rematerialised by `policy`."""

    def loss(x, w, segments):
        q, k, v = (x @ w).reshape(len(x), 3, 1, x.shape[1]).swapaxes(0, 1)
        o = attention(q, k, v, segments, implementation=implementation)
        return jnp.sum(jnp.tanh(o[:, 0] @ w) ** 2)

    return jax.checkpoint(loss, policy=policy)


def test_policy_that_keeps_attention_does_not_run_it_again():
    rng = np.random.default_rng(2)
    args = (
        *(rng.normal(size=shape).astype(np.float32) for shape in ((320, C), (C, 3 * C))),
        Segments.from_lengths([120, 200], 320),  # several blocks: visited in loops
    )
    policies = {"keep": KEEP_ATTENTION, "everything": jax.checkpoint_policies.everything_saveable, "nothing": None}
    gradients = {
        name: jax.jit(jax.value_and_grad(checkpointed(policy, "xla"), argnums=(0, 1)))
        for name, policy in policies.items()
    }
    loops = {name: gradient.lower(*args).as_text().count("stablehlo.while") for name, gradient in gradients.items()}
    assert loops["keep"] == loops["everything"] < loops["nothing"]
    # Products repeated in another fusion round differently: four in a row of 64 terms each, 6e-8 a term.
    for actual, wanted in zip(
        *(jax.tree.leaves(gradients[name](*args)) for name in ("keep", "everything")), strict=True
    ):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=3e-5 * np.abs(wanted).max())


@pytest.fixture
def cudnn_without_gpu(monkeypatch):
    """Answers jax's questions about the machine as a Hopper host would, so that programs can be lowered for it."""
    from jax._src.cudnn import fused_attention_stablehlo as private

    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91400)
    monkeypatch.setattr(private, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(private, "is_cuda_compute_capability_equal", lambda capability: False)
    return private


def test_cudnn_forward_and_backward_lower_for_cuda(cudnn_without_gpu):
    shapes = [jax.ShapeDtypeStruct((256, heads, 64), jnp.bfloat16) for heads in (4, 2, 2, 4)]

    def both(q, k, v, do, segments):
        o, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, segments, implementation="cudnn"), q, k, v)
        return o, *pullback(do)

    text = (
        jax.jit(both)
        .trace(*shapes, Segments.from_lengths([100, 90], 256))
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    for name in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        assert name in text
    assert "PADDING_CAUSAL" in text
    assert r"max_seg_per_batch\22: 8" in text or 'max_seg_per_batch": 8' in text


def test_policy_that_keeps_attention_keeps_each_array_of_cudnn_once(cudnn_without_gpu, capsys):
    C, segments = 64, Segments.from_lengths([20, 44], 128)
    args = jax.ShapeDtypeStruct((128, C), jnp.bfloat16), jax.ShapeDtypeStruct((C, 3 * C), jnp.bfloat16), segments
    loss = checkpointed(KEEP_ATTENTION, "cudnn")
    text = jax.jit(jax.value_and_grad(loss)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @__cudnn$fmhaSoftmax(") == 1
    assert text.count("custom_call @__cudnn$fmhaSoftmaxBackward(") == 1
    jax.ad_checkpoint.print_saved_residuals(loss, *args)
    saved = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "'attention'" in line]
    assert saved.count("bf16[1,128,1,64]") == 4  # q, k, v and o


def test_private_function_still_has_the_arguments_we_pass(cudnn_without_gpu):
    parameters = inspect.signature(cudnn_without_gpu.dot_product_attention).parameters
    wanted = {
        "query",
        "key",
        "value",
        "q_seqlen",
        "kv_seqlen",
        "q_offsets",
        "kv_offsets",
        "scale",
        "mask_type",
        "qkv_layout",
    }
    assert wanted <= parameters.keys()


def test_policy_that_keeps_attention_keeps_each_array_of_our_kernels_once(capsys):
    C, segments = 64, Segments.from_lengths([20, 44], 128)
    args = jax.ShapeDtypeStruct((128, C), jnp.bfloat16), jax.ShapeDtypeStruct((C, 3 * C), jnp.bfloat16), segments
    loss = checkpointed(KEEP_ATTENTION, "pallas_mosaic_gpu")
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = jax.jit(jax.value_and_grad(loss)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        jax.ad_checkpoint.print_saved_residuals(loss, *args)
    assert text.count("custom_call @mosaic_gpu") == 3  # forward, dq, dk and dv
    saved = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "'attention'" in line]
    assert (saved.count("bf16[128,1,64]"), saved.count("bf16[128,64]")) == (3, 1)  # q, k, v; o


PACKINGS = {"one": [4096], "equal": [256] * 16, "ragged": [3, 900, 1, 64, 2000, 333], "many": [100] * 40}


def wide_inputs(lengths):
    rng = np.random.default_rng(1)
    arrays = [jnp.asarray(rng.normal(size=(4096, heads, 128)), jnp.bfloat16) for heads in (8, 2, 2, 8)]
    return arrays, Segments.from_lengths(lengths, 4096)


ON_HOPPER = pytest.mark.parametrize("implementation", ["cudnn", "pallas_triton", "pallas_mosaic_gpu"])


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("packing", PACKINGS)
def test_kernels_match_xla(packing, implementation):
    arrays, segments = wide_inputs(PACKINGS[packing])
    pairs = zip(run(*arrays, segments, implementation=implementation), run(*arrays, segments), strict=True)
    for got, wanted in pairs:
        wanted = np.asarray(wanted, np.float32)
        # Both round probabilities, their gradients and results to 8 bits.
        np.testing.assert_allclose(np.asarray(got, np.float32), wanted, atol=2**-5 * np.abs(wanted).max())


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("where", range(4), ids=["q", "k", "v", "do"])
def test_nan_stays_in_its_segment_on_gpus(where, implementation):
    arrays, segments = wide_inputs(PACKINGS["ragged"])
    clean = run(*arrays, segments, implementation=implementation)
    row = 920  # in the fourth segment
    arrays[where] = arrays[where].at[row].set(np.nan)
    results = run(*arrays, segments, implementation=implementation)
    others = segments.ids != segments.ids[row]
    for got, wanted in zip(results, clean, strict=True):
        got, wanted = np.asarray(got, np.float32), np.asarray(wanted, np.float32)
        # cuDNN may add up dq in any order; ours has one.
        slack = 2**-7 * np.abs(wanted).max() if implementation == "cudnn" else 0
        np.testing.assert_allclose(got[others], wanted[others], atol=slack, rtol=0)
        assert np.isfinite(got[others]).all()
