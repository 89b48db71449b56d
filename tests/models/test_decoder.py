"""The decoder with adapters: results of a sample do not depend on the other samples."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.models import Decoder, ModelConfig, Segments
from lorafusion_jax.models.layer import DecoderLayer, LayerInputs
from lorafusion_jax.models.rope import rope_tables
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.objective.loss import sum_by, token_losses

CONFIG = ModelConfig(
    family="qwen3", vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, qk_norm=True, qkv_bias=True,
)  # fmt: skip
ADAPTERS = (
    AdapterSpec(name="a", rank=4, alpha=8, dropout=0.2, seed=1),
    AdapterSpec(name="b", rank=2, alpha=8, dropout=0.1, seed=2, targets=("q_proj", "v_proj", "down_proj")),
)
TILE = 16
ROWS = 160  # of every microbatch: one program serves all tests


def parts():
    """Splits a decoder whose B is not zero, so that every LoRA weight has a gradient."""
    model = Decoder(CONFIG, ADAPTERS, dtype=jnp.float32)
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    rng = np.random.default_rng(3)
    lora = dict(nnx.to_flat_state(lora))
    for path, leaf in lora.items():
        if path[-1] == "lora_b":
            noise = rng.normal(size=leaf.shape).astype(np.float32)
            lora[path] = leaf.replace(leaf[...] + (noise * (leaf_is_used(path, leaf)) * 0.1))
    return graph, nnx.from_flat_state(lora.items()), frozen


def leaf_is_used(path, leaf):
    """1 where an adapter of that rank targets the projection."""
    used = np.zeros(leaf.shape, np.float32)
    for index, spec in enumerate(ADAPTERS):
        if path[-2] in spec.targets:
            used[..., index, : spec.rank, :] = 1
    return used


def microbatch(samples):
    """Packs (adapter, tokens) at tiles and returns what a step needs; a sample's keys depend on the sample alone."""
    fields = {name: np.zeros(ROWS, np.int32) for name in ("tokens", "positions", "targets")}
    weights, row_adapter = np.zeros(ROWS, np.float32), np.full(ROWS, -1, np.int32)
    row_key, lengths, start = np.zeros(ROWS, np.uint32), [], 0
    for adapter, tokens in samples:
        n, rows = len(tokens), -(-len(tokens) // TILE) * TILE
        at = slice(start, start + n)
        fields["tokens"][at], fields["positions"][at] = tokens, np.arange(n)
        fields["targets"][start : start + n - 1] = tokens[1:]
        weights[start : start + n - 1] = 1 / n
        row_adapter[start : start + rows] = adapter
        row_key[at] = np.arange(n) * 7919 + int(tokens[0])
        lengths += [n] + ([rows - n] if rows > n else [])
        start += rows
    segments = Segments.from_lengths(lengths, ROWS)
    return fields, weights, row_adapter, row_key, segments


def step(graph, frozen, *, dropout=True, implementation="xla"):
    def losses(lora, fields, weights, row_adapter, row_key, segments):
        model = nnx.merge(graph, lora, frozen)
        ctx = LoRAContext.of(ADAPTERS, row_adapter[::TILE], row_key=row_key, train=dropout)
        hidden = model.hidden(fields["tokens"], fields["positions"], segments, ctx, attention=implementation)
        losses_T = token_losses(hidden, model.head(), fields["targets"], jnp.where(row_adapter >= 0, weights, 0.0))
        losses_A = sum_by(losses_T, row_adapter, len(ADAPTERS))
        return losses_A.sum(), losses_A

    return jax.jit(jax.value_and_grad(losses, has_aux=True))


RNG = np.random.default_rng(0)
SAMPLES = [(adapter, RNG.integers(1, 40, n)) for adapter, n in [(0, 37), (1, 16), (1, 50), (0, 5)]]


@pytest.fixture(scope="module")
def decoder():
    graph, lora, frozen = parts()
    return step(graph, frozen), lora


def flat(state) -> dict:
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}


def close(got, wanted, relative):
    """Compares trees with a tolerance relative to the largest element of all leaves."""
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted))
    chex.assert_trees_all_close(got, wanted, rtol=0, atol=relative * largest)


