"""What fp8 does to learning, on the trained model of the examples: next to the base in float32."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.data.tokenizer import load_tokenizer
from lorafusion_jax.examples import examples_directory
from lorafusion_jax.models import Segments, load_decoder
from lorafusion_jax.modules import LoRAContext
from pallas_kernels.quantised import fp8

SPECS = [AdapterSpec(name="ask", rank=8, alpha=16, targets=("q_proj", "v_proj", "down_proj"))]  # smaller programs
T, STEPS = 256, 8


@pytest.fixture(scope="module")
def learnt():
    """(first gradient, held-out loss before, after) on the base as it is, and stored as fp8."""
    folder = examples_directory()
    model = load_decoder(folder / "base", SPECS, dtype=jnp.float32)
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    drawn = np.random.default_rng(0)
    lora = jax.tree.map(lambda leaf: leaf + jnp.asarray(drawn.normal(0, 0.01, leaf.shape), leaf.dtype), lora)
    text = "\n".join(
        " ".join(message["content"] for message in json.loads(row)["messages"])
        for row in (folder / "data" / "ask.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    )
    tokens = np.asarray(load_tokenizer(folder / "base").encode(text)[: 3 * (T + 1)], np.int32).reshape(3, T + 1)
    context = LoRAContext.of(SPECS, [0])

    def loss(lora, frozen, tokens):
        logits = nnx.merge(graph, lora, frozen)(
            tokens[:-1], jnp.arange(T), Segments.from_lengths([T], T), context
        )  # fmt: skip
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()

    loss_and_slope = jax.jit(jax.value_and_grad(loss))  # one program for both is cheaper than two
    step = optax.adam(3e-3)

    def learn(frozen):
        now, state, first = lora, step.init(lora), None
        before, _ = loss_and_slope(now, frozen, tokens[2])
        for number in range(STEPS):
            _, gradient = loss_and_slope(now, frozen, tokens[number % 2])
            first = gradient if first is None else first
            changes, state = step.update(gradient, state)
            now = optax.apply_updates(now, changes)
        return first, float(before), float(loss_and_slope(now, frozen, tokens[2])[0])

    return learn(frozen), learn(_stored(frozen))


def _stored(frozen):
    leaves = [
        (path, leaf.replace(fp8.quantise(leaf[...])) if path[-1] == "kernel" else leaf)
        for path, leaf in nnx.to_flat_state(frozen)
    ]
    return nnx.from_flat_state(leaves)


def test_gradients_of_adapters_point_where_they_did(learnt):
    (plain, *_), (stored, *_) = learnt
    flat = [np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(each)]) for each in (plain, stored)]
    assert float(flat[0] @ flat[1] / np.prod([np.linalg.norm(each) for each in flat])) >= 0.98


def test_held_out_loss_ends_where_it_did(learnt):
    (_, before, plain), (_, _, stored) = learnt
    assert plain < before - 0.05  # it learns at all
    assert abs(stored - plain) <= 0.005 * plain
