"""The policy on plain integers: which calls use Hopper's kernels."""

import dataclasses

import pytest

from pallas_kernels import policy
from pallas_kernels.policy import LinearShape

LAYER = LinearShape(rows=8192, in_features=4096, out_features=(4096,), ranks=(16,), tile=128, adapters=4)
BADLY_FILLED = {"rows": 2048, "in_features": 5120, "out_features": (5120,)}


def preferred(changes, **device) -> str:
    return policy.preferred(dataclasses.replace(LAYER, **changes), **{"hopper": True} | device)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float16"},
        {"adapters": 1, "dropout": True},
        {"out_features": (4096, 1024, 1024), "ranks": (16, 16, 16)},
        {"out_features": (4096, 1024), "ranks": (64, 0)},
        {"ranks": (65,)},
        {"ranks": (256,), "adapters": 300},
        {"out_features": (4096, 1024, 1024), "ranks": (128, 128, 8)},
        BADLY_FILLED | {"dropout": True},
        BADLY_FILLED | {"ranks": (64,)},
    ],
)
def test_kernels_are_preferred_on_hopper(changes):
    assert preferred(changes) == "pallas_mosaic_gpu"
    assert preferred(changes, hopper=False) == "xla"


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": (0,)},
        {"dtype": "float32"},
        {"rows": 1920},
        {"in_features": 512},
        {"out_features": (512,)},
        {"out_features": (4096, 4096), "ranks": (64, 16)},
        {"in_features": 512, "ranks": (128,)},
        BADLY_FILLED,
        BADLY_FILLED | {"ranks": (64,), "adapters": 1},
    ],
)
def test_xla_is_preferred(changes):
    assert preferred(changes) == "xla"


def test_siblings_are_split_if_their_combined_rank_is_too_large():
    siblings = dataclasses.replace(LAYER, out_features=(4096, 4096), ranks=(64, 16))
    assert policy.split_is_faster(siblings, hopper=True)
    assert not policy.split_is_faster(siblings, hopper=False)
    assert not policy.split_is_faster(dataclasses.replace(siblings, ranks=(16, 16)), hopper=True)
    assert not policy.split_is_faster(dataclasses.replace(siblings, ranks=(65, 128)), hopper=True)


def test_one_large_adapter_leaves_the_fused_kernels_their_first_ranks():
    siblings = dataclasses.replace(LAYER, out_features=(4096, 1024, 1024), ranks=(128, 128, 8))
    assert policy.first_ranks(siblings) == (16, 16, 8)
    assert policy.columns_of_s(siblings) == 64 + 2 * 2 * 64  # 48 in a power of two; two blocks of q and of k
    assert not policy.has_extra_ranks(dataclasses.replace(siblings, ranks=(16, 16, 16)))


def test_the_fused_kernels_take_no_ranks_where_all_adapters_have_large_ones():
    large = dataclasses.replace(LAYER, out_features=(4096, 1024), ranks=(128, 100), least_rank=100)
    assert policy.first_ranks(large) == (0, 0)
    assert policy.columns_of_s(large) == 2 * 2 * 64
    assert policy.preferred(large, hopper=True)[0] == "pallas_mosaic_gpu"
    for other in ({"least_rank": 64}, {"least_rank": 0}, {"ranks": (128, 16)}):
        assert max(policy.first_ranks(dataclasses.replace(large, **other))) == 16
    gate_up = dataclasses.replace(LAYER, out_features=(14336, 14336), ranks=(128, 128), least_rank=128)
    down = dataclasses.replace(LAYER, in_features=14336, ranks=(128,), least_rank=128)
    assert not policy.mlp_is_fused(gate_up, down, None, hopper=True)


def test_the_mlp_is_one_op_where_both_calls_prefer_hopper_or_it_is_asked_for():
    gate_up = dataclasses.replace(LAYER, out_features=(14336, 14336), ranks=(16, 16))
    down = dataclasses.replace(LAYER, in_features=14336)
    few = [dataclasses.replace(call, rows=1024) for call in (gate_up, down)]
    odd = dataclasses.replace(down, in_features=14336 + 128)
    assert policy.mlp_is_fused(gate_up, down, None, hopper=True)
    large = [dataclasses.replace(call, ranks=(128,) * len(call.ranks)) for call in (gate_up, down)]
    assert policy.mlp_is_fused(*large, None, hopper=True)
    assert not policy.mlp_is_fused(gate_up, down, None, hopper=False)
    assert not policy.mlp_is_fused(gate_up, down, "pallas_triton", hopper=True)
    assert not policy.mlp_is_fused(*few, None, hopper=True)
    assert policy.mlp_is_fused(*few, "pallas_mosaic_gpu", hopper=True)
    assert not policy.mlp_is_fused(gate_up, odd, "pallas_mosaic_gpu", hopper=True)
    assert not policy.mlp_is_fused(gate_up, dataclasses.replace(down, ranks=(0,)), None, hopper=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float32"}, "not float32"),
        ({"width": 96}, "64 or 128, not 96"),
        ({"rows": 8000}, "multiple of 128 rows, not 8000"),
        ({"heads": 30}, "multiple of the 8 key heads"),
    ],
)
def test_attention_names_unsupported_inputs(changes, words):
    sizes = {"rows": 8192, "heads": 32, "key_heads": 8, "width": 128, "dtype": "bfloat16"}
    assert policy.attention_unsupported_reason(**sizes) is None
    assert words in (policy.attention_unsupported_reason(**sizes | changes) or "")
