"""What fp8 does to learning, on the trained model of the examples: next to the base in float32."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from benchmarks.saved_model import load_decoder
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.data.tokenizer import load_tokenizer
from lorafusion_jax.examples import examples_directory
from lorafusion_jax.models import Segments
from lorafusion_jax.modules import LoRAContext
from pallas_kernels.quantised import fp8

SPECS = [AdapterSpec(name="ask", rank=8, alpha=16, targets=("q_proj", "v_proj", "down_proj"))]  # smaller programs
T, STEPS, SEEDS, HELD_OUT = 256, 8, 3, 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What an adapter learnt from one start, and its loss on held-out text."""

    first_gradient: np.ndarray
    before: float
    after: float


@pytest.fixture(scope="module")
def learnt() -> list[tuple[Learnt, Learnt]]:
    """Per seed, on the base as it is and stored as fp8. A seed draws the start and the order of the samples."""
    folder = examples_directory()
    model = load_decoder(folder / "base", SPECS, dtype=jnp.float32)
    graph, start, frozen = nnx.split(model, nnx.LoRAParam, ...)
    text = "\n".join(
        " ".join(message["content"] for message in json.loads(row)["messages"])
        for row in (folder / "data" / "ask.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    )
    ids = load_tokenizer(folder / "base").encode(text)
    samples = np.asarray(ids[: len(ids) // (T + 1) * (T + 1)], np.int32).reshape(-1, T + 1)
    context = LoRAContext.of(SPECS, [0])

    def loss(lora, frozen, tokens):
        logits = nnx.merge(graph, lora, frozen)(
            tokens[:-1], jnp.arange(T), Segments.from_lengths([T], T), context
        )  # fmt: skip
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()

    optimised = {"xla_backend_optimization_level": 2, "xla_llvm_disable_expensive_passes": False}  # it also computes
    # One program for both is cheaper than two.
    loss_and_slope = jax.jit(jax.value_and_grad(loss), compiler_options=optimised)
    optimizer = optax.adam(3e-3)

    def held_out(lora, frozen):
        return float(np.mean([loss_and_slope(lora, frozen, tokens)[0] for tokens in samples[-HELD_OUT:]]))

    def learn(frozen, seed):
        drawn = np.random.default_rng(seed)
        now = jax.tree.map(lambda leaf: leaf + jnp.asarray(drawn.normal(0, 0.01, leaf.shape), leaf.dtype), start)
        order = drawn.permutation(len(samples) - HELD_OUT)[:STEPS]
        before, state, gradients = held_out(now, frozen), optimizer.init(now), []
        for sample in order:
            _, gradient = loss_and_slope(now, frozen, samples[sample])
            gradients.append(gradient)
            changes, state = optimizer.update(gradient, state)
            now = optax.apply_updates(now, changes)
        first = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(gradients[0])])
        return Learnt(first_gradient=first, before=before, after=held_out(now, frozen))

    stored = _stored(frozen)
    return [(learn(frozen, seed), learn(stored, seed)) for seed in range(SEEDS)]


def _stored(frozen):
    leaves = [
        (path, leaf.replace(fp8.quantise(leaf[...])) if path[-1] == "kernel" else leaf)
        for path, leaf in nnx.to_flat_state(frozen)
    ]
    return nnx.from_flat_state(leaves)


def test_gradients_of_adapters_point_where_they_did(learnt):
    for plain, stored in learnt:
        norms = np.linalg.norm(plain.first_gradient) * np.linalg.norm(stored.first_gradient)
        assert float(plain.first_gradient @ stored.first_gradient / norms) >= 0.98


def test_rounding_costs_the_base_at_most_a_hundredth_of_its_loss(learnt):
    """Two roundings per product, 2.6 % of a row's norm each, move a loss to second order: 0.6 % on 4096 tokens."""
    costs = [stored.before / plain.before - 1 for plain, stored in learnt]
    assert abs(np.mean(costs)) <= 0.01


def test_adapters_learn_as_much_on_fp8(learnt):
    """Held-out loss that training removes, as a share of what it removes on the base as it is.

    Runs of a few steps differ chaotically, so the mean of several seeds counts, less two standard errors. Rounding
    errors are independent from step to step, so at least 0.95 of the gain must be left.
    """
    assert all(plain.after < plain.before - 0.3 for plain, _ in learnt)
    gains = [(stored.before - stored.after) / (plain.before - plain.after) for plain, stored in learnt]
    error = np.std(gains, ddof=1) / np.sqrt(len(gains))
    assert np.mean(gains) - 2 * error >= 0.95
