"""A call on 8-bit weights whose adapters all have large ranks: extra passes for all ranks, against XLA's form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dropout import Dropout
from pallas_kernels.linear import xla
from pallas_kernels.policy import first_ranks
from pallas_kernels.problem import Operands, Static, linear_shape
from pallas_kernels.quantised import fp8, hopper

RANKS, TILE, TILES, K, N = (70, 130), 64, 5, 256, 128


@pytest.fixture(scope="module")
def call():
    random = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * random.normal(size=shape), jnp.float32)

    used = np.arange(max(RANKS)) < np.array(RANKS)[:, None]
    rows = TILE * TILES
    ops = Operands(
        x=normal(rows, K), ws=(fp8.quantise(normal(K, N, scale=K**-0.5)),), biases=(normal(N),),
        as_=(normal(2, K, max(RANKS), scale=K**-0.5) * used[:, None],),
        bs=(normal(2, max(RANKS), N) * used[:, :, None],),
        tile_adapter=jnp.array([1, 0, -1, 1, 0], jnp.int32), scale=jnp.array([0.5, 2.0]),
        dropout=Dropout(
            rate=jnp.array([0.1, 0.3]), key=jnp.arange(2, dtype=jnp.uint32), row_key=jnp.arange(rows, dtype=jnp.uint32)
        ),
        ranks=jnp.asarray(RANKS, jnp.int32),
    )  # fmt: skip
    static = Static(tile=TILE, num_adapters=2, single=False, ranks=RANKS, interpret=True)
    assert first_ranks(linear_shape(static, ops)) == (0,)
    return static, ops, normal(rows, N)


def both_passes(backend, static, ops, dy):
    def run(ops, dy):
        (y,), ss, bits = backend.forward(static, ops)
        return y, backend.backward(static, ops, ss, bits, (dy,))

    return jax.jit(run)(ops, dy)


def test_values_and_gradients_are_those_of_xlas_form(call):
    got, want = both_passes(hopper, *call), both_passes(xla, *call)
    for path, error in jax.tree_util.tree_leaves_with_path(jax.tree.map(relative, got, want)):
        assert error < 1e-5, (jax.tree_util.keystr(path), error)


def relative(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
