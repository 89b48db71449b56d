"""Random calls against the formula in float64: shapes, ranks, adapters, tables, rates, types, by backend."""

from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import needs_gpu_interpreter
from more_cases import nightly

import pallas_kernels as pk
from benchmarks.kernel_calls import ANY, HOPPER, TOLERANCE, draw, errors, formula, gradients
from pallas_kernels.linear.hopper import backend as hopper


def check(got, arguments, dys):
    worst = errors(got, formula(arguments, dys))
    assert max(worst) < TOLERANCE[str(arguments["x"].dtype)], (worst, jax.tree.map(jnp.shape, arguments))


@pytest.mark.nightly  # test_ops.py has siblings of odd shapes
@pytest.mark.parametrize("backend", ["xla", "pallas_triton"])
@pytest.mark.parametrize("seed", range(12))
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
@pytest.mark.parametrize("seed", [nightly(1), nightly(3), 6])  # dropout; none; siblings, one with a wide dY
def test_random_calls_on_hopper(on_hopper, seed):
    arguments, dys = draw(seed, **HOPPER)
    check(gradients("pallas_mosaic_gpu", arguments, dys), arguments, dys)


def one_adapter(backend, rate, dtype, rows, num_in, num_out):
    """Checks lora_linear, x with leading dimensions, against the formula."""
    sizes = {"tiles": [rows], "most_tiles": 1, "ranks": [20], "projections": 1}
    arguments, (dy,) = draw(0, dtypes=[dtype], features=lambda random: num_in, **sizes)
    arguments, dy = jax.device_get((arguments, dy))
    arguments["ws"][0], dy = arguments["ws"][0][:, :num_out], dy[:, :num_out]
    arguments["as_"][0], arguments["bs"][0] = arguments["as_"][0][:1], arguments["bs"][0][:1, :, :num_out]
    arguments["biases"], arguments["scale"] = [None], arguments["scale"][:1]
    drop = arguments["dropout"]
    drop = None if rate is None else pk.Dropout(rate=np.float32([rate]), key=drop.key[:1], row_key=drop.row_key)
    arguments["dropout"] = drop

    def both_ways(x, w, a, b, drop, dy):
        def layer(x, a, b):
            given = {"scale": arguments["scale"][0], "dropout": drop, "implementation": backend}
            return pk.lora_linear(x.reshape(2, rows // 2, num_in), w, a, b, **given).reshape(rows, num_out)

        y, vjp = jax.vjp(layer, x, a, b)
        return y, *vjp(dy)

    program = both_ways if backend == "pallas_mosaic_gpu" else jax.jit(both_ways)  # the interpreter waits for kernels
    operands = (arguments["x"], arguments["ws"][0], arguments["as_"][0][0], arguments["bs"][0][0], drop, dy)
    y, dx, da, db = program(*jax.device_put(operands))
    check(((y,), dx, [da[None]], [db[None]]), arguments, [dy])


@pytest.mark.parametrize("backend", ["xla", "pallas_triton"])
@pytest.mark.parametrize("rate", [nightly(None), nightly(0.0), 0.3])
def test_one_adapter(backend, rate):
    one_adapter(backend, rate, "float32", rows=70, num_in=90, num_out=50)


@needs_gpu_interpreter
@pytest.mark.parametrize("rate", [nightly(0.0), 0.3])
def test_one_adapter_on_hopper(on_hopper, rate):
    one_adapter("pallas_mosaic_gpu", rate, "bfloat16", rows=128, num_in=256, num_out=128)
