"""Layers per stage: the best of all layouts, and a job's own numbers checked."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafusion_jax.errors import ConfigError, ErrorList
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.pipeline.layout import check_layers, linear_shapes, modelled_costs, split_layers, stage_layers

LLAMA_70B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
)


def stage_costs(counts, layer, embed, head):
    costs = [layer * count for count in counts]
    costs[0] += embed
    costs[-1] += head
    return sorted(costs, reverse=True)


def layouts(num_layers, num_stages):
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        edges = (0, *cuts, num_layers)
        yield [edges[i + 1] - edges[i] for i in range(num_stages)]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.floats(0.1, 3),
    st.sampled_from([0.0, 0.5, 4.0]),
    st.sampled_from([0.0, 1.0, 2.4, 9.0]),
)
def test_no_layout_is_better_in_its_slowest_stages(num_layers, num_stages, layer, embed, head):
    if num_stages > num_layers:
        return
    chosen = split_layers(num_layers, num_stages, layer_cost=layer, embed_cost=embed, head_cost=head)
    assert [number for stage in chosen for number in stage] == list(range(num_layers))
    counts = [len(stage) for stage in chosen]
    assert min(counts) >= 1
    mine = stage_costs(counts, layer, embed, head)
    best = min(stage_costs(other, layer, embed, head) for other in layouts(num_layers, num_stages))
    assert mine == pytest.approx(best)


def test_ties_spare_the_first_stages():
    assert [len(stage) for stage in split_layers(10, 4)] == [2, 2, 3, 3]
    assert [len(stage) for stage in split_layers(32, 4)] == [8, 8, 8, 8]


def test_a_head_dearer_than_everything_leaves_its_stage_one_layer():
    assert [len(stage) for stage in split_layers(8, 3, head_cost=100)] == [3, 4, 1]


def test_the_real_shape_is_balanced_within_one_layer():
    costs = modelled_costs(LLAMA_70B)
    stages = split_layers(80, 4, layer_cost=costs.layer, head_cost=costs.head)
    loads = stage_costs([len(stage) for stage in stages], costs.layer, costs.embed, costs.head)
    assert loads[0] - loads[-1] <= costs.layer
    assert [len(stage) for stage in stages] == [20, 20, 21, 19]


def test_costs_follow_lengths_and_loss():
    short, long = modelled_costs(LLAMA_70B, sample_tokens=1), modelled_costs(LLAMA_70B, sample_tokens=8193)
    assert long.layer - short.layer == 7 * 8192 * 64 * 128
    assert modelled_costs(LLAMA_70B, loss_share=0.25).head == short.head / 4


def test_shapes_are_those_of_the_decoder():
    import jax.numpy as jnp
    from flax import nnx

    from lorafusion_jax.models.layer import DecoderLayer

    config = ModelConfig(
        family="qwen3",
        vocab_size=32,
        hidden_size=24,
        intermediate_size=40,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )
    layer = nnx.eval_shape(lambda: DecoderLayer(config, (), dtype=jnp.float32, rngs=nnx.Rngs(0)))
    real = {
        str(path[-2]): leaf.shape
        for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param))
        if path[-1] == "kernel"
    }
    assert linear_shapes(config) == real


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match=r"mesh\.stages.*3 layers cannot be cut into 4 stages"):
        split_layers(3, 4)


def test_own_numbers_are_taken():
    assert check_layers([1, 4, 3], num_layers=8, num_stages=3) == (range(0, 1), range(1, 5), range(5, 8))


def test_stages_of_a_job_are_its_own_or_by_cost():
    assert [len(stage) for stage in stage_layers(LLAMA_70B, 4)] == [20, 20, 21, 19]
    assert [len(stage) for stage in stage_layers(LLAMA_70B, 4, [23, 20, 20, 17])] == [23, 20, 20, 17]
    with pytest.raises(ConfigError, match=r"mesh\.layers.*adds up to 79"):
        stage_layers(LLAMA_70B, 4, [19, 20, 20, 20])


def test_every_mistake_in_own_numbers_is_told():
    with pytest.raises(ErrorList) as caught:
        check_layers([5, 0], num_layers=8, num_stages=3)
    assert [error.code for error in caught.value.errors] == ["mesh.layers"] * 3
    text = str(caught.value)
    for part in ("names 2 stages", "a stage has no layer", "adds up to 5 layers", "fix: mesh.layers: [2, 3, 3]"):
        assert part in text
