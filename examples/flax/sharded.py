"""Two adapters of one NNX model, trained on a mesh of two data and two tensor devices.

    JAX_NUM_CPU_DEVICES=4 python examples/flax/sharded.py    # or on four GPUs

Expected output:

    gate kernel (64, 256), on one device (64, 128)
    step  0: loss 5.12
    step 20: loss 3.31
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from lorafusion_jax.modules import AdapterSpec, active_adapters, apply_lora, per_adapter, use_adapters

ADAPTERS = [AdapterSpec(name="law", rank=4, alpha=8), AdapterSpec(name="med", rank=2, alpha=4)]


class Block(nnx.Module):  # knows nothing of LoRA, and runs on its mesh without it
    def __init__(self, width: int, rngs: nnx.Rngs):
        columns, rows = {"out_sharding": P(None, "tensor")}, {"out_sharding": P("tensor", None)}
        self.gate = nnx.Linear(width, 4 * width, use_bias=False, kernel_metadata=columns, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, kernel_metadata=rows, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.gate(x)), out_sharding=P("data"))  # sums over the devices of "tensor"


def main() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])

    @nnx.jit
    def step(model, optimizer, x, table):
        def loss(model):
            with use_adapters(ADAPTERS, table) as context:
                return context.mean((model(x) - jnp.roll(x, 1, axis=2)) ** 2).sum()

        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads, active=active_adapters(table, len(ADAPTERS)))
        return value

    with jax.set_mesh(mesh):
        x, table = jax.random.normal(jax.random.key(0), (8, 16, 64)), jnp.array([0, 1] * 4)
        x, table = jax.device_put((x, table), P("data"))
        model = apply_lora(Block(64, nnx.Rngs(0)), ADAPTERS, targets="all-linear")
        kernel = model.gate.kernel[...]
        print(f"gate kernel {kernel.shape}, on one device {kernel.addressable_shards[0].data.shape}")
        rules = per_adapter({"law": optax.adam(1e-2), "med": optax.adam(1e-2)})
        optimizer = nnx.Optimizer(model, rules, wrt=nnx.LoRAParam)
        for number in range(21):
            loss = step(model, optimizer, x, table)
            print(f"step {number:2}: loss {loss:.2f}") if number % 20 == 0 else None


main()
