"""Public ops match the formula's values and gradients with and without jit."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import lora_linear, multi_lora_linear

T, K, N, R, TILE = 96, 24, 40, 4, 16
TILE_ADAPTER = np.array([1, 1, 0, -1, 2, 0], np.int32)  # of tiles; -1 is padding
SCALE = np.array([2.0, 0.5, 1.0], np.float32)
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}  # sums in another order


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def formula(x, w, a, b):
    """y and the gradients of sum(y²) / 2 by x, a and b, in float64, adapter by adapter."""
    x, w, a, b = (array.astype(np.float64) for array in (x, w, a, b))
    adapter = np.repeat(TILE_ADAPTER, TILE)
    y = x @ w
    for k, scale in enumerate(SCALE):
        y[adapter == k] += scale * x[adapter == k] @ a[k] @ b[k]
    da, db = np.zeros_like(a), np.zeros_like(b)
    dx = y @ w.T
    for k, scale in enumerate(SCALE):
        members = adapter == k
        dx[members] += scale * y[members] @ b[k].T @ a[k].T
        da[k], db[k] = scale * x[members].T @ y[members] @ b[k].T, scale * (x[members] @ a[k]).T @ y[members]
    return y, (dx, da, db)


def one_adapter(x, *, weights):
    return lora_linear(x, *weights, scale=0.5, implementation="xla")


class JitVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_several_adapters(self):
        x, w, a, b = draw(T, K), draw(K, N), draw(3, K, R), draw(3, R, N)

        frozen, table = jnp.asarray(w), jnp.asarray(TILE_ADAPTER)

        def loss(x, a, b):
            y = multi_lora_linear(x, frozen, a, b, tile_adapter=table, scale=SCALE, implementation="xla")
            return jnp.sum(y**2) / 2, y

        (_, y), gradients = self.variant(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(
            *map(jnp.asarray, (x, a, b))
        )
        wanted, wanted_gradients = formula(x, w, a, b)
        chex.assert_shape(y, (T, N))
        chex.assert_equal_shape([y, wanted])
        for name, got, want in zip(["y", "x", "a", "b"], (y, *gradients), (wanted, *wanted_gradients), strict=True):
            largest = np.abs(want).max()
            np.testing.assert_allclose(got / largest, want / largest, **FLOAT32, err_msg=name)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(((T, K),), ((2, 3, K),), ((K,),))
    def test_one_adapter_takes_any_leading_shape(self, shape):
        x, w, a, b = draw(*shape), draw(K, N), draw(K, R), draw(R, N)
        weights = map(jnp.asarray, (w, a, b))
        y = self.variant(partial(one_adapter, weights=tuple(weights)))(jnp.asarray(x))
        chex.assert_shape(y, (*shape[:-1], N))
        chex.assert_tree_all_finite(y)
        want = x.astype(np.float64) @ (w + 0.5 * a.astype(np.float64) @ b)
        np.testing.assert_allclose(y / np.abs(want).max(), want / np.abs(want).max(), **FLOAT32)
