"""A loop on a small vision transformer of one's own: two tasks in one batch, evaluation, a merged model.

Expected output:

    stripes: loss falls
    bright: loss falls
    merged as trained
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import lorafusion_jax as lf


class ViT(nnx.Module):  # images of 8 × 8 in patches of 4 × 4, one block
    def __init__(self, rngs):
        self.patches, self.place = nnx.Linear(16, 16, rngs=rngs), nnx.Embed(4, 16, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(num_heads=2, in_features=16, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.norms, self.head = nnx.List(nnx.LayerNorm(16, rngs=rngs) for _ in range(3)), nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, images):
        patches = images.reshape(-1, 2, 4, 2, 4).transpose(0, 1, 3, 2, 4).reshape(-1, 4, 16)
        x = self.patches(patches) + self.place(jnp.arange(4))
        x = x + self.attn(self.norms[0](x))
        x = x + self.down(nnx.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x).mean(1))


def loss(model, rows):  # of each image
    return optax.softmax_cross_entropy_with_integer_labels(model(rows["image"]), rows["label"])


specs = [lf.AdapterSpec(name="stripes", rank=4, alpha=8), lf.AdapterSpec(name="bright", rank=2, alpha=4)]
model = lf.apply_lora(ViT(nnx.Rngs(0)), specs, targets=("up", "down"))
session = lf.Session(model, {"stripes": optax.adamw(2e-2), "bright": optax.sgd(0.3)}, capacity=8)
images = np.random.default_rng(0).normal(size=(8, 8, 8)).astype(np.float32)
labels = {"stripes": np.arange(8) % 2, "bright": np.arange(8) // 4}
images[1::2, ::2] += 2  # stripes
rows = {
    name: [
        {"image": image + (name == "bright") * label, "label": label}
        for image, label in zip(images, of_task, strict=True)
    ]
    for name, of_task in labels.items()
}
before = session.forward(rows, loss)
for _ in range(10):
    session.forward_backward(rows, loss)
    session.optim_step()
after = session.forward(rows, loss)
print(*(f"{name}: loss {'falls' if after[name] < before[name] else 'rises'}" for name in rows), sep="\n")
with lf.use_adapters(specs, only="stripes", train=False):
    trained = model(images)
print(
    "merged as trained" if jnp.allclose(lf.merge_adapter(model, "stripes")(images), trained, atol=1e-4) else "differs"
)
