"""The gated delta rule in chunks is the rule row by row, for packed samples of all lengths."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import A100, H200, lowered, num_kernels
from host_arrays import changed, filled, normal, on_device
from more_cases import nightly

from pallas_kernels.delta_rule import api, delta_rule_step, delta_rule_with_states, gated_delta_rule
from pallas_kernels.delta_rule.chunks import make_chunks, to_chunks, to_rows
from pallas_kernels.delta_rule.reference import delta_rule_by_rows
from pallas_kernels.delta_rule.xla import inverse_of_unit_lower

# Of the largest value: sums of up to 130 rows in another order, float32. Seen: 3e-7 and 2e-6.
FORWARD, BACKWARD = 3e-6, 2e-5
T = 200
LENGTHS = (65, 1, 130, 3)  # longer than a chunk, one row, two chunks and a bit; one row of padding


def segments(lengths, total=T):
    runs = [*lengths, total - sum(lengths)] if sum(lengths) < total else list(lengths)
    starts = np.cumsum([0, *runs[:-1]])
    unused = [-1] * (8 - len(runs))
    return {
        "ids": on_device(np.repeat(np.arange(len(runs)), runs), np.int32),
        "offsets": on_device([*starts, *unused, -1], np.int32),
        "lengths": on_device([*runs, *unused], np.int32),
    }


def rows(seed=0, total=T, key_heads=2, heads=6, key=6, value=10, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((total, key_heads, key)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((total, heads, value))
    decay = -np.exp(rng.uniform(-6, 2, (total, heads)))
    beta = rng.uniform(0, 1, (total, heads))
    return tuple(on_device(x, dtype) for x in (q, k, v)) + tuple(on_device(x, np.float32) for x in (decay, beta))


WIDE = {"heads": 4, "key": 16, "value": 64}  # which the kernels serve, in two blocks of columns
BOTH = pytest.mark.parametrize(("implementation", "shape"), [("xla", {}), ("pallas_triton", WIDE)])


@partial(jax.jit, static_argnames="implementation")
def computed(given, weight, where, implementation="xla"):
    """The values and the gradients of all arguments: one program for all tests of a shape."""
    value, pullback = jax.vjp(partial(gated_delta_rule, **where, implementation=implementation), *given)
    return value, *pullback(weight)


def differ(actual, wanted):
    actual, wanted = np.asarray(actual), np.asarray(wanted)
    return float(np.abs(actual - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize(
    ("shape", "implementation"),
    [({}, "xla"), nightly({"key_heads": 1, "heads": 1, "key": 3, "value": 2}, "xla"), (WIDE, "pallas_triton")],
)
def test_chunks_compute_the_rule_and_its_gradient(shape, implementation):
    given, where = rows(**shape), segments(LENGTHS)
    weight = normal(1, given[2].shape)

    @jax.jit
    def by_rows(given):
        value, pullback = jax.vjp(partial(delta_rule_by_rows, ids_T=where["ids"]), *given)
        return value, *pullback(weight)

    (wanted, *slopes), (actual, *ours) = by_rows(given), computed(given, weight, where, implementation)
    assert differ(actual, wanted) < FORWARD
    assert max(map(differ, ours, slopes)) < BACKWARD


@BOTH
def test_a_packed_sample_is_bitwise_the_sample_alone(implementation, shape):
    given = rows(**shape)
    packed, start = np.asarray(computed(given, given[2], segments(LENGTHS), implementation)[0]), 0
    host = jax.device_get(given)
    for length in LENGTHS:
        alone = tuple(on_device(np.concatenate([x[start : start + length], x[: T - length]])) for x in host)
        np.testing.assert_array_equal(
            packed[start : start + length],
            np.asarray(computed(alone, given[2], segments((length,)), implementation)[0])[:length],
            err_msg=str(length),
        )
        start += length


@BOTH
def test_nan_stays_in_its_own_sample(implementation, shape):
    given, where = rows(**shape), segments(LENGTHS)
    broken = tuple(changed(x, slice(70, 80), np.nan) for x in given)  # of the third sample
    weight = filled(1.0, *given[2].shape)
    both = (jax.device_get(computed(x, weight, where, implementation)) for x in (given, broken))
    for clean, dirty in zip(*both, strict=True):
        np.testing.assert_array_equal(clean[:66], dirty[:66])
        np.testing.assert_array_equal(clean[196:], dirty[196:])
        assert not np.isfinite(dirty[66:196]).all()


def test_equal_keys_do_not_cancel():
    """L has ones everywhere: its powers reach 1e18, and the memory simply holds the last value."""
    total = 64
    one = filled(0.5, total, 1, 4)
    v = on_device(np.arange(1.0, total + 1)[:, None, None], np.float32)
    kept, all_of_it = filled(0.0, total, 1), filled(1.0, total, 1)
    rule = jax.jit(gated_delta_rule)  # op by op it would be a hundred programs
    np.testing.assert_allclose(rule(one, one, v, kept, all_of_it, **segments((), total)), v, rtol=1e-5)


@pytest.mark.parametrize("device", [A100, H200])
def test_the_kernels_lower_for_gpus(device):
    """Forward, forward again in backward, and backward; of Qwen3.5-9B's heads."""
    given = rows(total=1024, key_heads=16, heads=32, key=128, value=128, dtype=jnp.bfloat16)
    where = segments((400, 600), 1024)

    def both(given):
        value, pullback = jax.vjp(partial(gated_delta_rule, **where, implementation="pallas_triton"), *given)
        return value, *pullback(value)

    assert num_kernels(lowered(device, both, given)) == (3, 0)


