"""Random calls against the formula in float64: shapes, ranks, adapters, tables, rates, types, by backend."""

from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import needs_gpu_interpreter
from kernel_problems import relative

import pallas_kernels as pk
from pallas_kernels.dropout import keep_mask, threshold
from pallas_kernels.mosaic_gpu import backend as hopper

# float32 sums differ by their order; the others round y, S and dS to 8 and 11 bits
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
ANY = {
    "dtypes": ("float32", "bfloat16", "float16"), "tiles": (16, 32, 48, 80, 128), "most_tiles": 6,
    "ranks": (1, 3, 8, 16, 20, 33), "features": lambda random: int(random.integers(1, 300)), "projections": 3,
}  # fmt: skip
HOPPER = {
    "dtypes": ("bfloat16", "float16"), "tiles": (64, 128), "most_tiles": 3,
    "ranks": (1, 8, 16, 20), "features": lambda random: 128 * int(random.integers(1, 3)), "projections": 2,
}  # fmt: skip


def draw(seed, dtypes, tiles, most_tiles, ranks, features, projections):
    """Arguments of multi_lora_linears, and the incoming gradients."""
    random = np.random.default_rng(seed)
    dtype, tile, adapters = dtypes[seed % len(dtypes)], int(random.choice(tiles)), int(random.choice([1, 2, 3, 7]))
    num_tiles, num_in = int(random.integers(1, most_tiles + 1)), features(random)
    widths = [features(random) for _ in range(random.integers(1, projections + 1))]
    large = (160, 256) if len(widths) == 1 and dtype == "float32" else ()  # of all projections together at most 256
    ranks = [int(random.choice([*ranks, *large])) for _ in widths]
    without = [i > 0 and random.random() < 0.2 for i in range(len(widths))]
    table = [0, *random.integers(-1, adapters, num_tiles - 1)]
    rows, banks = tile * num_tiles, str(random.choice([dtype, "float32"]))

    def normal(*shape, scale=1.0, dtype=dtype):
        return jnp.asarray(random.normal(size=shape) * scale, jnp.float32).astype(dtype)

    def bank(i, *shape, scale):
        values = normal(adapters, *shape, scale=scale, dtype=banks)
        return None if without[i] else values

    dropout = pk.Dropout(
        rate=jnp.asarray(random.choice([0.0, 0.1, 0.5, 0.9], adapters), jnp.float32),
        key=jnp.asarray(random.integers(0, 2**32, adapters), jnp.uint32),
        row_key=jnp.asarray(random.integers(0, 2**32, rows), jnp.uint32),
    )
    arguments = {
        "x": normal(rows, num_in),
        "ws": [normal(num_in, n, scale=num_in**-0.5) for n in widths],
        "as_": [bank(i, num_in, r, scale=num_in**-0.5) for i, r in enumerate(ranks)],
        "bs": [bank(i, r, n, scale=r**-0.5) for i, (r, n) in enumerate(zip(ranks, widths, strict=True))],
        "biases": [normal(n) if random.random() < 0.5 else None for n in widths],
        "tile_adapter": jnp.asarray(table, jnp.int32),
        "scale": jnp.asarray(random.uniform(0.25, 4, adapters), jnp.float32),
        "dropout": None if seed % 4 == 3 else dropout,
    }
    return arguments, [normal(rows, n) for n in widths]


def gradients(backend, arguments, dys):
    """ys, dx, dAs, dBs."""
    arguments = dict(arguments)
    inputs = [arguments.pop(name) for name in ("x", "as_", "bs")]
    ws = arguments.pop("ws")

    def layer(x, as_, bs):
        return pk.multi_lora_linears(x, ws, as_, bs, implementation=backend, **arguments)

    ys, vjp = jax.vjp(layer, *inputs)
    return ys, *vjp(tuple(dys))


