"""Hopper's passes at the gate of the MLP in the GPU interpreter, against the formulas in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import needs_gpu_interpreter
from hopper_problems import ADAPTERS, BF16, BLOCKS, OWNER, by_adapter, interpreted, normal
from kernel_problems import relative
from more_cases import nightly

import pallas_kernels as pk
from pallas_kernels.dropout import keep_mask, keep_words
from pallas_kernels.linear.chunks import make_chunks
from pallas_kernels.mlp.hopper.gate import (
    BackwardInputs,
    GateConfig,
    WideGateConfig,
    gate_backward,
    gate_forward,
    wide_gate_backward,
)

COLUMNS, BOTH, DOWN = 512, 64, 16
CONFIG = GateConfig(warpgroups=2, forward_stages=3, backward_stages=2)
SIZE = 3  # blocks of a chunk, more than stages: tiles are fetched again
PLACES = ((32, 16), (0, 32))  # gate and up in S: the larger rank comes first


@pytest.fixture(scope="module", params=[True, False], ids=["dropout", "p0"])
def case(request):
    return draw(request.param, BOTH)


def draw(
    dropped: bool, both: int, blocks: np.ndarray = BLOCKS, size: int = SIZE, columns: int = COLUMNS
) -> dict[str, Any]:
    owner = np.repeat(blocks, 64)
    rows = owner.size
    drop = pk.Dropout(
        rate=jnp.array([0.1, 0.5]), key=jnp.array([1, 2], jnp.uint32), row_key=jnp.arange(rows, dtype=jnp.uint32) * 7
    )
    adapter_rows = jnp.minimum(owner, ADAPTERS - 1)
    b, a = (normal(i, ADAPTERS + 1, rank, columns).at[ADAPTERS].set(0) * 0.3 for i, rank in enumerate((both, DOWN)))
    return {
        "owner": owner, "drop": drop if dropped else None,
        "words": keep_words(drop, adapter_rows, columns) if dropped else None,
        "keep": np.asarray(keep_mask(drop, adapter_rows, columns)) if dropped else np.True_,
        "b": b, "a": a,
        "chunks": make_chunks(jnp.where(blocks == ADAPTERS, -1, blocks), ADAPTERS, size, single=False),
        "gate": normal(4, rows, columns), "up": normal(5, rows, columns), "dh": normal(6, rows, columns),
        "s": normal(7, rows, both), "ds": normal(8, rows, DOWN),
    }  # fmt: skip


def wide(case, places=PLACES):
    """(g, u, A) in float32, for the rows' own adapters."""
    f32 = {name: np.asarray(case[name], np.float32) for name in ("gate", "up", "s", "b", "a")}
    b = f32["b"][case["owner"]]
    low_gate, low_up = (
        np.einsum("tr,trf->tf", f32["s"][:, at : at + rank], b[:, at : at + rank]) for at, rank in places
    )
    g, u = f32["gate"] + low_gate, f32["up"] + low_up
    return g, u, f32["a"][case["owner"]]


def inputs(case: dict[str, Any], **changes: jax.Array) -> BackwardInputs:
    operands_of_case = {name: case[name] for name in ("gate", "up", "dh", "s", "ds", "b", "a", "chunks")}
    return BackwardInputs(**(operands_of_case | {"bits": case["words"]} | changes))


@needs_gpu_interpreter
def test_forward_gates_and_makes_s_and_bits_of_the_next_projection(case):
    with interpreted():
        out = gate_forward(
            case["gate"], case["up"], case["s"], case["b"], case["a"], jnp.asarray(BLOCKS), case["drop"],
            places=PLACES, config=CONFIG,
        )  # fmt: skip
        h, s, bits = jax.tree.map(np.asarray, out)
    g, u, a = wide(case)
    want = g / (1 + np.exp(-g)) * u
    assert relative(h, want) < BF16
    assert relative(s, np.einsum("tf,trf->tr", np.where(case["keep"], np.asarray(h, np.float32), 0), a)) < BF16
    if case["drop"] is None:
        assert bits is None
    else:
        np.testing.assert_array_equal(bits, case["words"])


