"""Small random calls that the tests of this folder share."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from host_arrays import on_device

import pallas_kernels as pk
from pallas_kernels import dropout
from pallas_kernels.linear import chunks

TILE = 32
TABLE = [1, -1, 0, 1, 2, 0]  # with `draw`'s other sizes the same programs in all files

# Whole programs: operation by operation each would be thirty.
keep_mask = jax.jit(dropout.keep_mask, static_argnums=2)
keep_words = jax.jit(dropout.keep_words, static_argnums=2)
make_chunks = jax.jit(chunks.make_chunks, static_argnums=(1, 2), static_argnames="single")


def normal(random, *shape, scale=1.0, dtype=jnp.float32):
    return on_device((random.normal(size=shape) * scale).astype(np.float32), dtype)


def draw(
    *, table, k=128, widths=(64,), ranks=(8,), adapters=3, rates=None, dtype=jnp.float32, bias=False, seed=0, tile=TILE
):
    """Draws the arguments of multi_lora_linears and the incoming gradients."""
    random = np.random.default_rng(seed)
    rows = tile * len(table)
    dropout = None
    if rates is not None:
        dropout = pk.Dropout(
            rate=on_device(rates, np.float32),
            key=on_device(random.integers(0, 2**32, adapters), np.uint32),
            row_key=on_device(random.integers(0, 2**32, rows), np.uint32),
        )
    arguments = {
        "x": normal(random, rows, k, dtype=dtype),
        "ws": [normal(random, k, n, scale=k**-0.5, dtype=dtype) for n in widths],
        "as_": [None if r is None else normal(random, adapters, k, r, scale=k**-0.5) for r in ranks],
        "bs": [None if r is None else normal(random, adapters, r, n) for r, n in zip(ranks, widths, strict=True)],
        "biases": [normal(random, n, dtype=dtype) if bias else None for n in widths],
        "tile_adapter": on_device(table, np.int32),
        "scale": on_device(np.linspace(0.5, 2.0, adapters), np.float32),
        "dropout": dropout,
    }
    return arguments, [normal(random, rows, n, dtype=dtype) for n in widths]


def relative(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


@cache
def ours(backend):
    """One function for each backend, so that equal calls compile once."""

    def layer(arguments, x, as_, bs):
        rest = {name: arguments[name] for name in ("tile_adapter", "scale", "dropout", "biases")}
        return pk.multi_lora_linears(x, arguments["ws"], as_, bs, implementation=backend, **rest)

    return layer


@partial(jax.jit, static_argnums=0)
def ops_and_gradients(layer, arguments, dys):
    """ys, dx, dAs, dBs."""
    ys, vjp = jax.vjp(partial(layer, arguments), *(arguments[name] for name in ("x", "as_", "bs")))
    return ys, *vjp(tuple(dys))


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
