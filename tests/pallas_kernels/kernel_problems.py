"""Small random calls that the tests of this folder share."""

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk

TILE = 32


def normal(random, *shape, scale=1.0, dtype=jnp.float32):
    return jnp.asarray(random.normal(size=shape) * scale, jnp.float32).astype(dtype)


def draw(
    *, table, k=128, widths=(64,), ranks=(8,), adapters=3, rates=None, dtype=jnp.float32, bias=False, seed=0, tile=TILE
):
    """Draws the arguments of multi_lora_linears and the incoming gradients."""
    random = np.random.default_rng(seed)
    rows = tile * len(table)
    dropout = None
    if rates is not None:
        dropout = pk.Dropout(
            rate=jnp.asarray(rates, jnp.float32),
            key=jnp.asarray(random.integers(0, 2**32, adapters), jnp.uint32),
            row_key=jnp.asarray(random.integers(0, 2**32, rows), jnp.uint32),
        )
    arguments = {
        "x": normal(random, rows, k, dtype=dtype),
        "ws": [normal(random, k, n, scale=k**-0.5, dtype=dtype) for n in widths],
        "as_": [None if r is None else normal(random, adapters, k, r, scale=k**-0.5) for r in ranks],
        "bs": [None if r is None else normal(random, adapters, r, n) for r, n in zip(ranks, widths, strict=True)],
        "biases": [normal(random, n, dtype=dtype) if bias else None for n in widths],
        "tile_adapter": jnp.asarray(table, jnp.int32),
        "scale": jnp.linspace(0.5, 2.0, adapters),
        "dropout": dropout,
    }
    return arguments, [normal(random, rows, n, dtype=dtype) for n in widths]


def relative(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def ours(backend):
    def layer(arguments, x, as_, bs):
        rest = {name: arguments[name] for name in ("tile_adapter", "scale", "dropout", "biases")}
        return pk.multi_lora_linears(x, arguments["ws"], as_, bs, implementation=backend, **rest)

    return layer


def new_residuals(layer, arguments, names) -> list[tuple[int, ...]]:
    """Shapes of what backward keeps and the caller did not bring: somebody who keeps the weights must not pay twice."""
    made = []

    def trace(arguments):
        def run(x, as_, bs):
            return layer(arguments, x, as_, bs)

        policy = names and jax.checkpoint_policies.save_only_these_names(*names)
        run = jax.checkpoint(run, policy=policy) if names else run
        ys, vjp = jax.vjp(run, arguments["x"], arguments["as_"], arguments["bs"])
        argument_ids = {id(leaf) for leaf in jax.tree.leaves(arguments)}
        made.extend(leaf.shape for leaf in jax.tree.leaves(vjp) if id(leaf) not in argument_ids)
        return ys

    jax.eval_shape(trace, arguments)
    return made