def formula(arguments, dys):
    """The same in float64, one adapter after another."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), arguments | {"dropout": None, "dys": dys})
    x, dropout = wide["x"], arguments["dropout"]
    owner = np.repeat(np.asarray(arguments["tile_adapter"]), len(x) // len(arguments["tile_adapter"]))
    factor = np.ones_like(x)
    if dropout is not None:
        keep = 1 - np.asarray(threshold(dropout.rate), np.float64) / 65536
        factor = np.asarray(keep_mask(dropout, jnp.asarray(owner), x.shape[1])) / keep[np.maximum(owner, 0)][:, None]
    ys, dx, das, dbs = [], np.zeros_like(x), [], []
    for w, a, b, bias, dy in zip(*(wide[name] for name in ("ws", "as_", "bs", "biases", "dys")), strict=True):
        y = x @ w + (0 if bias is None else bias)
        dx += dy @ w.T
        das.append(None if a is None else np.zeros_like(a))
        dbs.append(None if b is None else np.zeros_like(b))
        for k, scale in enumerate(wide["scale"] if a is not None else ()):
            own = owner == k
            dropped = factor[own] * x[own]
            y[own] += scale * dropped @ a[k] @ b[k]
            ds = scale * dy[own] @ b[k].T
            dbs[-1][k] = scale * (dropped @ a[k]).T @ dy[own]
            das[-1][k] = dropped.T @ ds
            dx[own] += factor[own] * (ds @ a[k].T)
        ys.append(y)
    return tuple(ys), dx, das, dbs


def check(got, arguments, dys):
    want = formula(arguments, dys)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    limit = TOLERANCE[str(arguments["x"].dtype)]
    errors = [relative(g, w) for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]
    assert max(errors) < limit, (errors, jax.tree.map(jnp.shape, arguments))


@pytest.mark.parametrize("backend", ["xla", "pallas_triton"])
@pytest.mark.parametrize("seed", range(9))
def test_random_calls(backend, seed):
    arguments, dys = draw(seed, **ANY)
    check(jax.jit(partial(gradients, backend))(arguments, dys), arguments, dys)


@pytest.fixture
def on_hopper(monkeypatch):
    """The whole op on this CPU: its Hopper passes in the GPU interpreter, its Triton passes in theirs."""

    def interpreted(kernel):
        def run(*arguments, **options):
            with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
                return jax.block_until_ready(kernel(*arguments, **options))

        return run

    for name in ("gemm", "drop_down", "drop_da", "wide_dsdb"):
        monkeypatch.setattr(hopper, name, interpreted(getattr(hopper, name)))
    monkeypatch.setattr(hopper, "is_hopper", lambda: True)
    monkeypatch.setattr(hopper, "num_sms", lambda: 2)
    monkeypatch.setattr(hopper, "MIN_DSDB_FEATURES", 256)  # so that small calls take the pass for wide ones


@needs_gpu_interpreter
@pytest.mark.parametrize("seed", [1, 3, 6])  # dropout; none; siblings, one with a wide dY
def test_random_calls_on_hopper(on_hopper, seed):
    arguments, dys = draw(seed, **HOPPER)
    check(gradients("pallas_mosaic_gpu", arguments, dys), arguments, dys)


@needs_gpu_interpreter
@pytest.mark.parametrize(("seed", "rank", "projections"), [(0, 33, 1), (6, 20, 2)])  # padded and together 64
def test_large_ranks_without_dropout_on_hopper(on_hopper, monkeypatch, seed, rank, projections):
    arguments, dys = draw(seed, **HOPPER | {"ranks": [rank], "projections": projections})
    arguments["dropout"] = None
    passes = []
    pass_over_x = hopper.drop_da
    monkeypatch.setattr(
        hopper, "drop_da", lambda *args, **options: passes.append(args) or pass_over_x(*args, **options)
    )
    check(gradients("pallas_mosaic_gpu", arguments, dys), arguments, dys)
    assert len(passes) == 1, "this pass makes the low-rank part of dx"


def one_adapter(backend, rate, dtype, rows, num_in, num_out):
    """Checks lora_linear, x with leading dimensions, against the formula."""
    sizes = {"tiles": [rows], "most_tiles": 1, "ranks": [20], "projections": 1}
    arguments, (dy,) = draw(0, dtypes=[dtype], features=lambda random: num_in, **sizes)
    arguments["ws"][0], dy = arguments["ws"][0][:, :num_out], dy[:, :num_out]
    arguments["as_"][0], arguments["bs"][0] = arguments["as_"][0][:1], arguments["bs"][0][:1, :, :num_out]
    arguments["biases"], arguments["scale"] = [None], arguments["scale"][:1]
    drop = arguments["dropout"]
    drop = None if rate is None else pk.Dropout(rate=jnp.array([rate]), key=drop.key[:1], row_key=drop.row_key)
    arguments["dropout"] = drop

    def layer(x, a, b):
        y = pk.lora_linear(
            x.reshape(2, rows // 2, num_in), arguments["ws"][0], a, b,
            scale=arguments["scale"][0], dropout=drop, implementation=backend,
        )  # fmt: skip
        return y.reshape(rows, num_out)

    y, vjp = jax.vjp(layer, arguments["x"], arguments["as_"][0][0], arguments["bs"][0][0])
    dx, da, db = vjp(dy)
    check(((y,), dx, [da[None]], [db[None]]), arguments, [dy])


@pytest.mark.parametrize("backend", ["xla", "pallas_triton"])
@pytest.mark.parametrize("rate", [None, 0.0, 0.3])
def test_one_adapter(backend, rate):
    one_adapter(backend, rate, "float32", rows=70, num_in=90, num_out=50)


@needs_gpu_interpreter
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_one_adapter_on_hopper(on_hopper, rate):
    one_adapter("pallas_mosaic_gpu", rate, "bfloat16", rows=128, num_in=256, num_out=128)
