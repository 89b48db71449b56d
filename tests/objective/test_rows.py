"""Losses of clients' rows against their definitions in float64 numpy, and what a row must hold."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorafusion_jax.data.assemble import RowTable, target_size
from lorafusion_jax.errors import CallError
from lorafusion_jax.objective.row_head import client_logprobs, client_losses
from lorafusion_jax.objective.rows import LOSSES, read_config, read_row, row_losses

D, V = 16, 37
LENGTHS = (70, 1, 90, 60)  # of the rows; 300 positions with a gap and a tail that have none
CONFIGS = {"ppo": {"clip_low_threshold": 0.9}, "cispo": {"clip_low_threshold": "0.95"}, "dro": {"beta": 0.3}}


def clipped(r, inputs):
    return np.clip(r, inputs["clip_low_threshold"], inputs["clip_high_threshold"])


# p: log-probabilities [N] (cross_entropy: [N, K]), s: the same without a gradient, w: weights
DEFINITIONS = {
    "cross_entropy": lambda p, s, w, i: (-w * p).sum(-1),
    "importance_sampling": lambda p, s, w, i: -w * np.exp(p - i["logprobs"]) * i["advantages"],
    "ppo": lambda p, s, w, i: -w * smaller(np.exp(p - i["logprobs"]), i),
    "cispo": lambda p, s, w, i: -w * clipped(np.exp(s - i["logprobs"]), i) * i["advantages"] * p,
    "dro": lambda p, s, w, i: -w * (p * i["advantages"] - i["beta"] / 2 * (p - i["logprobs"]) ** 2),
    "gspo": lambda p, s, w, i: -w
    * smaller(np.exp((s - i["logprobs"])[i["sequence_ratio_mask"] != 0].mean() + p - s), i),
}


def smaller(r, inputs):
    return np.minimum(r * inputs["advantages"], clipped(r, inputs) * inputs["advantages"])


def drawn(loss, length, rng, targets=1):
    """Inputs of a row as a client sends them."""
    shape = (length,) if targets == 1 else (length, targets)
    inputs = {"target_tokens": rng.integers(0, V, shape)}
    if loss == "cross_entropy":
        return inputs | {"weights": np.where(rng.random(shape) < 0.6, rng.normal(size=shape), 0)}
    inputs["logprobs"] = rng.normal(-4, 1, length)
    inputs["advantages"] = np.where(rng.random(length) < 0.7, rng.normal(size=length), 0)
    if "clip_low_threshold" in LOSSES[loss].config and length > 60:  # by position, in some rows
        inputs["clip_high_threshold"] = rng.uniform(1.0, 2.0, length)
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = np.arange(length) >= length // 3
    return inputs


def problem(loss, targets=1, seed=0):
    """Hidden states, head, table, segments; the rows with their starts and full inputs."""
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(300, D)).astype(np.float32), rng.normal(size=(D, V)).astype(np.float32)
    table, segments, rows, start = RowTable.empty(300, target_size(targets)), np.full(300, 7, np.int32), [], 0
    config = read_config(loss, CONFIGS.get(loss))
    for number, length in enumerate(LENGTHS):
        inputs = drawn(loss, length, rng, targets)
        numbers = read_row(inputs, loss, config, num_tokens=length, vocab_size=V)
        table.put(numbers, start)
        segments[start : start + length] = number
        rows.append((start, numbers, LOSSES[loss].config | config | inputs))
        start += length + 10
    return hidden, head, table, segments, rows


def log_softmax(z):
    return z - z.max(-1, keepdims=True) - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True))


def meaning(loss, hidden, head, rows):
    """float64: losses of positions, log-probabilities of their targets, gradient of the sum."""
    hidden, head = hidden.astype(np.float64), head.astype(np.float64)
    log_p, losses, slopes, logprobs = log_softmax(hidden @ head), np.zeros(300), np.zeros((300, V)), {}
    for start, _, inputs in rows:
        targets = np.asarray(inputs["target_tokens"])
        at = np.arange(start, start + len(targets))
        p = log_p[at[:, None], targets] if targets.ndim == 2 else log_p[at, targets]
        weights = np.asarray(inputs.get("weights", np.ones(targets.shape)))
        inputs = {name: np.asarray(value, np.float64) for name, value in inputs.items()}
        logprobs[start] = p
        several = targets.ndim == 2
        define = DEFINITIONS[loss]
        if loss == "cross_entropy" and not several:
            p, weights, targets = p[:, None], weights[:, None], targets[:, None]
        losses[at] = define(p, p, weights, inputs)
        for k in range(p.shape[1] if p.ndim == 2 else 1):
            step = 1e-6 * (np.arange(p.shape[1]) == k if p.ndim == 2 else 1.0)
            slope = (define(p + step, p, weights, inputs) - define(p - step, p, weights, inputs)) / 2e-6
            np.add.at(slopes, (at, targets[:, k] if targets.ndim == 2 else targets), slope)
    dz = slopes - np.exp(log_p) * slopes.sum(-1, keepdims=True)
    return losses, logprobs, dz @ head.T


def total(hidden, head, table, segments, **options):
    losses, logprobs = client_losses(hidden, head, table, segments, 8, **options)
    return losses.sum(), (losses, logprobs)


value_and_grad = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnames=("soft_cap", "logit_scale"))


@pytest.mark.parametrize(("loss", "targets"), [*((name, 1) for name in LOSSES), ("cross_entropy", 3)])
def test_losses_gradients_and_logprobs_match_the_definitions(loss, targets):
    hidden, head, table, segments, rows = problem(loss, targets)
    (_, (losses, logprobs)), gradient = value_and_grad(hidden, head, table, segments)
    expected, expected_logprobs, expected_gradient = meaning(loss, hidden, head, rows)
    # Sums of terms of size 1 to 10, which may cancel.
    np.testing.assert_allclose(losses, np.where(table.learned, expected, 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-5 * np.abs(expected_gradient).max())
    assert np.abs(expected_gradient).max() > 0
    for start, numbers, _ in rows:
        mine = np.asarray(logprobs)[start : start + len(numbers.targets), :targets]
        np.testing.assert_allclose(np.squeeze(mine), np.squeeze(expected_logprobs[start]), rtol=1e-5, atol=1e-6)
        on_host = row_losses(numbers, expected_logprobs[start].reshape(-1, targets)).sum(-1)
        np.testing.assert_allclose(on_host, expected[start : start + len(mine)], rtol=1e-5, atol=1e-6)


def test_all_kinds_share_one_microbatch_and_one_program():
    rng, table, segments = np.random.default_rng(3), RowTable.empty(300, 1), np.full(300, 7, np.int32)
    hidden, head = rng.normal(size=(300, D)).astype(np.float32), rng.normal(size=(D, V)).astype(np.float32)
    expected, programs = np.zeros((300, D)), value_and_grad._cache_size()
    for number, loss in enumerate(LOSSES):
        inputs, start = drawn(loss, 40, rng), 45 * number
        row = read_row(inputs, loss, {}, num_tokens=40, vocab_size=V)
        table.put(row, start)
        segments[start : start + 40] = number
        expected += meaning(loss, hidden, head, [(start, row, LOSSES[loss].config | inputs)])[2]
    _, gradient = value_and_grad(hidden, head, table, segments)
    np.testing.assert_allclose(gradient, expected, atol=1e-5 * np.abs(expected).max())
    assert value_and_grad._cache_size() - programs <= 1


def test_positions_without_a_gradient_have_logprobs_and_no_effect():
    hidden, head, table, segments, _ = problem("cross_entropy")
    (_, (losses, logprobs)), gradient = value_and_grad(hidden, head, table, segments)
    looked = jax.jit(client_logprobs)(hidden, head, table)
    silent = ~table.learned
    assert 50 < silent.sum() < 250
    assert not np.asarray(gradient)[silent].any()
    assert not np.asarray(losses)[silent].any()
    np.testing.assert_allclose(looked, logprobs, rtol=1e-6)
    assert (np.asarray(logprobs)[table.kind != 0] < 0).all()
    assert not np.asarray(logprobs)[table.kind == 0].any()


def test_nan_stays_in_its_positions():
    hidden, head, table, segments, _ = problem("ppo")
    spoiled = hidden.copy()
    spoiled[75:90] = np.nan  # between two rows, and the whole second one
    spoiled[290:] = np.inf
    (_, (losses, logprobs)), gradient = value_and_grad(spoiled, head, table, segments)
    (_, (clean, clean_logprobs)), clean_gradient = value_and_grad(hidden, head, table, segments)
    others = np.ones(300, bool)
    others[80] = False  # the second row's only position
    for now, before in ((losses, clean), (logprobs, clean_logprobs), (gradient, clean_gradient)):
        np.testing.assert_array_equal(np.asarray(now)[others], np.asarray(before)[others])


def test_soft_cap_and_scale_reach_the_gradient():
    hidden, head, table, segments, _ = problem("importance_sampling")
    options = {"soft_cap": 3.0, "logit_scale": 0.5}
    (_, (losses, _)), gradient = value_and_grad(hidden, head, table, segments, **options)

    @jax.jit
    @jax.value_and_grad
    def plain(hidden):
        log_p = jax.nn.log_softmax(3.0 * jnp.tanh(0.5 * jnp.matmul(hidden, head, precision="highest") / 3.0))
        p = jnp.take_along_axis(log_p, table.targets, 1)[:, 0]
        return jnp.where(table.learned, -jnp.exp(p - table.old) * table.factors[:, 0], 0.0).sum()

    expected_loss, expected = plain(hidden)
    np.testing.assert_allclose(losses.sum(), expected_loss, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, atol=2e-5 * np.abs(np.asarray(expected)).max())


def test_weights_of_any_sign_and_size_keep_their_digits_in_float16():
    hidden, head, table, segments, _ = problem("cross_entropy")
    scaled = jax.jit(jax.grad(lambda h, t: 1e6 * total(h, head.astype(jnp.float16), t, segments)[0]))
    low = hidden.astype(np.float16)
    small = np.asarray(scaled(low, table._replace(factors=table.factors * np.float32(1e-12))), np.float32)
    whole = np.asarray(scaled(low, table._replace(factors=table.factors * np.float32(1e-6))), np.float32)
    np.testing.assert_allclose(small * 1e6, whole, atol=2**-8 * np.abs(whole).max())


@pytest.mark.parametrize(
    ("change", "loss", "code", "says"),
    [
        ({}, "grpo", "call.loss", "forward_backward_custom"),
        ({}, "stable_reinforce", "call.loss", "losses are cross_entropy"),
        ({"target_tokens": None}, "cross_entropy", "call.inputs", "needs the inputs target_tokens"),
        ({"advantages": np.ones(3)}, "ppo", "call.inputs", "needs the inputs logprobs"),
        ({"mask": np.ones(3)}, "cross_entropy", "call.inputs", "no inputs mask"),
        ({"target_tokens": np.array([1, 2])}, "cross_entropy", "call.targets", "model_input has 3 tokens"),
        ({"target_tokens": np.ones((3, 65), int)}, "cross_entropy", "call.targets", "65 targets"),
        ({"target_tokens": np.array([1, 37, 2])}, "cross_entropy", "call.targets", "holds 37"),
        ({"target_tokens": np.array([1.0, 2, 3])}, "cross_entropy", "call.targets", "not whole numbers"),
        ({"weights": np.array([1, np.nan, 1])}, "cross_entropy", "call.inputs", "not finite at position 1"),
        ({"weights": np.ones(2)}, "cross_entropy", "call.inputs", "shape [2]"),
        ({"target_tokens": np.ones((3, 2), int), "weights": np.ones(3)}, "cross_entropy", "call.inputs", "[3, 2]"),
        ({"logprobs": np.zeros(3), "advantages": np.ones(3), "weights": -np.ones(3)}, "dro", "call.inputs", "below 0"),
        (
            {"logprobs": np.zeros(3), "advantages": np.ones(3), "sequence_ratio_mask": np.zeros(3)},
            "gspo",
            "call.inputs",
            "marks no token",
        ),
        (
            {"logprobs": np.zeros(3), "advantages": np.ones(3), "clip_low_threshold": np.full(3, 1.5)},
            "ppo",
            "call.inputs",
            "clip_low_threshold ≤",
        ),
    ],
)
def test_bad_inputs_are_refused(change, loss, code, says):
    inputs = {"target_tokens": np.array([1, 2, 3])} | change
    inputs = {name: value for name, value in inputs.items() if value is not None}
    with pytest.raises(CallError) as problem:
        read_row(inputs, loss, read_config(loss, {}), num_tokens=3, vocab_size=V, where="datum 4")
    assert problem.value.code == code
    assert says in str(problem.value)


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("cross_entropy", {"beta": 0.1}),
        ("dro", {"clip_low_threshold": 0.1}),
        ("ppo", {"clip_low_threshold": "low"}),
        ("ppo", {"clip_high_threshold": float("inf")}),
        ("cispo", {"clip_high_threshold": True}),
    ],
)
def test_bad_settings_are_refused(loss, config):
    with pytest.raises(CallError, match=next(iter(config))) as problem:
        read_config(loss, config)
    assert problem.value.code == "call.loss-config"


def test_thresholds_of_call_and_row_must_agree():
    inputs = {name: np.ones(3) for name in ("logprobs", "advantages")} | {"target_tokens": np.array([1, 2, 3])}
    read = partial(read_row, num_tokens=3, vocab_size=V)
    same = read(inputs | {"clip_low_threshold": np.full(3, 0.7)}, "ppo", {"clip_low_threshold": 0.7})
    np.testing.assert_array_equal(same.low, np.float32(0.7))
    with pytest.raises(CallError, match="differs"):
        read(inputs | {"clip_low_threshold": np.full(3, 0.8)}, "ppo", {"clip_low_threshold": 0.7})
