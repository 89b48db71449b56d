"""The built-in kinds against their equations in float64."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lorafusion_jax.adapters.check import check_kind
from lorafusion_jax.adapters.dora import DORA
from lorafusion_jax.adapters.init import SHARED
from lorafusion_jax.adapters.kind import AdapterKind, Leaf, Sizes
from lorafusion_jax.adapters.patterns import Patterns
from lorafusion_jax.adapters.pissa import PISSA
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import KINDS, adapter_kind
from lorafusion_jax.adapters.tokens import LEAVES as TOKEN_ROWS
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.modules.lora import LoRALinear
from lorafusion_jax.objective.table import OBJECTIVES
from lorafusion_jax.peft.folder import check_folder_of, read_described, write_adapter
from lorafusion_jax.peft.leaves import as_exported, tensors_at
from pallas_kernels.dropout import inverse_keep, keep_mask

RNG = np.random.default_rng(0)
W, A, B = (RNG.normal(size=shape).astype(np.float32) for shape in ((12, 10), (12, 3), (3, 10)))
SIZES = Sizes(K=12, N=10, R=3, scale=np.float32(2.0), np=jnp)


@pytest.mark.parametrize("name", KINDS)
def test_the_kinds_keep_their_contract(name):
    check_kind(name)
    for rslora in (False, True):
        check_folder_of(name, rslora=rslora)


def zeros(draw, shape):
    return np.zeros(shape, np.float32)


DOWN, UP = Leaf(name="down", axes=("K", "R"), init=zeros), Leaf(name="up", axes=("R", "N"), init=zeros)
STEEP, RISE = Leaf(name="steep", axes=("K", "R"), init=zeros), Leaf(name="rise", axes=("R", "N"), init=zeros)
TINT = Leaf(name="tint", axes=("N",), init=zeros)


def one_pair(tensors, sizes):
    return tensors["down"], tensors["up"]


def two_pairs(tensors, sizes):
    join = lambda axis, *names: sizes.np.stack([tensors[name] for name in names], axis)  # noqa: E731
    a, b = join(2, "down", "steep"), join(1, "up", "rise")
    return a.reshape(sizes.K, 2 * sizes.R), b.reshape(2 * sizes.R, sizes.N)


PAIR = {"leaves": (DOWN, UP), "low_rank": one_pair, "scaled": ("up",)}
TINTED = PAIR | {"leaves": (DOWN, UP, TINT), "column_scale": lambda kernel, tensors, sizes: 1 + tensors["tint"]}
NAMED = PAIR | {"leaves": tuple(replace(leaf, peft_name=f"{leaf.name}.weight") for leaf in (DOWN, UP))}
FOREIGN = {  # kinds of others, with what their scale may be
    "alpha alone": PAIR | {"scale": lambda alpha, rank, rslora: alpha / 4},
    "alpha from 10": NAMED | {"scale": lambda alpha, rank, rslora: max(alpha, 10.0), "peft": {"peft_type": "TEN"}},
    "a number": PAIR | {"scale": 0.25},
    "two pairs": {"leaves": (DOWN, UP, STEEP, RISE), "low_rank": two_pairs, "columns": 2, "scaled": ("up", "rise")},
    "two pairs, alpha alone": {
        "leaves": (DOWN, UP, STEEP, RISE), "low_rank": two_pairs, "columns": 2, "scaled": ("up", "rise"),
        "scale": lambda alpha, rank, rslora: alpha if rslora else alpha / 3,
    },
    "core": {
        "leaves": (replace(DOWN, trainable=False, shared=True), Leaf(name="core", axes=("R", "R"), init=zeros), UP),
        "low_rank": lambda tensors, sizes: (tensors["down"] @ tensors["core"], tensors["up"]), "scaled": ("core",),
    },
    "tinted": TINTED,
    "tinted, squared": TINTED | {"scale": lambda alpha, rank, rslora: alpha * alpha / rank},
}  # fmt: skip


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_what_leaves_a_run_has_the_scale_of_each_projection(name, rslora, tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, name, AdapterKind(**FOREIGN[name]))
    check_kind(name)
    check_folder_of(name, rslora=rslora)
    patterns = Patterns(rank=3, alpha=20, ranks=(("k_proj", 1),), alphas=((r"1\.self_attn\.\w_proj", 50),))
    spec = AdapterSpec(name="law", rank=3, alpha=20, rslora=rslora, targets=("k_proj", "o_proj"), kind=name,
                       patterns=patterns)  # fmt: skip
    kind, draw = adapter_kind(name), np.random.default_rng(3).random
    paths = [f"layers.{layer}.self_attn.{target}" for layer in range(2) for target in spec.targets]
    sizes = {path: {"K": 5, "N": 4, "R": spec.rank_at(path)} for path in paths}
    arrays = {
        path: tuple(draw(leaf.shape_in(sizes[path]), np.float32) for leaf in kind.of_projections) for path in paths
    }
    arrays |= {SHARED: tuple(draw((5, 3), np.float32) for _ in kind.shared)} if kind.shared else {}
    exported, tensors = as_exported(spec, arrays, dict.fromkeys(spec.targets, (5, 4)))
    described, tensors = read_described(write_adapter(tensors, exported, "base", tmp_path / "law"), exported.kind)
    for path in paths:
        a, b = (np.float64(array) for array in kind.low_rank(*tensors_at(spec, arrays, path)))
        alpha, rank = 50 if path.startswith("layers.1") else 20, 1 if "k_proj" in path else 3
        scale = FOREIGN[name].get("scale", lambda alpha, rank, rslora: alpha / (rank**0.5 if rslora else rank))
        want = (scale(alpha, rank, rslora) if callable(scale) else scale) * a @ b
        if "tinted" in name:
            want *= 1 + np.float64(arrays[path][2])
        merged = adapter_kind(exported.kind).merge(0, *tensors_at(described.spec, tensors, path))
        np.testing.assert_allclose(merged, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("entries", "rslora"),
    [({"use_rslora": True}, False), ({"use_rslora": False}, True), ({"r": lambda spec: 2 * spec.rank}, True),
     ({"alpha_pattern": {}}, False), ({"up_dropout": lambda spec: 0.0}, False)],
    ids=["on", "off", "rank", "patterns", "dropout"],
)  # fmt: skip
def test_a_kind_whose_folders_say_another_scale_is_refused(entries, rslora, monkeypatch):
    monkeypatch.setitem(KINDS, "forced", AdapterKind(**NAMED, peft={"peft_type": "FORCED"} | entries))
    with pytest.raises(ConfigError, match="do not say all of an adapter"):
        check_folder_of("forced", rslora=rslora)


def test_a_fold_that_merges_something_else_is_refused(monkeypatch):
    def fold(times):
        return lambda kernel, tensors, sizes: kernel + times * sizes.scale * tensors["down"] @ tensors["up"]

    monkeypatch.setitem(KINDS, "folded", AdapterKind(**PAIR, fold=fold(1)))
    check_kind("folded")
    monkeypatch.setitem(KINDS, "folded", AdapterKind(**PAIR, fold=fold(2)))
    with pytest.raises(ConfigError, match="fold merges other weights"):
        check_kind("folded")


NO_DECAY = (
    r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)"  # parameters that transformers' Trainer leaves alone
)


def test_weight_decay_is_that_of_transformers_trainer():
    leaves = [*(leaf for kind in KINDS.values() for leaf in kind.leaves), *TOKEN_ROWS.values()]
    leaves += [leaf for row in OBJECTIVES.values() for leaf in row.head]
    trained = [leaf for leaf in leaves if leaf.trainable]
    assert {leaf.decay for leaf in trained} == {True, False}
    for leaf in trained:
        assert leaf.decay is not bool(re.search(NO_DECAY, (leaf.peft_name or "lora_" + leaf.name).lower())), leaf.name


def test_doras_factor_is_the_magnitude_over_the_norm_of_the_sum():
    tensors = {"lora_a": A, "lora_b": B, "magnitude": RNG.normal(size=10).astype(np.float32)}
    norms = np.linalg.norm(np.float64(W) + 2 * np.float64(A) @ np.float64(B), axis=0)
    for library in (jnp, np):
        sizes = Sizes(K=12, N=10, R=3, scale=np.float32(2.0), np=library)
        np.testing.assert_allclose(DORA.factors(W, tensors, sizes), tensors["magnitude"] / norms, rtol=1e-5)
        np.testing.assert_allclose(DORA.start(W, tensors, sizes)["magnitude"], norms, rtol=1e-5)


def test_prepared_norms_are_those_of_each_call():
    """A layer with prepared norms has the outputs and gradients of one that computes them, beside a plain adapter."""
    specs = [AdapterSpec(name="dora", rank=3, alpha=6, kind="dora"), AdapterSpec(name="lora", rank=3, alpha=6)]
    layers = [LoRALinear(12, 10, adapters=specs, prepared=prepared, rngs=nnx.Rngs(0)) for prepared in (False, True)]
    tensors = {"lora_a": A, "lora_b": B, "magnitude": RNG.normal(size=10).astype(np.float32)}
    for layer in layers:
        for name, array in tensors.items():
            getattr(layer, name)[...] = jnp.asarray(np.stack([array] * 2))
    kernel = layers[0].kernel[...]
    norm = np.asarray(DORA.prepare(kernel, tensors, SIZES)["column_norm"])
    layers[1].column_norm[...] = jnp.asarray(np.stack([norm, np.zeros_like(norm)]))
    x, context = jnp.asarray(RNG.normal(size=(32, 12)), jnp.float32), LoRAContext.of(specs, [0, 1])

    def results(layer: LoRALinear):
        graph, lora, rest = nnx.split(layer, nnx.LoRAParam, ...)
        return jax.jit(jax.value_and_grad(lambda lora: (nnx.merge(graph, lora, rest)(x, context) ** 2).sum()))(lora)

    (ours, gradient), (wanted, gradients) = results(layers[1]), results(layers[0])
    np.testing.assert_allclose(ours, wanted, rtol=1e-6)
    for leaf, same in zip(jax.tree.leaves(gradient), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(leaf, same, rtol=1e-5, atol=1e-5)


def test_doras_dropout_is_pefts():
    """x W + (f - 1) · drop(x) W + f · scale · (drop(x) A) B, beside a plain adapter whose rows stay as they are."""
    specs = [
        AdapterSpec(name="dropping", rank=3, alpha=6, kind="dora", dropout=0.4, seed=1),
        AdapterSpec(name="plain", rank=3, alpha=6, dropout=0.2, seed=2),
    ]
    layer = LoRALinear(12, 10, adapters=specs, rngs=nnx.Rngs(0))
    tensors = {
        name: RNG.normal(size=getattr(layer, name).shape).astype(np.float32)
        for name in ("lora_a", "lora_b", "magnitude")
    }
    for name, array in tensors.items():
        getattr(layer, name)[...] = jnp.asarray(array)
    x = jnp.asarray(RNG.normal(size=(32, 12)), jnp.float32)
    context = LoRAContext.of(specs, [0, 1], row_key=jnp.arange(32, dtype=jnp.uint32), implementation="xla")
    computed = nnx.jit(lambda layer, x, context, site: layer(x, context, site=site), static_argnames="site")
    actual = computed(layer, x, context, site=3)
    dropout = context.at_site(3)
    owner = jnp.repeat(jnp.array([0, 1]), 16)
    kept = np.where(
        keep_mask(dropout, owner, 12), np.float64(x) * np.asarray(inverse_keep(dropout.rate))[owner][:, None], 0
    )
    w, a, b = (np.float64(array) for array in (layer.kernel[...], tensors["lora_a"], tensors["lora_b"]))
    f = tensors["magnitude"][0] / np.linalg.norm(w + 2 * a[0] @ b[0], axis=0)
    wanted = np.float64(x) @ w
    wanted[:16] += (f - 1) * (kept[:16] @ w) + 2 * f * (kept[:16] @ a[0] @ b[0])
    wanted[16:] += 2 * kept[16:] @ a[1] @ b[1]
    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4)
    without = LoRAContext.of([replace(spec, dropout=0.0) for spec in specs], [0, 1])
    assert not without.drops_columns
    plain = np.float64(x)[:16] @ w
    np.testing.assert_allclose(
        np.asarray(computed(layer, x, without, site=0))[:16],
        f * (plain + 2 * np.float64(x)[:16] @ a[0] @ b[0]),
        rtol=1e-4,
        atol=1e-4,
    )


def test_pissa_starts_at_the_base_and_takes_its_largest_values():
    started = PISSA.start(W, {}, SIZES)
    a, b = PISSA.low_rank(started, SIZES)
    np.testing.assert_allclose(a @ b, np.zeros_like(W), atol=1e-6)
    values = np.linalg.svd(2 * np.asarray(started["lora_a"] @ started["lora_b"]), compute_uv=False)
    np.testing.assert_allclose(values[:3], np.linalg.svd(W, compute_uv=False)[:3], rtol=1e-5)


def test_doras_norm_is_constant_in_the_gradient():
    tensors = {"lora_a": A, "lora_b": B, "magnitude": np.ones(10, np.float32)}
    gradient = jax.grad(lambda tensors: DORA.factors(W, tensors, SIZES).sum())(tensors)
    assert not gradient["lora_a"].any()
    assert not gradient["lora_b"].any()
    assert gradient["magnitude"].all()
