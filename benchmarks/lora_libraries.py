"""Which layers and calls do other LoRA libraries for Flax serve? Tries each on the same small layers.

    JAX_NUM_CPU_DEVICES=4 python -m benchmarks.lora_libraries --out results/rows.json     # needs qwix; CPU, a minute

Columns: ours, qwix. For a layer, a cell says how many were adapted, with finite gradients. For a call, what came out of
it. Errors are recorded as they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lorafusion_jax.modules import AdapterSpec, LinenLoRA, apply_lora, merge_adapter, quantize_base, use_adapters

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


def only_law(model: nnx.Module, **options) -> Callable:
    def run(model, x):
        with use_adapters([SPEC], only="law", **options):
            return (model(x) ** 2).sum()

    return nnx.jit(run)


def plain(model: nnx.Module, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).sum()


def qwix_model(model: nnx.Module, **options) -> nnx.Module:
    import qwix

    provider = qwix.LoraProvider(**({"module_path": ".*", "rank": 2, "alpha": 4.0} | options))
    return qwix.apply_lora_to_model(model, provider, WIDE, rngs=nnx.Rngs(1))


WIDE = jax.random.normal(jax.random.key(2), (4, 5, 64))


def wide() -> nnx.Module:
    return Holder(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))


def our_two_adapters() -> str:
    specs = [SPEC, AdapterSpec(name="med", rank=4, alpha=4, seed=1)]
    model = apply_lora(wide(), specs, targets=".+")
    with use_adapters(specs, jnp.array([0, 1, 0, 1]), train=False):
        return f"output {model(WIDE).shape}, ranks {[spec.rank for spec in specs]}"


def qwix_two_adapters() -> str:
    model = qwix_model(qwix_model(wide()), rank=4)
    ranks = sorted({leaf.shape[-1] for leaf in jax.tree.leaves(nnx.state(model, nnx.LoRAParam))})
    return f"applied twice: {len(jax.tree.leaves(nnx.state(model, nnx.LoRAParam))) // 2} adapter, widths {ranks}"


def our_dropout() -> str:
    specs = [AdapterSpec(name="law", rank=2, alpha=4, dropout=0.5)]
    model = apply_lora(wide(), specs, targets=".+")
    model.layer.lora_b[...] = jnp.ones(model.layer.lora_b.shape)
    with use_adapters(specs, only="law", step=3):
        first, again = model(WIDE), model(WIDE)
    with use_adapters(specs, only="law", step=4):
        other = model(WIDE)
    return drawn(first, again, other)


def qwix_dropout() -> str:
    model = qwix_model(wide(), dropout=0.5)
    model.set_attributes(qwix_rngs=nnx.Rngs(2))
    model.layer.kernel_lora_b[...] = jnp.ones(model.layer.kernel_lora_b.shape)
    return drawn(model(WIDE), model(WIDE), model(WIDE))


def drawn(first: jax.Array, again: jax.Array, other: jax.Array) -> str:
    same = "the same masks for a step" if (first == again).all() else "new masks for every call"
    return f"dropout, {same}, {'others for the next' if (first != other).any() else 'the same for the next'}"


def our_quantised_base() -> str:
    model = quantize_base(apply_lora(wide(), [SPEC], targets=".+"), "nf4")
    kept = model.layer.kernel.get_value().num_bytes
    return f"{described(only_law(model), model, WIDE)}, {kept} bytes in place of {64 * 64 * 4}"


def qwix_quantised_base() -> str:
    model = qwix_model(wide(), weight_qtype="nf4", tile_size=32)
    weights = jax.tree.leaves(nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))))
    return f"{described(nnx.jit(plain), model, WIDE)}, weights as {max(weights, key=lambda leaf: leaf.size).dtype}"


def sharded(kind: AxisType = AxisType.Explicit) -> tuple[jax.sharding.Mesh, nnx.Module]:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    model = wide()
    model.layer.kernel = nnx.Param(
        jax.device_put(model.layer.kernel[...], NamedSharding(mesh, P(None, "model"))), sharding_names=None
    )
    model.layer.bias = nnx.Param(jax.device_put(model.layer.bias[...], NamedSharding(mesh, P("model"))))
    return mesh, model


def our_mesh() -> str:
    mesh, model = sharded()
    with jax.set_mesh(mesh):
        model = apply_lora(model, [SPEC], targets=".+")
        x = jax.device_put(WIDE, P("data"))
        return described(only_law(model), model, x)


def qwix_mesh() -> str:
    import qwix

    mesh, model = sharded()
    with jax.set_mesh(mesh):
        x = jax.device_put(WIDE, P("data"))
        provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=4.0)
        return described(nnx.jit(plain), qwix.apply_lora_to_model(model, provider, x, rngs=nnx.Rngs(1)), x)


def our_quantised_mesh(kind: AxisType) -> str:
    mesh, model = sharded(kind)
    with jax.set_mesh(mesh):
        model = quantize_base(apply_lora(model, [SPEC], targets=".+"), "nf4")
        codes = model.layer.kernel.get_value().arrays["codes"]
        x = jax.device_put(WIDE, NamedSharding(mesh, P("data")))
        shard = codes.addressable_shards[0].data.shape
        return f"{described(only_law(model), model, x)}, codes {shard} of {codes.shape} on a device"


def qwix_quantised_mesh(kind: AxisType) -> str:
    import qwix

    mesh, model = sharded(kind)
    with jax.set_mesh(mesh):
        x = jax.device_put(WIDE, NamedSharding(mesh, P("data")))
        provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=4.0, weight_qtype="nf4", tile_size=32)
        return described(nnx.jit(plain), qwix.apply_lora_to_model(model, provider, x, rngs=nnx.Rngs(1)), x)


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(64, name="layer")(x)


def our_quantised_linen() -> str:
    model, lora = LinenLayer(), LinenLoRA([SPEC], targets="layer")
    params = model.init(jax.random.key(0), WIDE)["params"]
    adapters = lora.init(model, {"params": params}, WIDE)
    stored = lora.quantize_base(model, {"params": params}, "nf4", WIDE)

    def loss(adapters):
        with lora.use(only="law", train=False):
            return (model.apply({"params": stored, "LoRAParam": adapters}, WIDE) ** 2).sum()

    return f"{finite(jax.grad(loss)(adapters))}, weights as {stored['layer']['kernel'].arrays['codes'].dtype} codes"


def qwix_quantised_linen() -> str:
    import qwix

    provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=4.0, weight_qtype="nf4", tile_size=32)
    model = qwix.apply_lora_to_model(LinenLayer(), provider)
    params = model.init(jax.random.key(0), WIDE)["params"]
    lora, rest = ({}, {})
    for path, leaf in flatten_dict(params).items():
        (lora if "lora" in path[-1] else rest)[path] = leaf

    def loss(lora):
        return (model.apply({"params": unflatten_dict(lora | rest)}, WIDE) ** 2).sum()

    kinds = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(rest) if leaf.ndim > 1})
    return f"{finite(jax.grad(loss)(lora))}, weights as {', '.join(kinds)}"


def finite(grads: Any) -> str:
    leaves = jax.tree.leaves(grads)
    served = leaves and all(np.isfinite(leaf).all() for leaf in leaves)
    return f"served, {len(leaves) // 2} layers" if served else "not finite"


def our_merge() -> str:
    model = apply_lora(wide(), [SPEC], targets=".+")
    model.layer.lora_b[...] = jax.random.normal(jax.random.key(3), model.layer.lora_b.shape)
    with use_adapters([SPEC], only="law", train=False):
        before = model(WIDE)
    return f"merged, outputs differ by {float(jnp.abs(merge_adapter(model, 'law')(WIDE) - before).max()):.0e}"


def qwix_merge() -> str:
    import qwix

    found = [name for name in (*dir(qwix), *dir(qwix.LoraProvider)) if "merge" in name.lower()]
    return f"calls with 'merge' in their name: {', '.join(found) or 'none'}"


def our_wrong_target() -> str:
    apply_lora(wide(), [SPEC], targets="laier")
    return "no error"


def qwix_wrong_target() -> str:
    model = qwix_model(wide(), module_path="laier")
    return f"no error, {len(jax.tree.leaves(nnx.state(model, nnx.LoRAParam))) // 2} layers adapted"


CALLS: dict[str, tuple[Callable[[], str], Callable[[], str]]] = {
    "two adapters of own rank in a batch": (our_two_adapters, qwix_two_adapters),
    "dropout": (our_dropout, qwix_dropout),
    "base in nf4": (our_quantised_base, qwix_quantised_base),
    "mesh with explicit axes, 2 x 2": (our_mesh, qwix_mesh),
    "base in nf4 on a mesh with explicit axes, 2 x 2": (
        partial(our_quantised_mesh, AxisType.Explicit),
        partial(qwix_quantised_mesh, AxisType.Explicit),
    ),
    "base in nf4 on a mesh with automatic axes, 2 x 2": (
        partial(our_quantised_mesh, AxisType.Auto),
        partial(qwix_quantised_mesh, AxisType.Auto),
    ),
    "base of a Linen model in nf4": (our_quantised_linen, qwix_quantised_linen),
    "merge": (our_merge, qwix_merge),
    "a target that matches nothing": (our_wrong_target, qwix_wrong_target),
}


def tried(column: Callable[[nnx.Module, jax.Array], str], make: Callable[[], nnx.Module], x: jax.Array) -> str:
    return column(make(), x)


def attempt(work: Callable[[], str]) -> str:
    try:
        return work()
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).splitlines()[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    layers = {
        name: {"ours": attempt(partial(tried, ours, make, x)), "qwix": attempt(partial(tried, qwix, make, x))}
        for name, (make, x) in MODELS.items()
    }
    calls = {name: {"ours": attempt(own), "qwix": attempt(other)} for name, (own, other) in CALLS.items()}
    for name, cells in (layers | calls).items():
        print(name, json.dumps(cells), flush=True)
    versions = {name: version(name) for name in ("jax", "flax", "qwix")}
    args.out.write_text(json.dumps({"versions": versions, "layers": layers, "calls": calls}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