def test_widths_that_the_kernels_do_not_serve_are_named():
    with pytest.raises(NotImplementedError, match="powers of two from 16 on, not 64, 6, 10"):
        gated_delta_rule(*rows(), **segments(LENGTHS), implementation="pallas_triton")


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_the_inverse_of_a_unit_lower_matrix(size):
    lower = np.tril(np.random.default_rng(size).uniform(-0.4, 0.4, (3, size, size)), -1).astype(np.float32)
    whole = np.eye(size) + lower.astype(np.float64)
    inverse = jax.jit(inverse_of_unit_lower)(lower)
    np.testing.assert_allclose(whole @ inverse, np.broadcast_to(np.eye(size), whole.shape), atol=1e-4)
    slope = jax.jit(jax.grad(lambda x: (inverse_of_unit_lower(x) ** 2).sum()))(lower)
    wanted = np.linalg.inv(whole)
    wanted = -np.tril(wanted.swapaxes(1, 2) @ (2 * wanted) @ wanted.swapaxes(1, 2), -1)
    np.testing.assert_allclose(slope, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())


def test_rows_come_back_from_chunks():
    where = segments(LENGTHS)
    x = np.arange(1.0, T + 1, dtype=np.float32)

    @jax.jit
    def there_and_back(x, numbers, ids, offsets, lengths):
        chunks = make_chunks(ids, offsets, lengths)
        back = jax.vjp(lambda x: to_chunks(x, chunks), x)[1](to_chunks(x, chunks))[0]
        return to_rows(to_chunks(x, chunks), chunks), back, to_chunks(numbers, chunks)

    *again, held = jax.device_get(there_and_back(x, np.asarray(where["ids"]) + 1, **where))
    for rows_ in again:
        np.testing.assert_array_equal(rows_, x)
    assert all(len(set(row[row > 0])) <= 1 for row in held)  # no chunk has two samples


@pytest.mark.parametrize(
    ("hopper", "dtype", "width", "wanted"),
    [
        (True, jnp.bfloat16, 128, "pallas_triton"),
        (True, jnp.float32, 128, "xla"),
        (True, jnp.bfloat16, 256, "xla"),  # not measured
        (True, jnp.bfloat16, 96, "xla"),  # not served
        (False, jnp.bfloat16, 128, "xla"),
    ],
)
def test_kernels_are_the_default_where_they_were_measured(hopper, dtype, width, wanted, monkeypatch):
    monkeypatch.setattr(api, "is_hopper", lambda: hopper)
    rows = jnp.zeros((64, 1, width), dtype)
    assert api._preferred(rows, rows) == wanted


@BOTH
def test_segments_go_on_from_their_states(implementation, shape):
    """All but the last row of each segment in chunks, and the last one from the memories after them."""
    lengths, total = (5, 70, 2, 64), 141
    given, where = rows(3, total, **shape), segments(lengths, total)
    ends = np.cumsum(lengths) - 1
    shorter = [np.delete(np.asarray(x), ends, 0) for x in given]
    before = segments([length - 1 for length in lengths], total - len(lengths))

    @jax.jit
    def run(given, shorter):
        o, memory = delta_rule_with_states(*shorter, **before, implementation=implementation)
        step, after = delta_rule_step(memory[: len(lengths)], *(x[ends] for x in given))
        _, wanted = delta_rule_with_states(*given, **where, implementation=implementation)
        return o, step, after, wanted[: len(lengths)]

    o, step, after, wanted = run(given, shorter)
    plain = np.asarray(delta_rule_by_rows(*given, where["ids"]))
    assert differ(o, np.delete(plain, ends, 0)) < FORWARD
    assert differ(step, plain[ends]) < FORWARD
    assert differ(after, wanted) < FORWARD