def test_exactly_the_used_lora_weights_have_gradients(decoder):
    run, lora = decoder
    grads = run(lora, *microbatch(SAMPLES))[1]
    for path, grad in nnx.to_flat_state(grads):
        used = (
            leaf_is_used(path, grad)
            if path[-1] == "lora_b"
            else np.swapaxes(leaf_is_used(path, jnp.swapaxes(grad[...], -1, -2)), -1, -2)
        )
        moved = np.asarray(grad[...]) != 0
        assert not moved[used == 0].any(), path
        assert moved[used == 1].mean() > 0.9, path


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_packed_sample_equals_single_sample(decoder, number):
    """Loss and gradient of adapter k from sample i among others = from sample i and nothing else of k."""
    run, lora = decoder
    adapter = SAMPLES[number][0]
    company = [sample for i, sample in enumerate(SAMPLES) if i == number or sample[0] != adapter]
    (_, together), grads = run(lora, *microbatch(company))
    (_, alone), grads_alone = run(lora, *microbatch([SAMPLES[number]]))
    np.testing.assert_allclose(together[adapter], alone[adapter], rtol=1e-5)
    pick = lambda state: {name: leaf[adapter] for name, leaf in flat(state).items()}  # noqa: E731
    # Other offsets, so other orders of float32 sums; the largest gradient sets the scale.
    close(pick(grads), pick(grads_alone), 1e-5)


def test_nan_weights_of_one_adapter_do_not_affect_others(decoder):
    run, lora = decoder
    batch = microbatch(SAMPLES)
    (_, clean), clean_grads = run(lora, *batch)
    path = ("layers", 0, "self_attn", "q_proj", "lora_b")
    leaves = dict(nnx.to_flat_state(lora))
    leaves[path] = leaves[path].replace(leaves[path][...].at[0, 0, 0].set(np.nan))
    (_, losses), grads = run(nnx.from_flat_state(leaves.items()), *batch)
    assert np.isnan(losses[0])
    assert losses[1] == clean[1]
    for name, leaf in flat(clean_grads).items():
        np.testing.assert_array_equal(flat(grads)[name][1], leaf[1], err_msg=name)


def test_no_context_runs_the_base_model():
    tokens = np.arange(24) % 40
    rows = (tokens, np.arange(24), Segments.from_lengths([24], 24))
    base = Decoder(CONFIG, dtype=jnp.float32)
    with_adapters = Decoder(CONFIG, ADAPTERS, dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert not flat(nnx.state(base, nnx.LoRAParam))
    for wrong, why in (([CONFIG.vocab_size], "vocabulary"), ([3, -1], "vocabulary"), ([[1, 2]], r"shape \(1, 2\)")):
        with pytest.raises(ValueError, match=why):
            base(jnp.array(wrong))
    context = LoRAContext.of(ADAPTERS, [0], train=False)
    logits = jax.jit(lambda ctx: with_adapters(*rows, ctx))
    np.testing.assert_allclose(logits(None), logits(context), atol=1e-5)  # B is zero: the adapters say nothing yet


def test_bfloat16_keeps_adapters_in_float32():
    model = nnx.eval_shape(lambda: Decoder(CONFIG, ADAPTERS))
    kinds = {(type(leaf), leaf.dtype) for _, leaf in nnx.to_flat_state(nnx.state(model))}
    assert kinds == {(nnx.Param, jnp.dtype("bfloat16")), (nnx.LoRAParam, jnp.dtype("float32"))}


def test_abstract_decoder_allocates_nothing():
    big = ModelConfig(
        family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=4, num_heads=32,
        num_kv_heads=8, head_dim=128,
    )  # fmt: skip
    model = nnx.eval_shape(lambda: Decoder(big, ADAPTERS))
    size = sum(np.prod(leaf.shape) for _, leaf in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.LoRAParam))))
    assert size == big.num_parameters


def test_backward_saves_few_tensors_per_layer():
    """What decides how many tokens fit: 8B at 8192 rows keeps 1.24 GB a layer."""
    config = replace(CONFIG, hidden_size=64, intermediate_size=224, qk_norm=False, num_heads=4, head_dim=16)
    layer = nnx.eval_shape(lambda: DecoderLayer(config, ADAPTERS, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graph, lora, frozen = nnx.split(layer, nnx.LoRAParam, ...)
    T, D, F, Q, K = 1024, 64, 224, 4 * 16, 2 * 16
    segments = Segments.from_lengths([T], T)

    def backward(x, lora, frozen, row_key):
        inputs = LayerInputs(
            ropes=(rope_tables(config.ropes[0], config.head_dim, jnp.arange(T), segments),),
            segments=segments,
            lora=LoRAContext.of(ADAPTERS, np.zeros(8, np.int32), row_key=row_key),
        )
        return jax.vjp(lambda x, lora: nnx.merge(graph, lora, frozen)(x, inputs), x, lora)[1]

    row_key = jax.ShapeDtypeStruct((T,), jnp.uint32)
    kept = jax.eval_shape(backward, jax.ShapeDtypeStruct((T, D), jnp.bfloat16), lora, frozen, row_key)
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))  # noqa: E731
    # Input of both norms and their outputs; q, k, v, attention's output for itself and for o_proj; gate, up, product.
    activations = 2 * T * (4 * D + 3 * Q + 2 * K + 3 * F)
    tables_and_numbers = 4 * T * (2 * config.head_dim + 4 * 4 + 7 * 4)
    assert size(kept) - size(frozen) - size(lora) < activations + tables_and_numbers
