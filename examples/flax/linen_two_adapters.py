"""Two adapters of different rank on a Linen model as it is, base parameters untouched.

Expected output:

    layers with adapters: attn, down, up
    loss falls
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from lorafusion_jax.modules import AdapterSpec, LinenLoRA, active_adapters, per_adapter


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attn")(x)
        x = x + nn.Dense(16, name="down")(nn.relu(nn.Dense(32, name="up")(x)))
        return nn.Dense(1, name="head")(x)


model, x = Model(), jax.random.normal(jax.random.key(0), (4, 6, 16))
y = jnp.sin(x.sum(-1, keepdims=True))
params = model.init(jax.random.key(1), x)["params"]  # or a checkpoint of the base
specs = [AdapterSpec(name="law", rank=8, alpha=16, dropout=0.1), AdapterSpec(name="med", rank=4, alpha=4)]
lora = LinenLoRA(specs, targets="all-linear")
adapters = lora.init(model, {"params": params}, x)  # the collection "LoRAParam": save it as any tree
print("layers with adapters:", ", ".join(sorted(adapters)))
optimizer = per_adapter({spec.name: optax.adam(1e-2) for spec in specs})


@jax.jit
def train_step(adapters, state, table, step):
    def loss(adapters):
        with lora.use(table, step=step) as context:
            return context.mean((model.apply({"params": params, "LoRAParam": adapters}, x) - y) ** 2).sum()

    value, grads = jax.value_and_grad(loss)(adapters)
    updates, state = optimizer.update(grads, state, adapters, active=active_adapters(table, len(specs)))
    return optax.apply_updates(adapters, updates), state, value


state, losses, table = optimizer.init(adapters), [], jnp.array([0, 1, 1, 0])
for step in range(30):
    adapters, state, loss = train_step(adapters, state, table, jnp.uint32(step))
    losses.append(float(loss))
print("loss falls" if losses[-1] < losses[0] else f"loss does not fall: {losses}")
