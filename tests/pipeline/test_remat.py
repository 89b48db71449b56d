"""What forward leaves for backward: never a frozen weight, and enough that no product is computed twice."""

from __future__ import annotations

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex
from jax.interpreters import partial_eval
from more_cases import mostly_nightly

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.session.layer_programs import Split
from lorafusion_jax.session.parts import Parts

T, TILE = 64, 16
MODEL = ModelConfig(
    family="qwen3", vocab_size=64, hidden_size=24, intermediate_size=40, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=8, qk_norm=True,
)  # fmt: skip
SPECS = (AdapterSpec(name="law", rank=4, alpha=8, dropout=0.1), AdapterSpec(name="med", rank=2, alpha=2))
REMAT_POLICIES = ("everything", "gemm_inputs", "nothing")


@pytest.fixture(scope="module")
def layer():
    """(function of (given, lora, x), given, lora, x, dy) of one decoder layer with random weights."""
    parts = Parts(model=MODEL, specs=SPECS, settings=TrainSettings(), dtype=jnp.float32)
    shapes = parts.frozen_shapes()
    random = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    frozen = {name: draw(*shape) / 5 for name, shape in shapes.items()}
    leaves = {
        f"{linear.path}.{leaf}": shape
        for linear in MODEL.layer(0).linears
        for leaf, shape in zip(("lora_a", "lora_b"), _low_rank_shapes(*linear.shape), strict=True)
    }
    lora = {name: draw(*shape) / 5 for name, shape in leaves.items()}
    half = T // 2
    batch = Microbatch(
        **{
            name: np.zeros(T, np.int32)
            for name in Microbatch._fields
            if name not in Microbatch._field_defaults
            and name not in ("row_key", "weights", "segment_offsets", "segment_lengths", "tile_adapter", "adapters")
        },
        row_key=np.arange(T, dtype=np.uint32),
        weights=np.ones(T, np.float32),
        segment_offsets=np.array([0, half, T], np.int32),
        segment_lengths=np.array([half, half], np.int32),
        tile_adapter=np.array([0, 0, 1, 1], np.int32),
        adapters=np.array([0, 1], np.int32),
    )._replace(
        segment_ids=np.repeat(np.arange(2, dtype=np.int32), half), positions=np.tile(np.arange(half, dtype=np.int32), 2)
    )
    inputs = parts.inputs.of_batch(batch, dropout=True)

    def run(given, lora, x):
        return parts.layer(given, lora, x, inputs, jnp.int32(0))

    x, dy = (draw(T, MODEL.hidden_size) for _ in range(2))
    return run, frozen, lora, x, dy


def _low_rank_shapes(in_features, out_features):
    rank = max(spec.rank for spec in SPECS)
    return (len(SPECS), in_features, rank), (len(SPECS), rank, out_features)


def passes(layer, remat):
    """Forward and backward pass as two functions, as the programs of a stage have them."""
    run, frozen, lora, x, dy = layer
    split = Split(run, remat, MODEL.layer(0).checkpoints)
    forward = jax.make_jaxpr(split.forward, return_shape=True)
    jaxpr, (_, kept) = forward(frozen, lora, x)
    back = jax.make_jaxpr(split.backward)(frozen, lora, x, kept, dy)
    return jaxpr, back, kept


def count_products(jaxpr) -> int:
    """Matrix products of a program after dead code is gone, also those inside of inner functions."""
    alive, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    return _primitives(alive)["dot_general"]


def _primitives(jaxpr) -> Counter:
    counts = Counter(eqn.primitive.name for eqn in jaxpr.eqns)
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: isinstance(leaf, INNER)):
            if isinstance(value, INNER):
                counts += _primitives(value.jaxpr if isinstance(value, jex.ClosedJaxpr) else value)
    return counts


INNER = (jex.ClosedJaxpr, jex.Jaxpr)


def test_gemm_inputs_repeats_no_product(layer):
    """Counted beside a derivative that keeps everything; attention makes its scores again in both."""
    products = {remat: [count_products(jaxpr) for jaxpr in passes(layer, remat)[:2]] for remat in REMAT_POLICIES}
    forward = products["everything"][0]
    assert forward >= 7 + 7 * 2 + 2  # projections, their low-rank products, attention
    assert [products[remat][0] for remat in REMAT_POLICIES] == [forward] * 3
    assert products["nothing"][1] > products["everything"][1] + 7
    assert products["gemm_inputs"][1] == products["everything"][1]


@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_no_frozen_weight_is_kept(layer, remat):
    _, frozen, _, _, _ = layer
    shapes = {leaf.shape for leaf in frozen.values() if leaf.ndim > 1}
    _, _, kept = passes(layer, remat)
    assert not [leaf.shape for leaf in kept if leaf.shape in shapes or leaf.shape[::-1] in shapes]
    assert bool(kept) == (remat != "nothing")


@pytest.fixture(scope="module")
def gradients(layer):
    run, frozen, lora, x, dy = layer
    return jax.jit(lambda lora, x, dy: jax.vjp(partial(run, frozen), lora, x)[1](dy))(lora, x, dy)


@pytest.mark.parametrize("remat", mostly_nightly(REMAT_POLICIES, ["gemm_inputs", "nothing"]))
def test_kept_or_repeated_the_gradients_are_the_same(layer, gradients, remat):
    run, frozen, lora, x, dy = layer
    split = Split(run, remat, MODEL.layer(0).checkpoints)
    _, kept = jax.jit(split.forward)(frozen, lora, x)
    seen = jax.jit(split.backward)(frozen, lora, x, kept, dy)
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(gradients), strict=True):
        # float32: elementwise work is fused differently
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))
