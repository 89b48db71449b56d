"""The decoder against `transformers` and `peft`: stored results of drawn models of every family (`golden.jsonl`).

Logits, loss, logits with an adapter that PEFT wrote, and the gradients of all of its tensors.
"""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import GOLDEN, distances, golden, golden_tokens
from flax import nnx
from more_cases import mostly_nightly, nightly

from benchmarks.agreement import PARITY
from benchmarks.csv_rows import rows
from benchmarks.saved_model import load_decoder
from lorafusion_jax.data.assemble import Piece, assemble
from lorafusion_jax.layout.layer import saved_path
from lorafusion_jax.models import Segments
from lorafusion_jax.models.forward import logits
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.objective.loss import token_losses
from lorafusion_jax.peft.experts import to_file
from lorafusion_jax.peft.folder import put_adapter, read_adapter

# Float32 through a few layers. Logits, of their largest; gradients, of each tensor's norm. Seen: 2e-6 and 5e-6.
LOGITS, GRADIENTS = 1e-5, 1e-4
# transformers' logits in float32 are 1.0e-5 from its own in float64 in this case, and ours may err as much.
ROUNDED = {"qwen3_5_moe_one": 2e-5}
# One of each mechanism that has a backward of its own; the gradients of others are those of the same functions. Those
# of delta rules and of experts stand in tests of their ops, and here for every model in the nightly run.
DIFFERENTIATED = (
    "llama3", "gemma2_untied", "gemma4", "phi3_long", "gpt_oss_unbiased", "qwen3_moe_unnormalised",
)  # fmt: skip
# Programs that a test of gradients compiles; those of this one stand in test_router_losses.py.
WITH_GRADIENTS = tuple(case for case in DIFFERENTIATED if case != "qwen3_moe_unnormalised")
# One of each other mechanism of a forward pass; other models have these mechanisms with other numbers and run nightly.
# Multipliers, layers without positions, biases of an MLP and half rotations are those of `test_drawn_families`.
FORWARD = (
    "ministral3", "qwen2_window", "qwen3_window_yarn", "gemma3", "olmo3_yarn", "qwen3_next", "gemma4_experts",
    "gemma4_shared", "deepseek_v3_experts", "qwen3_5",
)  # fmt: skip
EACH = [case if case in DIFFERENTIATED else nightly(case) for case in GOLDEN]


def program(case: str, *, gradients: bool = True):
    """Returns run(leaves, tokens, positions, segments) → ((loss, logits), gradients), and leaves of the adapter.

    With a seed, every weight of the base moves by a unit of its last place.
    """
    return program_of(golden(case), gradients=gradients)


