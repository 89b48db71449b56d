"""Selection of a backend, and backends from outside the package."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_problems import draw, ours

import pallas_kernels as pk
from pallas_kernels import backend
from pallas_kernels.linear import xla


class Toy:
    """XLA's backend with y doubled; it serves one projection at most."""

    def __init__(self):
        self.asked = 0

    def unsupported_reason(self, static, ops):
        self.asked += 1
        return "it takes one projection" if len(ops.ws) > 1 else None

    def forward(self, static, ops):
        ys, ss, bits = xla.forward(static, ops)
        return tuple(2 * y for y in ys), ss, bits

    def backward(self, static, ops, ss, bits, dys):
        return xla.backward(static, ops, ss, bits, tuple(2 * dy for dy in dys))


@pytest.fixture
def toy():
    made = Toy()
    backend.register("toy", made)
    yield made
    backend.unregister("toy")


def gradients(implementation, arguments, dys):
    ys, vjp = jax.vjp(
        lambda x, as_, bs: ours(implementation)(arguments, x, as_, bs),
        arguments["x"], arguments["as_"], arguments["bs"],
    )  # fmt: skip
    return ys, *vjp(tuple(dys))


def test_a_backend_from_outside_is_taken_by_its_name_and_differentiated(toy):
    arguments, dys = draw(table=[0, 1, -1, 2], rates=[0.1, 0.0, 0.5])
    got, want = gradients("toy", arguments, dys), gradients("xla", arguments, dys)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(mine, 2 * theirs)
    assert toy.asked == 1  # a call is decided once


def test_its_unsupported_reason_reaches_the_caller(toy):
    arguments, _ = draw(table=[0, 1], widths=(64, 64), ranks=(8, 8))
    with pytest.raises(
        NotImplementedError, match="implementation='toy' cannot serve this call: it takes one projection"
    ):
        ours("toy")(arguments, arguments["x"], arguments["as_"], arguments["bs"])


def test_names_are_taken_once_and_unknown_ones_list_all(toy):
    with pytest.raises(ValueError, match="'toy' exists already"):
        backend.register("toy", Toy())
    with pytest.raises(ValueError, match="'xla' exists already"):
        backend.register("xla", Toy())
    with pytest.raises(ValueError, match="choose one of pallas_mosaic_gpu, pallas_triton, toy, xla or None"):
        pk.lora_linear(
            jnp.ones((4, 8)), jnp.ones((8, 4)), jnp.ones((8, 2)), jnp.ones((2, 4)), scale=1.0, implementation="other"
        )


def test_incomplete_backends_are_errors():
    with pytest.raises(TypeError, match="needs unsupported_reason, forward and backward"):
        backend.register("wrong", object())
    assert "wrong" not in backend.names()


@pytest.mark.parametrize("name", ["xla", "pallas_triton", "pallas_mosaic_gpu"])
def test_the_backends_of_this_package_are_backends(name):
    assert isinstance(backend.load(name), backend.Backend)
