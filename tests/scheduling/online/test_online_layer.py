"""The scheduler counts the decoder layer that is trained, although it knows only sizes and imports no jax."""

from dataclasses import replace

import pytest

from lorafusion_jax.families.model import ModelConfig
from scheduling.online import SHAPES
from scheduling.online.facts import BFLOAT16, stage_bytes
from scheduling.online.shapes import LINEARS


@pytest.fixture(params=["llama-3.1-8b", "qwen2.5-0.5b"])
def shape(request):
    return SHAPES[request.param]


def layer(shape):
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    return ModelConfig(family="llama", **{name: getattr(shape, name) for name in fields}).layer(0)


def test_the_projections_are_those_of_the_layer(shape):
    assert layer(shape).targets == LINEARS
    assert {name: shape.linear(name) for name in LINEARS} == layer(shape).linear_shapes()


@pytest.mark.parametrize(("policy", "recompute"), [("gemm_inputs", False), ("nothing", True)])
def test_a_further_layer_keeps_the_tensors_that_backward_needs(shape, policy, recompute):
    """Its input, and what the policy saves. Row sums in float32 are the small tensors that the scheduler leaves out."""
    deeper = replace(shape, num_layers=shape.num_layers + 1)
    added = stage_bytes(deeper, 1, recompute).token - stage_bytes(shape, 1, recompute).token
    saved = [tensor for tensor in layer(shape).saved if tensor.policy == policy and not tensor.float32]
    assert added == BFLOAT16 * (shape.hidden_size + sum(tensor.width for tensor in saved))
