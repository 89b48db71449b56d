"""The scheduler counts the decoder layer that is trained, although it knows only sizes and imports no jax."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from lorafusion_jax.layout.layer import LAYER
from scheduling.online import SHAPES
from scheduling.online.memory import BFLOAT16, stage_bytes
from scheduling.online.shapes import LINEARS

PLAIN = {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False}


@pytest.fixture(params=["llama-3.1-8b", "qwen2.5-0.5b"])
def shape(request):
    return SHAPES[request.param]


def model(shape):
    return SimpleNamespace(**asdict(shape), **PLAIN)


def test_the_projections_are_those_of_the_layer(shape):
    assert LAYER.targets == LINEARS
    assert {name: shape.linear(name) for name in LINEARS} == LAYER.linear_shapes(model(shape))


@pytest.mark.parametrize(("policy", "recompute"), [("gemm_inputs", False), ("nothing", True)])
def test_a_further_layer_keeps_the_tensors_that_backward_needs(shape, policy, recompute):
    """Its input, and what the policy saves. Row sums in float32 are the small tensors that the scheduler leaves out."""
    deeper = replace(shape, num_layers=shape.num_layers + 1)
    added = stage_bytes(deeper, 1, recompute).token - stage_bytes(shape, 1, recompute).token
    sizes = model(shape)
    saved = [one for one in LAYER.saved if one.policy == policy and one.present(sizes) and not one.float32]
    assert added == BFLOAT16 * (shape.hidden_size + sum(one.width(sizes) for one in saved))
