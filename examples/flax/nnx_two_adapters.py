"""Two adapters on an NNX model of one's own: attention included, dropout, an optimizer each, save, reload, merge.

Expected output:

    attn.query, attn.key, attn.value, attn.out, up, down
    law: loss falls
    med: loss falls
    merged equals unmerged
"""

import tempfile

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lorafusion_jax import modules as lf


class Model(nnx.Module):
    def __init__(self, rngs):
        self.attn = nnx.MultiHeadAttention(num_heads=2, in_features=16, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(x)
        return self.head(x + self.down(nnx.relu(self.up(x))))


specs = [lf.AdapterSpec(name="law", rank=4, alpha=8, dropout=0.1), lf.AdapterSpec(name="med", rank=8, alpha=8)]
model = lf.apply_lora(Model(nnx.Rngs(0)), specs, targets=("attn.*", "up", "down"))
print(*(row.path for row in lf.lora_report(model).adapted), sep=", ")  # print(report) is a table
optimizers = lf.per_adapter({"law": optax.adamw(1e-2), "med": optax.lion(3e-3)})
optimizer = nnx.Optimizer(model, optimizers, wrt=nnx.LoRAParam)


@nnx.jit
def train_step(model, optimizer, x, y, table, step):
    def loss(model):
        with lf.use_adapters(specs, table, step=step) as context:
            return context.mean((model(x) - y) ** 2).sum()

    value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    optimizer.update(model, grads, active=lf.active_adapters(table, len(specs)))
    return value


x = jax.random.normal(jax.random.key(1), (4, 6, 16))
y = jnp.sin(x.sum(-1, keepdims=True))
for number, name in enumerate(("law", "med")):  # steps of one adapter do not move the other
    losses = [float(train_step(model, optimizer, x, y, jnp.full(4, number), jnp.uint32(i))) for i in range(30)]
    print(f"{name}: loss falls" if losses[-1] < losses[0] else f"{name}: loss does not fall: {losses}")
with tempfile.TemporaryDirectory() as folder:
    lf.load_adapter(model, "law", lf.save_adapter(model, "law", folder).parent)
with lf.use_adapters(specs, only="law", train=False):
    unmerged = model(x)
merged = lf.merge_adapter(model, "law")(x)
print("merged equals unmerged" if jnp.allclose(merged, unmerged, atol=1e-4) else "merged differs")
