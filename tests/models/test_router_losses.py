"""The load-balancing loss of routers against transformers (`golden.jsonl`), and of packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import FACTOR, GOLDEN, distances, golden, golden_tokens
from flax import nnx
from more_cases import nightly

from benchmarks.saved_model import load_decoder
from lorafusion_jax.models import Segments
from lorafusion_jax.models.balance import balance_losses, count_choices, rows_inside
from lorafusion_jax.models.forward import embed, final_norm, layer_inputs
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.objective.loss import token_losses
from lorafusion_jax.peft.experts import to_file
from lorafusion_jax.peft.folder import put_adapter, read_adapter

CASES = [case for case, row in GOLDEN.items() if "routers" in row]
EVERY_DAY = "qwen3_moe_unnormalised"
LOSS, GRADIENTS = 1e-5, 1e-4  # as in test_parity: float32 through a few layers


def computed(case: str) -> dict[str, np.ndarray]:
    """The routers' loss, the loss with it, and its gradients, under the names of the stored results."""
    spec, arrays = read_adapter(golden(case) / "adapter")
    tokens = golden_tokens(case)
    model = load_decoder(golden(case), [spec], dtype=jnp.float32)
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    leaves = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(lora)}
    leaves = {name: jnp.asarray(leaf) for name, leaf in put_adapter(leaves, 0, arrays).items()}
    config, T = model.config, len(tokens)
    rows, length_M = np.arange(T), np.array([0, T])  # the first place is not used
    context = LoRAContext.of([spec], np.zeros(1, np.int32), train=False)

    def loss(leaves):
        inputs = layer_inputs(config, jnp.asarray(rows), Segments.from_lengths([T], T), context)
        inside = {"inside": rows_inside(jnp.array([-1, 0]), length_M, T)}
        inputs = type(inputs)(**{name: getattr(inputs, name) for name in inputs.__slots__} | inside)
        flat = [(path, leaf.replace(leaves[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(lora)]
        model = nnx.merge(graph, nnx.from_flat_state(flat), frozen)
        x_TD, choices = embed(model.embed_tokens.weight[...], tokens, config.embedding_scale), 0.0
        for number, layer in enumerate(model.layers):
            x_TD, counted = layer.with_choices(x_TD, inputs.at_layer(number))
            choices = choices if counted is None else choices + counted
        hidden = final_norm(x_TD, model.norm.weight[...], config)
        weights = jnp.where(rows < T - 1, 1 / (T - 1), 0.0)
        unused, routers = balance_losses(choices, length_M, config.num_routers)
        value = token_losses(hidden, model.head(), jnp.roll(tokens, -1), weights).sum()
        return value + FACTOR * routers, (routers, unused)

    (value, (routers, unused)), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(leaves)
    assert unused == 0
    gradients = {
        f"base_model.model.model.{name[:-7]}.lora_{name[-1].upper()}.weight": np.asarray(slope[0]).swapaxes(-1, -2)
        for name, slope in slopes.items()
    }
    return {"loss": value, "routers": routers} | {f"grad.{name}": slope for name, slope in to_file(gradients).items()}


@pytest.mark.parametrize("case", [case if case == EVERY_DAY else nightly(case) for case in CASES])
def test_loss_and_gradients_are_those_of_transformers(case):
    stored, actual = GOLDEN[case]["routers"], computed(case)
    without, wanted = GOLDEN[case]["probes"], stored["probes"]
    np.testing.assert_allclose(actual.pop("routers"), stored["balance"], rtol=LOSS)
    assert wanted.keys() == actual.keys() - {"loss"}
    changes = [max(np.abs(np.subtract(wanted[name], without[name]))) / wanted[name][0] for name in wanted]
    assert max(changes) > 0.05, "the routers' loss changes no gradient"
    errors = distances(stored, actual)
    assert errors.pop("loss") < LOSS
    assert max(errors.values()) < GRADIENTS, errors


def test_sequences_are_counted_apart():
    """Packed at other rows, beside padding and NaN, a sequence has the loss and the gradient that it has alone."""
    rng = np.random.default_rng(3)
    logits, expert = rng.standard_normal((23, 5)).astype(np.float32), rng.integers(0, 5, (23, 2))
    offsets, lengths = np.array([2, 9, 20]), np.array([5, 11, 3])

    @jax.jit
    def losses(logits, expert, offsets, lengths):
        return balance_losses(count_choices(logits, expert, rows_inside(offsets, lengths, len(logits))), lengths, 1)

    def of_second(logits):
        return losses(logits, expert, offsets, lengths)[1]

    broken = logits.copy()
    broken[20:], broken[2:7] = np.nan, np.inf
    value, slope = jax.jit(jax.value_and_grad(of_second))(broken)
    alone = lambda rows: losses(rows, expert[9:20], np.array([0]), np.array([11]))[0]  # noqa: E731
    value_alone, slope_alone = jax.jit(jax.value_and_grad(alone))(logits[9:20])
    slope = np.asarray(slope)
    np.testing.assert_allclose(value, value_alone, rtol=1e-6)
    np.testing.assert_allclose(slope[9:20], slope_alone, rtol=1e-5, atol=1e-8)
    assert not np.any(slope[7:9]), "rows of padding have a gradient"