@cache
def program_of(folder: Path, *, gradients: bool):
    spec, arrays = read_adapter(folder / "adapter")
    model = load_decoder(folder, [spec], dtype=jnp.float32)
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    leaves = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(lora)}
    leaves = {name: np.asarray(leaf) for name, leaf in put_adapter(leaves, 0, arrays).items()}
    context = LoRAContext.of([spec], jnp.zeros(1, jnp.int32), train=False)
    config = model.config

    def filled(leaves, frozen):
        flat = [(path, leaf.replace(leaves[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(lora)]
        return nnx.merge(graph, nnx.from_flat_state(flat), frozen)

    def loss(leaves, frozen, tokens, positions, segments):
        model = filled(leaves, frozen)
        hidden = model.hidden(tokens, positions, segments, context)
        weights = jnp.where(jnp.arange(len(tokens)) < len(tokens) - 1, 1 / (len(tokens) - 1), 0.0)
        head = {"soft_cap": config.final_soft_cap, "logit_scale": config.logit_scale}
        value = token_losses(hidden, model.head(), jnp.roll(tokens, -1), weights, **head).sum()
        return value, logits(hidden, model.head(), config)

    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True) if gradients else lambda *inputs: (loss(*inputs), {}))
    return lambda leaves, *inputs, seed=None: compiled(leaves, moved(frozen, seed), *inputs), leaves


def moved(weights: nnx.State, seed: int | None) -> nnx.State:
    random = np.random.default_rng(seed)

    def move(weight):
        up = random.integers(0, 2, weight.shape, dtype=bool)
        return np.nextafter(weight, np.where(up, np.inf, -np.inf), dtype=np.float32)

    return weights if seed is None else jax.tree.map(lambda x: move(x) if x.dtype == jnp.float32 else x, weights)


def without_adapter(leaves: dict) -> dict:
    return {name: np.zeros_like(leaf) if name.endswith("_b") else leaf for name, leaf in leaves.items()}


@cache
def computed(case: str, *, gradients: bool = True) -> dict[str, np.ndarray]:
    """What the decoder computes, under the names of the stored probes."""
    return results_of(*program(case, gradients=gradients), golden_tokens(case))


def computed_of(folder: Path, tokens: np.ndarray, *, gradients: bool) -> dict[str, np.ndarray]:
    return results_of(*program_of(folder, gradients=gradients), tokens)


def results_of(run, leaves, tokens: np.ndarray) -> dict[str, np.ndarray]:
    inputs = (tokens, np.arange(len(tokens)), Segments.from_lengths([len(tokens)], len(tokens)))
    # Both with the program of the adapter; `test_packed_samples` also runs that of a bare model.
    (_, plain), _ = run(without_adapter(leaves), *inputs)
    (value, adapted), slopes = run(leaves, *inputs)
    results = {"logits": plain, "adapted": adapted, "loss": value}
    slopes_of = {
        f"base_model.model.model.{saved_path(name[:-7])}.lora_{name[-1].upper()}.weight": np.asarray(slope[0]).swapaxes(
            -1, -2
        )
        for name, slope in slopes.items()
    }
    stored = {f"grad.{name}": slope for name, slope in to_file(slopes_of).items()}
    return {name: np.asarray(value) for name, value in results.items()} | stored


def assert_same_values(case: str, values: dict[str, np.ndarray]) -> dict[str, float]:
    """Errors of logits, loss and gradients, relative."""
    assert np.ptp(values["logits"]) > 0.5, "the model says nothing"
    errors = distances(GOLDEN[case], values)
    results = {name: error for name, error in errors.items() if not name.startswith("grad")}
    assert results.keys() == {"logits", "adapted", "loss"}
    assert max(results.values()) < ROUNDED.get(case, LOGITS), results
    return errors


@pytest.mark.parametrize("case", EACH)
def test_a_family_computes_what_transformers_and_peft_do(case, record_property):
    """`benchmarks/parity.py` writes the differences."""
    values = computed(case)
    assert values.keys() - {"loss"} == GOLDEN[case]["probes"].keys()
    errors = assert_same_values(case, values)
    gradients = {name: error for name, error in errors.items() if name.startswith("grad")}
    for key, value in {"case": case, "family": GOLDEN[case]["family"], "gradients": max(gradients.values())}.items():
        record_property(key, value)
    record_property("results", max(error for name, error in errors.items() if name not in gradients))
    assert max(gradients.values()) < GRADIENTS, gradients


def test_the_published_table_has_every_model():
    """`python -m benchmarks.parity --out FOLDER --only CASE` adds the rows of a new one."""
    published = {row["case"]: row["family"] for row in rows(PARITY)}
    assert published == {case: row["family"] for case, row in GOLDEN.items()}


@pytest.mark.parametrize("case", FORWARD)
def test_a_family_computes_the_logits_of_transformers_and_peft(case):
    assert_same_values(case, computed(case, gradients=False))


PACKED = (
    "mistral_window", "gemma4", "phi3_long", "qwen3_moe_unnormalised", "gemma3", "glm4_moe_groups", "olmo3_yarn",
    "ministral3", "smollm3_window", "mixtral_window", "gpt_oss_unbiased", "qwen2_moe", "qwen3_5", "deepseek_v3_experts",
    "gemma4_experts", "gemma4_shared_values",
)  # fmt: skip


@pytest.mark.parametrize("case", [nightly(case) if case in PACKED[4:] else case for case in PACKED])
def test_packed_samples_are_computed_as_alone(case):
    """Windows, positions, the choice of longrope's factors and the experts of a row belong to a sample."""
    tokens = golden_tokens(case)
    if case != PACKED[0]:  # the program of the test above
        whole_run, leaves = program(case, gradients=case in WITH_GRADIENTS)
        run = lambda *inputs: whole_run(without_adapter(leaves), *inputs)[0][1]  # noqa: E731
    else:
        model = load_decoder(golden(case), dtype=jnp.float32)
        run = jax.jit(lambda *inputs: model(*inputs))
    whole = run(tokens, np.arange(len(tokens)), Segments.from_lengths([len(tokens)], len(tokens)))
    assert distances(GOLDEN[case], {"logits": whole})["logits"] < LOGITS
    lengths = (14, 5, len(tokens) - 19)
    positions = np.concatenate([np.arange(length) for length in lengths])
    packed = run(tokens, positions, Segments.from_lengths(lengths, len(tokens)))
    stop = 0
    for length in lengths:
        start, stop = stop, stop + length
        padded = np.concatenate([tokens[start:stop], np.zeros(len(tokens) - length, np.int32)])
        places = np.concatenate([np.arange(length), np.arange(len(tokens) - length)])
        alone = run(padded, places, Segments.from_lengths([length], len(tokens)))[:length]
        np.testing.assert_allclose(packed[start:stop], alone, rtol=0, atol=2e-6 * np.abs(alone).max())


def padded(case: str, tile: int, capacity: int, length: int, seed: int | None = None) -> np.ndarray:
    """Logits of the first tokens of a case, as a sample whose adapter has the rest of its last tile."""
    tokens = golden_tokens(case)[:length]
    piece = Piece(0, tokens, np.ones(length, bool), 1.0, 0)
    batch = assemble([piece], capacity_tokens=capacity, tile_tokens=tile, max_segments=8, max_adapters=1)
    segments = Segments(ids=batch.segment_ids, offsets=batch.segment_offsets, lengths=batch.segment_lengths)
    run, leaves = program(case, gradients=case in WITH_GRADIENTS)
    return np.asarray(run(leaves, batch.tokens, batch.positions, segments, seed=seed)[0][1][:length])


def reaction_to_rounding(case: str, capacity: int, length: int) -> float:
    """Largest change of these logits when every weight is rounded otherwise.

    XLA picks the order of a product's sum by its shape, and a softmax sums a row of all keys in lanes. A sum of n terms
    in another order is the exact one of operands that moved by at most n units of rounding each; one unit is used.
    """
    plain = padded(case, 1, capacity, length)
    return max(float(np.abs(padded(case, 1, capacity, length, seed) - plain).max()) for seed in range(4))


@pytest.mark.parametrize("case", mostly_nightly(GOLDEN, (*DIFFERENTIATED, "deepseek_v3_experts", "qwen3_5")))
@pytest.mark.parametrize("capacities", [1, nightly(2)])
def test_neither_tile_nor_capacity_reach_a_sample(case, capacities):
    """Rows that pad a sample to a tile are in its segment, but are no part of its length."""
    most = GOLDEN[case]["count"]
    length = 13  # within the original context of longrope, which a tile of all rows exceeds
    wanted = padded(case, 1, most, length)
    for tile in (2, most):
        actual = padded(case, tile, most * capacities, length)
        top = np.abs(wanted).max()
        bound = 4e-6 * top
        if np.abs(actual - wanted).max() > bound:  # the rows of a drawn model may be ill-conditioned
            # Both are to err by no more than `LOGITS`. Without this ceiling, a row whose experts change by one more
            # rounding would allow anything.
            bound = min(reaction_to_rounding(case, most, length), 2 * ROUNDED.get(case, LOGITS) * top)
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=bound)
