"""Attention to blocks: against one array of keys, and the kernel against XLA's form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from more_cases import nightly

from lorafusion_jax.models.cache import BLOCK, CachedRows, attend, paged_attention, store
from pallas_kernels.attention.triton.paged import PagedConfig, paged_attention_kernel

H, K, C, M, N = 8, 2, 32, 6, 40
POSITION = np.array([0, 31, 32, -1, 190], np.int32)
SINKS = np.linspace(-1, 2, H, dtype=np.float32)
OPTIONS = [{}, {"window": 50}, {"soft_cap": 3.0}, {"sinks": SINKS}, {"window": 7, "soft_cap": 2.0, "sinks": SINKS}]


def drawn(dtype) -> tuple[jax.Array, dict[str, jax.Array], np.ndarray]:
    draw = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(draw.normal(size=shape), dtype)  # noqa: E731
    tables = draw.permutation(N)[: len(POSITION) * M].reshape(-1, M).astype(np.int32)
    return normal(len(POSITION), H, C), {"keys": normal(N, BLOCK, K, C), "values": normal(N, BLOCK, K, C)}, tables


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_blocks_in_any_order_are_one_array(options):
    """Bitwise, also of a window, which reads fewer blocks."""
    q, cache, tables = drawn(jnp.float32)
    rows = CachedRows(position_T=POSITION, cell_T=POSITION, tables_GM=tables, decoding=True)
    out = jax.jit(lambda cache: paged_attention(q, cache, rows, **options))(cache)
    first = np.maximum(POSITION - options.get("window", 0) + 1, 0) // BLOCK if options else np.zeros(5, int)
    number = 3 if options else M

    def dense(q, keys, values):  # of the blocks that hold what a row sees
        at = first[:, None] * BLOCK + np.arange(number * BLOCK)
        back = POSITION[:, None] - at
        seen = (back >= 0) & (back < options.get("window", 10**6))
        o = attend(q.reshape(-1, K, H // K, C), keys, values, seen[:, None, None], None, scale=C**-0.5, soft_cap=None)
        return o.reshape(-1, H * C)

    def one_array(pool):
        whole = np.asarray(pool)[tables].reshape(len(tables), -1, K, C)
        whole = np.pad(whole, [(0, 0), (0, number * BLOCK), (0, 0), (0, 0)])
        part = [row[start * BLOCK : (start + number) * BLOCK] for row, start in zip(whole, first, strict=True)]
        return jnp.asarray(np.stack(part).swapaxes(1, 2))

    wanted = jax.jit(dense)(q, one_array(cache["keys"]), one_array(cache["values"]))
    assert (np.asarray(out) == np.asarray(wanted)).all()


# The last case has every option; one option alone goes through the same code.
@pytest.mark.parametrize("options", [OPTIONS[0], *map(nightly, OPTIONS[1:4]), OPTIONS[4]], ids=str)
def test_the_kernel_computes_what_xla_does(options):
    q, cache, tables = drawn(jnp.bfloat16)
    rows = CachedRows(position_T=POSITION, cell_T=POSITION, tables_GM=tables, decoding=True)
    wanted = jax.jit(lambda cache: paged_attention(q, cache, rows, scale=0.3, **options))(cache)

    def run(keys, values):
        options_of = {"scale": 0.3, **options}
        configs = (PagedConfig(parts=parts) for parts in (1, 4))
        return [paged_attention_kernel(q, keys, values, tables, POSITION, config=c, **options_of) for c in configs]

    for out in jax.jit(run)(cache["keys"], cache["values"]):
        both = (np.asarray(out, np.float32).reshape(len(q), -1), np.asarray(wanted, np.float32))
        np.testing.assert_allclose(*both, atol=2e-2)


def test_the_kernel_lowers_for_a_gpu():
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    shape = jax.ShapeDtypeStruct
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        pools = [shape((N, BLOCK, 8, 128), jnp.bfloat16)] * 2
        arrays = (shape((64, 32, 128), jnp.bfloat16), *pools, shape((64, M), jnp.int32), shape((64,), jnp.int32))
        run = jax.jit(lambda *arrays: paged_attention_kernel(*arrays, scale=0.1))
        assert "__gpu$xla.gpu.triton" in run.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_what_is_not_finite_is_not_stored():
    rows = CachedRows(position_T=np.arange(3), cell_T=np.array([33, 2, 10**6], np.int32))
    values = jnp.array([[[1.0, np.nan]], [[-np.inf, 2.0]], [[7.0, 7.0]]])
    pool = jax.jit(lambda pool: store(pool, values, rows))(jnp.full((2, BLOCK, 1, 2), 5.0))
    assert pool[1, 1, 0].tolist() == [1.0, 0.0]
    assert pool[0, 2, 0].tolist() == [0.0, 2.0]
    assert int((pool == 5.0).sum()) == pool.size - 4