@needs_gpu_interpreter
@pytest.mark.parametrize("case", [True, nightly(False)], indirect=True, ids=["dropout", "p0"])
@pytest.mark.parametrize("sick", [nightly(None), 0])  # with a sick adapter, the values of the others are compared
def test_backward_gates_and_makes_da_of_the_next_projection(case, sick):
    dh = case["dh"] if sick is None else jnp.where(jnp.asarray(sick == OWNER)[:, None], jnp.nan, case["dh"])
    ds = case["ds"] if sick is None else jnp.where(jnp.asarray(sick == OWNER)[:, None], jnp.nan, case["ds"])
    with interpreted():
        out = gate_backward(inputs(case, dh=dh, ds=ds), places=PLACES, config=CONFIG)
        dgate, dup, partials = jax.tree.map(np.asarray, out)
    g, u, a = wide(case)
    sigmoid = 1 / (1 + np.exp(-g))
    wide_ds = np.asarray(ds, np.float32)
    full = np.asarray(dh, np.float32) + np.where(case["keep"], np.einsum("tr,trf->tf", wide_ds, a), 0)
    dropped = np.where(case["keep"], g * sigmoid * u, 0)
    for k in range(ADAPTERS):
        members = k == OWNER
        if k == sick:
            assert np.isnan(np.asarray(dgate, np.float32)[members]).all()
            continue
        assert relative(dup[members], (full * g * sigmoid)[members]) < BF16
        assert relative(dgate[members], (full * u * sigmoid * (1 + g * (1 - sigmoid)))[members]) < BF16
        assert relative(by_adapter(partials, case["chunks"], k), dropped[members].T @ wide_ds[members]) < BF16
    padding = OWNER == ADAPTERS
    assert relative(dup[padding], (full * g * sigmoid)[padding]) < BF16


GATE_FIRST, UP_FIRST = ((0, 16), (16, 16)), ((16, 16), (0, 16))  # up, where its rank is larger


@needs_gpu_interpreter
@pytest.mark.parametrize(
    ("dropped", "columns", "size", "gating", "stages", "parts", "sick", "places"),
    [
        (True, 256, 4, 2, 2, 2, 0, UP_FIRST),
        # fewer row blocks than warpgroups that gate; more parts than there can be, and of different length
        nightly(False, 320, 1, 2, 4, 8, None, GATE_FIRST),
        nightly(True, 512, 4, 2, 2, 3, None, GATE_FIRST),
        nightly(False, 512, 4, 3, 3, 2, 0, UP_FIRST),
        nightly(True, 512, 1, 2, 4, 8, 1, GATE_FIRST),
    ],
)
def test_one_pass_makes_all_gradients_around_the_gate(dropped, columns, size, gating, stages, parts, sick, places):
    blocks = np.array([1, 0, 2, 1, 1, 0, 1, 1], np.int32)  # 5 blocks of one: a full chunk, and one
    case = draw(dropped, 32, blocks, size, columns)
    owner = case["owner"]
    ill = jnp.asarray(sick == owner)[:, None] if sick is not None else False
    dh = jnp.where(ill, jnp.nan, case["dh"])
    with interpreted():
        config = WideGateConfig(gating=gating, stages=stages, parts=parts)
        out = wide_gate_backward(inputs(case, dh=dh), places=places, config=config)
        dgate, dup, ds_parts, *partials = (np.asarray(array, np.float32) for array in out)
    g, u, a = wide(case, places)
    sigmoid = 1 / (1 + np.exp(-g))
    s, ds, b = (np.asarray(case[name], np.float32) for name in ("s", "ds", "b"))
    full = np.asarray(dh, np.float32) + np.where(case["keep"], np.einsum("tr,trf->tf", ds, a), 0)
    h = np.where(case["keep"], g * sigmoid * u, 0)
    for k in range(ADAPTERS + 1):  # padding rows as well
        rows = owner == k
        if k == sick:
            assert np.isnan(ds_parts.sum(0)[rows]).all()
            continue
        assert relative(dup[rows], (full * g * sigmoid)[rows]) < BF16
        assert relative(dgate[rows], (full * u * sigmoid * (1 + g * (1 - sigmoid)))[rows]) < BF16
        for gradient, (at, rank) in zip((dgate, dup), places, strict=True):
            want = gradient[rows] @ b[k, at : at + rank].T
            np.testing.assert_allclose(ds_parts.sum(0)[rows, at : at + rank], want, rtol=1e-4, atol=1e-3)
        if k < ADAPTERS:
            rights = (ds, *(s[:, at : at + rank] for at, rank in places))
            for partial, left, right in zip(partials, (h, dgate, dup), rights, strict=True):
                assert relative(by_adapter(partial, case["chunks"], k), left[rows].T @ right[rows]) < BF16


@pytest.mark.parametrize(("gating", "stages"), [(1, 1), (2, 3)])
def test_stages_in_which_warpgroups_would_wait_for_ever_are_refused(gating, stages):
    with pytest.raises(ValueError, match=f"{stages} stages for {gating} warpgroups"):
        WideGateConfig(gating=gating, stages=stages)
