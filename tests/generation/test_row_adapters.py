"""Products of rows that have adapters in any order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lorafusion_jax.generation import row_adapters
from pallas_kernels import multi_lora_linears
from pallas_kernels.linear.triton.down_all import down_all
from pallas_kernels.quantised.fp8 import quantise
from tests.cuda_lowering import H200, chosen_kernels

SLOTS = np.array([2, -1, 0, 2, 1, 0, -1, 2], np.int32)


def drawn(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


def test_each_row_meets_its_own_adapter_only():
    x, ws, scale = drawn(8, 12), [drawn(12, 10), drawn(12, 6)], np.array([0.5, 2.0, -1.0], np.float32)
    a, b, bias = drawn(3, 12, 4), drawn(3, 4, 10), drawn(10)

    def run(slots):
        options = {"tile_adapter": slots, "scale": scale, "implementation": row_adapters.NAME}
        return multi_lora_linears(x, ws, [a, None], [b, None], biases=[bias, None], **options)

    first, second = jax.jit(run)(SLOTS)
    for row, slot in enumerate(SLOTS):
        wanted = x[row] @ ws[0] + bias + (scale[slot] * (x[row] @ a[slot]) @ b[slot] if slot >= 0 else 0)
        np.testing.assert_allclose(first[row], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(second, x @ ws[1], rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="an adapter for every row"):
        run(SLOTS[:4])


def test_a_gpu_rounds_the_sum_of_both_products_once_as_in_training(monkeypatch):
    monkeypatch.setattr(row_adapters, "target_platform", lambda: "cuda")
    x, w, a, b = (drawn(*shape, dtype=jnp.bfloat16) for shape in ((8, 12), (12, 10), (3, 12, 4), (3, 4, 10)))
    options = {"tile_adapter": np.zeros(8, np.int32), "scale": np.ones(3, np.float32)}
    (y,) = multi_lora_linears(x, [w], [a], [b], implementation=row_adapters.NAME, **options)
    factors = ((x, w), (x @ a[0], b[0]))
    full, low = (left.astype(jnp.float32) @ right.astype(jnp.float32) for left, right in factors)
    np.testing.assert_array_equal(y, (full + low).astype(jnp.bfloat16))
    assert (y != full.astype(jnp.bfloat16) + low.astype(jnp.bfloat16)).any()


def test_one_launch_multiplies_by_the_a_of_siblings():
    x, banks = drawn(128, 512, dtype=jnp.bfloat16), [drawn(512, width, dtype=jnp.bfloat16) for width in (64, 128)]
    for parts, a in zip(jax.jit(down_all)(x, banks), banks, strict=True):
        assert parts.shape[0] > 1
        np.testing.assert_allclose(parts.sum(0), x.astype(jnp.float32) @ a.astype(jnp.float32), rtol=1e-3, atol=1e-3)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert "triton" in jax.jit(down_all).trace(x, banks).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("rows", "kernels"), [(64, 3), (128, 1)])
def test_products_of_8bit_weights_join_where_that_was_measured(rows, kernels):
    x, w, a, b = (drawn(*shape, dtype=jnp.bfloat16) for shape in ((rows, 256), (256, 64), (4, 256, 16), (4, 16, 64)))
    options = {"tile_adapter": np.zeros(rows, np.int32), "scale": np.ones(4, np.float32)}
    options["implementation"] = row_adapters.NAME
    run = lambda x, a, b: multi_lora_linears(x, [quantise(w)], [a], [b], **options)  # noqa: E731
    assert chosen_kernels(H200, run, x, a, b) == (kernels, 0)
