"""The load-balancing loss of routers against transformers (`make_router_golden.py`), and of packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from make_router_golden import CASES, FACTOR, GOLDEN, OUT
from more_cases import nightly
from safetensors.numpy import load_file

from lorafusion_jax.models import Segments, load_decoder
from lorafusion_jax.models.balance import balance_losses, count_choices, rows_inside
from lorafusion_jax.models.forward import embed, final_norm, layer_inputs
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.objective.loss import token_losses
from lorafusion_jax.peft.experts import to_file
from lorafusion_jax.peft.folder import put_adapter, read_adapter

LOSS, GRADIENTS = 1e-5, 1e-4  # as in test_parity: float32 through a few layers


def computed(case: str) -> dict[str, np.ndarray]:
    """The routers' loss, the loss with it, and its gradients, under the names of the stored results."""
    spec, arrays = read_adapter(GOLDEN / case / "adapter")
    tokens = load_file(GOLDEN / case / "expected.safetensors")["tokens"]
    model = load_decoder(GOLDEN / case, [spec], dtype=jnp.float32)
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    leaves = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(lora)}
    leaves = {name: jnp.asarray(leaf) for name, leaf in put_adapter(leaves, 0, arrays).items()}
    config, T = model.config, len(tokens)
    rows, length_M = jnp.arange(T), jnp.array([0, T])  # the first place is not used
    context = LoRAContext.of([spec], jnp.zeros(1, jnp.int32), train=False)
    inputs = layer_inputs(config, rows, Segments.from_lengths([T], T), context)
    inside = {"inside": rows_inside(jnp.array([-1, 0]), length_M, T)}
    inputs = type(inputs)(**{name: getattr(inputs, name) for name in inputs.__slots__} | inside)

    def loss(leaves):
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


@pytest.mark.parametrize("case", [CASES[0], *map(nightly, CASES[1:])])
def test_loss_and_gradients_are_those_of_transformers(case):
    wanted, actual = load_file(OUT / f"{case}.safetensors"), computed(case)
    without = load_file(GOLDEN / case / "expected.safetensors")
    assert wanted.keys() == actual.keys()
    gradients = [name for name in wanted if name.startswith("grad")]
    changes = [np.linalg.norm(wanted[name] - without[name]) / np.linalg.norm(wanted[name]) for name in gradients]
    assert max(changes) > 0.05, "the routers' loss changes no gradient"
    for name in ("loss", "routers"):
        np.testing.assert_allclose(actual[name], wanted[name], rtol=LOSS)
    for name in gradients:
        assert np.linalg.norm(actual[name] - wanted[name]) < GRADIENTS * np.linalg.norm(wanted[name]), name


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
