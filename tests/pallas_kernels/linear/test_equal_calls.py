"""Equal layers of one program share what they compute: it is traced and lowered once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import multi_lora_linear


def lowered(layers: int) -> tuple[int, int]:
    """How many functions for forward and for backward the gradient of equal layers has."""

    def loss(banks, x, w):
        for a, b in banks:
            x = multi_lora_linear(x, w, a, b, tile_adapter=jnp.array([0, 1]), scale=[1.0, 2.0])
        return x.sum()

    banks = [(jnp.ones((2, 16, 4)), jnp.ones((2, 4, 16)))] * layers
    text = jax.jit(jax.grad(loss)).lower(banks, jnp.ones((8, 16)), jnp.ones((16, 16))).as_text()
    return text.count("func.func private @_compute"), text.count("func.func private @_differentiate")


def test_more_equal_layers_are_no_more_to_lower():
    few = lowered(3)  # the first and the last layer may leave out what nobody reads
    assert max(few) <= 2
    assert lowered(6) == few
