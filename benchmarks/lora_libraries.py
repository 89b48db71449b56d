"""Which layers and calls do other LoRA libraries for Flax serve? Tries each on the same small layers.

    python -m benchmarks.lora_libraries --out benchmarks/tables/lora_libraries.json     # needs qwix; CPU, a minute

Columns: ours, qwix. A cell says whether outputs and gradients came out finite and, where both serve a layer, whether
they agree with the same A and B.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lorafusion_jax.modules import AdapterSpec, apply_lora, use_adapters

SPEC = AdapterSpec(name="law", rank=2, alpha=4)
X = jax.random.normal(jax.random.key(0), (4, 5, 8))
IMAGE = jax.random.normal(jax.random.key(1), (4, 8, 8, 3))


class Stack(nnx.Module):
    """Layers made by `nnx.vmap` and run by `nnx.scan`."""

    def __init__(self):
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))(nnx.Rngs(0).fork(split=3))

    def __call__(self, x):
        return nnx.scan(lambda x, layer: (x + layer(x), None))(x, self.layers)[0]


class Holder(nnx.Module):
    def __init__(self, layer: nnx.Module):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


def attention() -> nnx.Module:
    return nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0))


MODELS: dict[str, tuple[Callable[[], nnx.Module], jax.Array]] = {
    "nnx.Linear": (lambda: Holder(nnx.Linear(8, 6, rngs=nnx.Rngs(0))), X),
    "nnx.LinearGeneral": (lambda: Holder(nnx.LinearGeneral(8, (2, 3), rngs=nnx.Rngs(0))), X),
    "nnx.Einsum": (lambda: Holder(nnx.Einsum("btd,dnh->btnh", (8, 2, 3), (2, 3), rngs=nnx.Rngs(0))), X),
    "nnx.MultiHeadAttention": (lambda: Holder(attention()), X),
    "nnx.Conv": (lambda: Holder(nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0))), IMAGE),
    "nnx.Embed": (lambda: Holder(nnx.Embed(7, 8, rngs=nnx.Rngs(0))), jnp.zeros((4, 5), jnp.int32)),
    "layers in nnx.scan": (Stack, X),
}


def ours(model: nnx.Module, x: jax.Array) -> str:
    model = apply_lora(model, [SPEC], targets=".+")

    @nnx.jit
    def run(model, x):
        with use_adapters([SPEC], only="law"):
            return (model(x) ** 2).sum()

    return described(run, model, x)


def qwix(model: nnx.Module, x: jax.Array) -> str:
    import qwix

    provider = qwix.LoraProvider(module_path=".*", rank=SPEC.rank, alpha=SPEC.alpha)
    return described(
        nnx.jit(lambda model, x: (model(x) ** 2).sum()),
        qwix.apply_lora_to_model(model, provider, x, rngs=nnx.Rngs(1)),
        x,
    )


def described(run: Callable, model: nnx.Module, x: jax.Array) -> str:
    state = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    if not state:
        return "nothing adapted, no error"
    grads = nnx.grad(run, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)
    finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    return f"served, {len(state) // 2} layers" if finite else "not finite"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = {}
    for name, (make, x) in MODELS.items():
        found[name] = {}
        for column, run in (("ours", ours), ("qwix", qwix)):
            try:
                found[name][column] = run(make(), x)
            except Exception as problem:
                found[name][column] = f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
        print(name, json.dumps(found[name]), flush=True)
    versions = {name: version(name) for name in ("jax", "flax", "qwix")}
    args.out.write_text(json.dumps({"versions": versions, "layers": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
