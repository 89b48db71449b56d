"""The whole MLP op on Hopper's backend, interpreted: which bank meets which columns of S, and every scale and mask.

The passes at the gate and over x and dY run in the GPU interpreter. The product with a low-rank part inside, which has
tests of its own and is slow to interpret, is a formula here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import needs_gpu_interpreter
from hopper_problems import interpret_whole_ops, interpreted
from kernel_problems import draw, relative
from more_cases import nightly

import pallas_kernels as pk
from pallas_kernels.dropout import unpack
from pallas_kernels.linear.hopper import backend

D, TILE, TABLE = 128, 64, [1, -1, 0]
RANKS = (
    (8, 20, 12),  # padded to 16, 32 and 16: up comes first in S, and gate and up together are padded to 64
    (8, 16, 12),  # padded to 16: one pass makes all gradients around the gate
    (40, 90, 70),  # of all, that pass takes the first 16 ranks; the others have passes of their own
)
BF16 = 1e-2


@pytest.fixture
def on_hopper(monkeypatch):
    """A context in which the whole op can be interpreted."""

    def product(lhs, rhs, low, bank, owner, *, transposed, low_offset=0, bits=None, config, num_sms):
        if transposed:
            rhs, bank = rhs.T, bank.swapaxes(1, 2)
        tile_bank = bank[jnp.repeat(owner, config.tile_m)].astype(jnp.float32)
        part = jnp.einsum(
            "tr,trn->tn", low[:, low_offset : low_offset + tile_bank.shape[1]].astype(jnp.float32), tile_bank
        )
        part = part if bits is None else jnp.where(unpack(bits, part.shape[1]), part, 0)
        return (lhs.astype(jnp.float32) @ rhs.astype(jnp.float32) + part).astype(lhs.dtype)

    interpret_whole_ops(monkeypatch)
    monkeypatch.setattr(backend, "gemm", product)
    return interpreted


def draw_mlp(ranks, hidden):
    shared = {"table": TABLE, "adapters": 2, "tile": TILE, "dtype": jnp.bfloat16}
    before, _ = draw(k=D, widths=(hidden, hidden), ranks=ranks[:2], rates=[0.5, 0.1], seed=0, **shared)
    after, (dy,) = draw(k=hidden, widths=(D,), ranks=ranks[2:], rates=[0.1, 0.3], seed=1, **shared)
    joined = {name: before[name] + after[name] for name in ("ws", "as_", "bs")}
    return {**before, **joined, "down_dropout": after["dropout"]}, dy


def both_ways(given, dy, implementation, dtype):
    def op(x, as_, bs):
        rest = {name: given[name] for name in ("tile_adapter", "scale", "dropout", "down_dropout")}
        ws = [w.astype(dtype) for w in given["ws"]]
        return pk.multi_lora_mlp(x, ws, as_, bs, implementation=implementation, **rest)

    def step(x, as_, bs):
        y, pullback = jax.vjp(op, x, as_, bs)
        return y, *pullback(dy.astype(dtype))

    return jax.jit(step)(given["x"].astype(dtype), given["as_"], given["bs"])


@needs_gpu_interpreter
@pytest.mark.parametrize(
    ("ranks", "hidden"),
    [nightly(RANKS[0], 512), nightly(RANKS[1], 512), (RANKS[2], 256), nightly(RANKS[2], 512)],
    ids=["mixed", "16", "large", "large and wide"],
)
def test_values_and_gradients_are_those_of_the_formula(on_hopper, ranks, hidden):
    given, dy = draw_mlp(ranks, hidden)
    want = both_ways(given, dy, "xla", jnp.float32)
    with on_hopper():
        got = jax.tree.map(np.asarray, both_ways(given, dy, "pallas_mosaic_gpu", jnp.bfloat16))
    names = ("y", "dx", *(f"d{bank} of {name}" for bank in "AB" for name in ("gate", "up", "down")))
    errors = {n: relative(g, w) for n, g, w in zip(names, jax.tree.leaves(got), jax.tree.leaves(want), strict=True)}
    assert max(errors.values()) < BF16, errors
