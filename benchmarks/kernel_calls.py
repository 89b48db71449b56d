"""Random calls of the linear op, and their expected results from the formula in float64 on the host.

Tests use it on a CPU and `kernel_checks.py` on a GPU.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from pallas_kernels.dropout import keep_mask, threshold

# relative error of a whole array: float32 sums differ by their order; the others round y, S and dS to 8 and 11 bits
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
ANY = {
    "dtypes": ("float32", "bfloat16", "float16"), "tiles": (16, 32, 48, 80, 128), "most_tiles": 6,
    "ranks": (1, 3, 8, 16, 20, 33), "features": lambda random: int(random.integers(1, 300)), "projections": 3,
}  # fmt: skip
HOPPER = {
    "dtypes": ("bfloat16", "float16"), "tiles": (64, 128), "most_tiles": 3,
    "ranks": (1, 8, 16, 20), "features": lambda random: 128 * int(random.integers(1, 3)), "projections": 2,
}  # fmt: skip

_keep_mask = jax.jit(keep_mask, static_argnums=2)  # one program, because a mask takes hundreds of operations
_threshold = jax.jit(threshold)


def draw(seed, dtypes, tiles, most_tiles, ranks, features, projections):
    """Draws arguments of multi_lora_linears, and the incoming gradients."""
    random = np.random.default_rng(seed)
    dtype, tile, adapters = dtypes[seed % len(dtypes)], int(random.choice(tiles)), int(random.choice([1, 2, 3, 7]))
    num_tiles, num_in = int(random.integers(1, most_tiles + 1)), features(random)
    widths = [features(random) for _ in range(random.integers(1, projections + 1))]
    large = (160, 256) if len(widths) == 1 and dtype == "float32" else ()  # of all projections together at most 256
    ranks = [int(random.choice([*ranks, *large])) for _ in widths]
    without = [i > 0 and random.random() < 0.2 for i in range(len(widths))]
    table = [0, *random.integers(-1, adapters, num_tiles - 1)]
    rows, banks = tile * num_tiles, str(random.choice([dtype, "float32"]))
    normal = partial(_normal, random, dtype=dtype)

    def bank(i, *shape, scale):
        values = normal(adapters, *shape, scale=scale, dtype=banks)
        return None if without[i] else values

    dropout = pk.Dropout(
        rate=_on_device(random.choice([0.0, 0.1, 0.5, 0.9], adapters), jnp.float32),
        key=_on_device(random.integers(0, 2**32, adapters), jnp.uint32),
        row_key=_on_device(random.integers(0, 2**32, rows), jnp.uint32),
    )
    arguments = {
        "x": normal(rows, num_in),
        "ws": [normal(num_in, n, scale=num_in**-0.5) for n in widths],
        "as_": [bank(i, num_in, r, scale=num_in**-0.5) for i, r in enumerate(ranks)],
        "bs": [bank(i, r, n, scale=r**-0.5) for i, (r, n) in enumerate(zip(ranks, widths, strict=True))],
        "biases": [normal(n) if random.random() < 0.5 else None for n in widths],
        "tile_adapter": _on_device(table, jnp.int32),
        "scale": _on_device(random.uniform(0.25, 4, adapters), jnp.float32),
        "dropout": None if seed % 4 == 3 else dropout,
    }
    return arguments, [normal(rows, n) for n in widths]


def draw_case(
    *, rows, num_in, tile, adapters, ranks, widths, rate, dtype="bfloat16", bias=False, single=False, own_ranks=None
):
    """Draws a call of given sizes, with mixed tiles of all adapters, one tile of padding, and different dropout rates.

    Args:
        rate: adapters have this rate, half of it, or none; 0: no dropout.
        single: uses the op of one adapter, without a table.
        own_ranks: rank of each adapter, beyond which its banks are zero; None: all have the largest.
    """
    random = np.random.default_rng(0)
    normal = partial(_normal, random, dtype=dtype)
    table = np.concatenate([[-1], np.arange(rows // tile - 1) % adapters])
    random.shuffle(table)
    dropout = None
    if rate:
        dropout = pk.Dropout(
            rate=_on_device(rate * (np.arange(adapters) % 3 if adapters > 1 else np.full(1, 2)) / 2, jnp.float32),
            key=_on_device(np.arange(adapters), np.uint32),
            row_key=_on_device(random.integers(0, 2**32, rows), jnp.uint32),
        )
    sizes = list(zip(ranks, widths, strict=True))
    inside = [None if r is None else np.arange(r) < np.array([own_ranks or (r,) * adapters]).T for r in ranks]  # [A, R]
    arguments = {
        "x": normal(rows, num_in),
        "ws": [normal(num_in, n, scale=num_in**-0.5) for n in widths],
        "as_": [
            None if r is None else normal(adapters, num_in, r, scale=num_in**-0.5 * used[:, None])
            for r, used in zip(ranks, inside, strict=True)
        ],
        "bs": [
            None if r is None else normal(adapters, r, n, scale=r**-0.5 * used[:, :, None])
            for (r, n), used in zip(sizes, inside, strict=True)
        ],
        "biases": [normal(n) if bias else None for n in widths],
        "tile_adapter": None if single else _on_device(table, jnp.int32),
        "scale": _on_device(np.linspace(0.5, 2.0, adapters), np.float32),
        "dropout": dropout,
        "ranks": None if own_ranks is None else _on_device(own_ranks, jnp.int32),
    }
    return arguments, [normal(rows, n) for n in widths]


def gradients(backend, arguments, dys):
    """Computes ys, dx, dAs, dBs; without a table by the op of one adapter."""
    arguments = dict(arguments)
    inputs = [arguments.pop(name) for name in ("x", "as_", "bs")]
    ws, rest = arguments.pop("ws"), arguments | {"implementation": backend}

    def single(x, as_, bs):
        single = {"scale": rest["scale"][0], "dropout": rest["dropout"], "bias": rest["biases"][0]}
        return (pk.lora_linear(x, ws[0], as_[0][0], bs[0][0], implementation=backend, **single),)

    def several(x, as_, bs):
        return pk.multi_lora_linears(x, ws, as_, bs, **rest)

    ys, vjp = jax.vjp(single if rest["tile_adapter"] is None else several, *inputs)
    return ys, *vjp(tuple(dys))


def owners(arguments) -> np.ndarray:
    """The adapter of every row, -1 for padding."""
    rows, table = len(arguments["x"]), arguments["tile_adapter"]
    return np.zeros(rows, np.int32) if table is None else np.repeat(np.asarray(table), rows // len(table))


def formula(arguments, dys):
    """Computes the same in float64, one adapter after another."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), arguments | {"dropout": None, "dys": dys})
    x, dropout, owner = wide["x"], arguments["dropout"], owners(arguments)
    factor = np.ones_like(x)
    if dropout is not None:
        keep = 1 - np.asarray(_threshold(dropout.rate), np.float64) / 65536
        mask = np.asarray(_keep_mask(dropout, owner, x.shape[1]))
        factor = mask / keep[np.maximum(owner, 0)][:, None]
    ys, dx, das, dbs = [], np.zeros_like(x), [], []
    for w, a, b, bias, dy in zip(*(wide[name] for name in ("ws", "as_", "bs", "biases", "dys")), strict=True):
        y = x @ w + (0 if bias is None else bias)
        dx += dy @ w.T
        das.append(None if a is None else np.zeros_like(a))
        dbs.append(None if b is None else np.zeros_like(b))
        for k, scale in enumerate(wide["scale"] if a is not None else ()):
            rows = owner == k
            dropped = factor[rows] * x[rows]
            y[rows] += scale * (dropped @ a[k]) @ b[k]
            ds = scale * dy[rows] @ b[k].T
            dbs[-1][k] = scale * (dropped @ a[k]).T @ dy[rows]
            das[-1][k] = dropped.T @ ds
            dx[rows] += factor[rows] * (ds @ a[k].T)
        ys.append(y)
    return tuple(ys), dx, das, dbs


def errors(got, want) -> list[float]:
    """Relative error of every array, in the order ys, dx, dAs, dBs."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        raise ValueError(f"the results are {jax.tree.structure(got)}, expected {jax.tree.structure(want)}")
    return [relative(g, w) for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]


def relative(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def _normal(random, *shape, scale=1.0, dtype):
    return _on_device((random.normal(size=shape) * scale).astype(np.float32), dtype)


def _on_device(values, dtype):
    return jax.device_put(np.asarray(values, dtype))  # jnp would compile a program for each shape
