"""The chunked loss against its definition in float64 numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorafusion_jax.objective.loss import chunk_rows, sum_by, token_losses

A = 3


def problem(T=300, D=16, V=37, seed=0):
    rng = np.random.default_rng(seed)
    row_adapter = np.repeat([0, 1, -1, 2], [100, 80, 20, 100])[:T].astype(np.int32)
    weights = np.where(rng.random(T) < 0.6, rng.random(T), 0).astype(np.float32)
    return (
        rng.normal(size=(T, D)).astype(np.float32),
        rng.normal(size=(D, V)).astype(np.float32),
        rng.integers(0, V, T).astype(np.int32),
        weights,
        row_adapter,
    )


def meaning(hidden, head, targets, weights, row_adapter):
    """float64: losses [A] and d(losses · (1, 2, 3))/d hidden."""
    hidden, head, weights = (x.astype(np.float64) for x in (hidden, head, weights))
    weights = np.where(row_adapter >= 0, weights, 0)
    logits = hidden @ head
    log_p = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    rows = np.arange(len(targets))
    losses = np.array([(-log_p[rows, targets] * weights)[row_adapter == k].sum() for k in range(A)])
    factor = weights * (np.maximum(row_adapter, 0) + 1)
    return losses, ((np.exp(log_p) - np.eye(head.shape[1])[targets]) * factor[:, None]) @ head.T


def adapter_losses(hidden, head, targets, weights, row_adapter, num_adapters, **options):
    weights = jnp.where(row_adapter >= 0, weights, 0.0)
    return sum_by(token_losses(hidden, head, targets, weights, **options), row_adapter, num_adapters)


losses_of_all = jax.jit(partial(adapter_losses, num_adapters=A))


def total(hidden, *rest, chunk=16384):
    losses = adapter_losses(hidden, *rest, A, chunk=chunk)
    return (losses * jnp.arange(1, A + 1)).sum(), losses


value_and_grad = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnames="chunk")


@jax.jit
@jax.grad
def scaled_grad(hidden, scale, *rest):
    return scale * total(hidden, *rest)[0]


@pytest.mark.parametrize("T", [300, 256, 7], ids=["partial last chunk", "whole chunks", "less than a chunk"])
def test_losses_and_gradient_match_the_definition(T):
    inputs = problem(T)
    (_, losses), grad = value_and_grad(*inputs)
    wanted, wanted_grad = meaning(*inputs)
    # float32 sums of at most 100 terms of size 1: 1e-6 relative, ten times that for room.
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_allclose(grad, wanted_grad, atol=1e-5 * np.abs(wanted_grad).max())


def test_loss_without_gradient_is_the_same_number():
    inputs = problem()
    np.testing.assert_array_equal(losses_of_all(*inputs), value_and_grad(*inputs)[0][1])


def test_large_logits_do_not_overflow():
    hidden, head, *rest = problem()
    (_, losses), grad = value_and_grad(hidden * 1e4, head, *rest)
    np.testing.assert_allclose(losses, meaning(hidden * 1e4, head, *rest)[0], rtol=1e-5)
    assert np.isfinite(np.asarray(grad)).all()


def test_bfloat16_products_add_up_in_float32():
    hidden, head, *rest = problem(D=64)
    low = (hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16))
    (_, losses), grad = value_and_grad(*low, *rest)
    wanted, wanted_grad = meaning(*(np.asarray(x, np.float64) for x in low), *rest)
    # Exact inputs, exact products: only the float32 sums round in the loss.
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert grad.dtype == jnp.bfloat16
    # slope and result are rounded to 8 bits each: 2^-8, four times for the sum over the vocabulary.
    np.testing.assert_allclose(np.asarray(grad, np.float32), wanted_grad, atol=2**-6 * np.abs(wanted_grad).max())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_stays_in_its_adapter(bad):
    hidden, head, targets, weights, row_adapter = problem()
    spoiled = hidden.copy()
    spoiled[120:130] = bad
    spoiled[185] = bad
    (_, losses), grad = value_and_grad(spoiled, head, targets, weights, row_adapter)
    (_, clean), clean_grad = value_and_grad(hidden, head, targets, weights, row_adapter)
    losses, clean, grad, clean_grad = map(np.asarray, (losses, clean, grad, clean_grad))
    assert not np.isfinite(losses[1])
    np.testing.assert_array_equal(losses[[0, 2]], clean[[0, 2]])
    others = (row_adapter != 1) | (weights == 0)
    np.testing.assert_array_equal(grad[others], clean_grad[others])
    assert np.isnan(grad[120:130][weights[120:130] > 0]).any()


def test_rows_of_weight_zero_have_zero_gradient():
    inputs = problem()
    grad = value_and_grad(*inputs)[1]
    assert not np.asarray(grad)[(inputs[3] == 0) | (inputs[4] == -1)].any()


def test_no_learned_rows_give_zero_without_compute():
    hidden, head, targets, weights, row_adapter = problem()
    (_, losses), grad = value_and_grad(hidden * np.nan, head, targets, weights * 0, row_adapter)
    assert losses.tolist() == [0.0] * A
    assert not np.asarray(grad).any()


def test_loss_does_not_depend_on_the_position_in_the_microbatch():
    hidden, head, targets, weights, row_adapter = problem()
    mine = row_adapter == 1
    alone = jax.jit(partial(adapter_losses, num_adapters=1))(
        hidden[mine], head, targets[mine], weights[mine], row_adapter[mine] * 0
    )
    together = losses_of_all(hidden, head, targets, weights, row_adapter)
    np.testing.assert_allclose(np.asarray(alone)[0], np.asarray(together)[1], rtol=1e-6)


def test_each_row_has_its_own_loss_and_gradient():
    """Any function of the rows' losses may be differentiated: here the square of each sum of ten rows."""
    hidden, head, targets, weights, _ = problem(T=100)
    weights = (weights > 0).astype(np.float32)

    def squares(hidden):
        return (token_losses(hidden, head, targets, weights).reshape(10, 10).sum(1) ** 2).sum()

    def plainly(hidden):
        log_p = jax.nn.log_softmax(hidden @ head)
        losses = jnp.where(weights != 0, -log_p[jnp.arange(100), targets], 0)
        return (losses.reshape(10, 10).sum(1) ** 2).sum()

    loss, grad = jax.jit(jax.value_and_grad(squares))(hidden)
    with jax.enable_x64(True):
        wanted, wanted_grad = jax.jit(jax.value_and_grad(plainly))(hidden.astype(np.float64))
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    np.testing.assert_allclose(grad, wanted_grad, atol=1e-5 * np.abs(wanted_grad).max())


