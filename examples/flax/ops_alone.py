"""The ops without modules: two adapters over one frozen weight, under jit, grad and vmap.

Expected output:

    y (4, 32, 16), gradient of A (2, 64, 8)
    adapter 1 got no gradient from rows of adapter 0
    vmap over examples: equal
"""

import jax
import jax.numpy as jnp

import pallas_kernels as pk

keys = jax.random.split(jax.random.key(0), 4)
x = jax.random.normal(keys[0], (4, 32, 64))  # [examples, positions, in features]
w = jax.random.normal(keys[1], (64, 16)) / 8  # frozen
a = jax.random.normal(keys[2], (2, 64, 8)) / 8
b = jax.random.normal(keys[3], (2, 8, 16))


@jax.jit
def layer(x, a, b, table):
    """y = x W + scale (x A) B, with A, B and scale of the adapter of each example"""
    return pk.multi_lora_linear(x, w, a, b, tile_adapter=table, scale=jnp.array([2.0, 0.5]))


table = jnp.array([0, 1, 1, 0])
gradient = jax.jit(jax.grad(lambda a, table: layer(x, a, b, table).sum()))
print(f"y {layer(x, a, b, table).shape}, gradient of A {gradient(a, table).shape}")
if not gradient(a, jnp.zeros(4, jnp.int32))[1].any():
    print("adapter 1 got no gradient from rows of adapter 0")
mapped = jax.vmap(lambda x, adapter: layer(x, a, b, adapter[None]))(x, table)
print("vmap over examples:", "equal" if jnp.allclose(mapped, layer(x, a, b, table), atol=1e-5) else "different")
