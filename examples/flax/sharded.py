"""Two adapters of one NNX model, trained on a mesh of two data and two tensor devices.

    JAX_NUM_CPU_DEVICES=4 python examples/flax/sharded.py    # or on four GPUs

Expected output:

    gate kernel (64, 256), on one device (64, 128)
    step  0: loss 2.51
    step 20: loss 1.62
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from lorafusion_jax.modules import AdapterSpec, apply_lora, use_adapters

ADAPTERS = [AdapterSpec(name="law", rank=4, alpha=8), AdapterSpec(name="med", rank=2, alpha=4)]
SPECS = {("gate", "kernel"): P(None, "tensor"), ("down", "kernel"): P("tensor", None)}  # what is not named is whole


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.gate, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.gate(x)))


def main() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])
    x = jax.random.normal(jax.random.key(0), (8, 16, 64))  # [examples, positions, features]
    model = apply_lora(Block(64, nnx.Rngs(0)), ADAPTERS, targets="all-linear")
    (graph, lora, frozen), optimizer = nnx.split(model, nnx.LoRAParam, ...), optax.adam(1e-2)

    @jax.jit
    def step(lora, state, frozen, x, table):
        def loss(lora):
            with use_adapters(ADAPTERS, table):
                return ((nnx.merge(graph, lora, frozen)(x) - jnp.roll(x, 1, axis=2)) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(lora)
        updates, state = optimizer.update(gradients, state)
        return value, optax.apply_updates(lora, updates), state

    with jax.set_mesh(mesh):
        frozen = nnx.map_state(lambda path, leaf: jax.device_put(leaf, SPECS.get(path, P())), frozen)
        x, table = jax.device_put((x, jnp.array([0, 1] * 4)), P("data"))
        kernel = frozen["gate"]["kernel"][...]
        print(f"gate kernel {kernel.shape}, on one device {kernel.addressable_shards[0].data.shape}")
        state = optimizer.init(lora := jax.device_put(lora, P()))
        for number in range(21):
            value, lora, state = step(lora, state, frozen, x, table)
            if number % 20 == 0:
                print(f"step {number:2}: loss {value:.2f}")


main()