@pytest.mark.parametrize("tokens", [100, 50_000, 5_000_000], ids=["small", "large", "huge"])
def test_float16_gradients_of_large_batches_do_not_underflow(tokens):
    """Slopes times 1 / tokens would be less than the smallest float16: 16 % off at 50 000, nothing left at 5 million.

    The backward pass gets the gradient of `scale` · loss, so that the result itself is in the range of float16.
    """
    hidden, head, targets, weights, row_adapter = problem(D=64)
    low = ((hidden / 4).astype(np.float16), (head / 4).astype(np.float16))
    weights = np.where(weights > 0, np.float32(1 / tokens), 0)
    grad = scaled_grad(low[0], np.float32(tokens), low[1], targets, weights, row_adapter)
    wanted = tokens * meaning(*(np.asarray(x, np.float64) for x in low), targets, weights, row_adapter)[1]
    error = np.linalg.norm(np.asarray(grad, np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < 2**-10  # two roundings to 11 bits


def test_all_logits_never_exist_at_once():
    T, D, V = 2048, 16, 50_000
    shapes = [
        jax.ShapeDtypeStruct(s, d)
        for s, d in [
            ((T, D), jnp.float32),
            ((D, V), jnp.float32),
            ((T,), jnp.int32),
            ((T,), jnp.float32),
            ((T,), jnp.int32),
        ]
    ]
    memory = value_and_grad.lower(*shapes, chunk=4096).compile().memory_analysis()
    # A few float32 arrays of 128 x V; all logits would be 16 times as much each.
    assert memory.temp_size_in_bytes < 4 * 4 * 128 * V


@pytest.mark.parametrize(
    ("T", "V", "chunk", "rows"),
    [(8192, 128_256, 16384, 1024), (8192, 4096, 16384, 1024), (1024, 4096, 16384, 128), (64, 100, 128, 64)],
)
def test_chunk_rows(T, V, chunk, rows):
    assert chunk_rows(T, V, chunk) == rows


def test_a_checkpoint_s_table_is_not_copied():
    """Transposed outside, as the output projection of a checkpoint is: a copy would be 1 GB for every microbatch."""
    hidden, head, *rest = problem(D=24, V=3001)
    program = jax.jit(jax.value_and_grad(lambda hidden, table: total(hidden, table.T, *rest)[0]))
    text = program.lower(hidden, head.T).compile().as_text()
    assert "[3001,24]" in text
    assert "[24,3001]" not in text
