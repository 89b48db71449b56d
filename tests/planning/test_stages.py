"""Layers per stage are optimal, and a job's own numbers are checked."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import LLAMA_70B

from lorafusion_jax.errors import ConfigError, ErrorList
from lorafusion_jax.layout.extent import Extent, counts_of, extents
from lorafusion_jax.layout.layer import HALVES
from lorafusion_jax.planning.stages import (
    WORTH_A_CUT,
    PartCosts,
    check_layers,
    modelled_costs,
    slowest,
    split_layers,
    stage_layers,
    worth_in_layers,
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
    chosen = split_layers(num_layers, num_stages, PartCosts(layer=layer, embed=embed, head=head))
    assert [piece for stage in chosen for piece in stage.pieces] == Extent(0, 2 * num_layers).pieces
    counts = counts_of(chosen)
    assert min(counts) >= 1
    mine = stage_costs(counts, layer, embed, head)
    best = min(stage_costs(other, layer, embed, head) for other in layouts(num_layers, num_stages))
    assert mine == pytest.approx(best)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.floats(0.05, 0.95),
    st.sampled_from([0.0, 0.5, 4.0]),
    st.sampled_from([0.0, 1.0, 2.4, 9.0]),
)
def test_layers_are_split_if_the_slowest_stage_gets_faster(layers, stages, attention, embed, head):
    if stages > layers:
        return
    costs = PartCosts(attention=attention, embed=embed, head=head)
    chosen = slowest(split_layers(layers, stages, costs), costs)
    edges = [(0, *cuts, 2 * layers) for cuts in combinations(range(1, 2 * layers), stages - 1)]
    cut = [[Extent(*pair) for pair in pairwise(layers_at)] for layers_at in edges]
    best = min(slowest(layers_at, costs) for layers_at in cut if min(stage.count for stage in layers_at) >= 1)
    whole = min(slowest(extents(counts), costs) for counts in layouts(layers, stages))
    assert chosen == pytest.approx(best if best < WORTH_A_CUT * whole else whole, rel=1e-6)


def test_a_layer_is_not_split_for_a_fifth_of_a_per_cent():
    """[2.5, 1.5] balances 2.008 and 2 to 2.004; twice more programs are not worth it."""
    assert counts_of(split_layers(4, 2, PartCosts(attention=0.004, head=0.008))) == [2, 2]
    assert counts_of(split_layers(4, 2, PartCosts(attention=0.02, head=0.04))) == [2.5, 1.5]


def test_ties_go_to_later_stages():
    assert counts_of(split_layers(10, 4)) == [2, 2, 3, 3]
    assert counts_of(split_layers(32, 4)) == [8, 8, 8, 8]


def test_an_expensive_head_leaves_its_stage_one_layer():
    assert counts_of(split_layers(8, 3, PartCosts(head=100))) == [3, 4, 1]


def test_the_real_shape_is_balanced_within_one_layer():
    costs = modelled_costs(LLAMA_70B)
    stages = split_layers(80, 4, costs._replace(attention=None))
    loads = stage_costs(counts_of(stages), costs.layer, costs.embed, costs.head)
    assert loads[0] - loads[-1] <= costs.layer
    assert counts_of(stages) == [20, 20, 21, 19]


def test_a_split_layer_balances_70b_within_three_per_cent():
    costs = modelled_costs(LLAMA_70B)
    mean = (80 * costs.layer + costs.head) / 4
    stages = split_layers(80, 4, costs)
    assert counts_of(stages) == [20, 20.5, 20.5, 19]
    assert 1 - mean / slowest(stages, costs) < 0.03
    assert 1 - mean / slowest(extents([20, 20, 21, 19]), costs) > 0.03
    worth = worth_in_layers(LLAMA_70B, stages)
    assert sum(worth) == pytest.approx(80)
    assert worth[1] == pytest.approx(20 + costs.attention / costs.layer)


def test_stages_that_share_a_layer_have_each_leaf_once():
    first, second = extents([2.5, 1.5])
    for half in HALVES:
        held = [*first.layers_of(half), *second.layers_of(half)]
        assert held == [0, 1, 2, 3]


def test_costs_follow_lengths_and_loss():
    short, long = modelled_costs(LLAMA_70B, sample_tokens=1), modelled_costs(LLAMA_70B, sample_tokens=8193)
    assert long.layer - short.layer == 7 * 8192 * 64 * 128
    assert modelled_costs(LLAMA_70B, loss_share=0.25).head == short.head / 4


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match=r"mesh\.stages.*3 layers cannot be cut into 4 stages"):
        split_layers(3, 4)


def test_own_numbers_are_used():
    assert check_layers([1, 4.5, 2.5], num_layers=8, num_stages=3) == (Extent(0, 2), Extent(2, 11), Extent(11, 16))


def test_stages_of_a_job_are_its_own_or_by_cost():
    assert counts_of(stage_layers(LLAMA_70B, 4)) == [20, 20.5, 20.5, 19]
    assert counts_of(stage_layers(LLAMA_70B, 4, [23, 20, 20, 17])) == [23, 20, 20, 17]
    with pytest.raises(ConfigError, match=r"mesh\.layers.*adds up to 79"):
        stage_layers(LLAMA_70B, 4, [19, 20, 20, 20])


def test_every_error_in_own_numbers_is_reported():
    with pytest.raises(ErrorList) as caught:
        check_layers([5, 0], num_layers=8, num_stages=3)
    assert [error.code for error in caught.value.errors] == ["mesh.layers"] * 3
    text = str(caught.value)
    for part in ("names 2 stages", "a stage has no layer", "adds up to 5 layers", "fix: mesh.layers: [2, 3, 3]"):
        assert part in text
