"""A loop on a small Qwen3 of one's own: two adapters in one batch, accumulation, save and resume.

Expected output:

    law: loss falls, med: loss falls
    resumed bit for bit
"""

import tempfile

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import lorafusion_jax as lf


class Qwen3(nnx.Module):  # one layer; two heads of 8 channels, which share a key head
    def __init__(self, rngs):
        for name, k, n in [("q_proj", 16, 16), ("k_proj", 16, 8), ("v_proj", 16, 8), ("o_proj", 16, 16),
                           ("gate_proj", 16, 24), ("up_proj", 16, 24), ("down_proj", 24, 16)]:  # fmt: skip
            setattr(self, name, nnx.Linear(k, n, use_bias=False, rngs=rngs))
        for name, n in [("norm1", 16), ("norm2", 16), ("norm3", 16), ("q_norm", 8), ("k_norm", 8)]:
            setattr(self, name, nnx.RMSNorm(n, rngs=rngs))
        self.embed = nnx.Embed(32, 16, rngs=rngs)

    def rope(self, x):
        angle = jnp.arange(x.shape[1])[:, None, None] / 1e6 ** (jnp.arange(4) / 4)
        (a, b), cos, sin = jnp.split(x, 2, -1), jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def __call__(self, tokens):
        x, heads = self.embed(tokens), lambda y: y.reshape(*y.shape[:2], -1, 8)
        q, k, v = (heads(project(self.norm1(x))) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rope(self.q_norm(q)), self.rope(self.k_norm(k))
        o = nnx.dot_product_attention(q, k, v, mask=jnp.tri(x.shape[1], dtype=bool))
        h = self.norm2(x := x + self.o_proj(o.reshape(x.shape)))
        return self.embed.attend(self.norm3(x + self.down_proj(nnx.silu(self.gate_proj(h)) * self.up_proj(h))))


def loss(model, rows):  # of each token; what fills a row up has a weight of 0
    losses = optax.softmax_cross_entropy_with_integer_labels(model(rows["tokens"])[:, :-1], rows["tokens"][:, 1:])
    return losses, rows["learned"][:, 1:]


specs = [lf.AdapterSpec(name="law", rank=4, alpha=8, dropout=0.1), lf.AdapterSpec(name="med", rank=2, alpha=4)]
model, rules = Qwen3(nnx.Rngs(0)), {"law": optax.adamw(1e-2), "med": optax.lion(5e-3)}
model = lf.apply_lora(model, specs, targets=("q_proj", "down_proj"))
session = lf.Session(model, rules, capacity=4, ragged=["tokens", "learned"], multiple=16)
texts = {name: (np.arange(12) * by + np.arange(3)[:, None]) % 32 for name, by in {"law": 3, "med": 5}.items()}
rows = {name: [{"tokens": text, "learned": np.ones(12)} for text in part] for name, part in texts.items()}
losses = [(session.forward_backward(rows, loss), session.optim_step())[0] for _ in range(8)]
print(", ".join(f"{name}: loss {'falls' if losses[7][name] < losses[0][name] else 'rises'}" for name in rows))
with tempfile.TemporaryDirectory() as folder:
    saved, after = session.save(f"{folder}/session"), []
    for _ in range(2):
        session.load(saved)
        after.append((session.forward_backward({"law": rows["law"]}, loss), session.optim_step()))
print("resumed bit for bit" if after[0] == after[1] else f"differs: {after}")
