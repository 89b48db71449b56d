"""Rebalancing of layers from measured stage times is optimal within memory."""

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import LLAMA_70B

from lorafusion_jax.layout.extent import Extent, extents
from lorafusion_jax.planning.rebalance import WORTH_A_MOVE, rebalanced
from lorafusion_jax.planning.stages import WORTH_A_CUT, PartCosts, modelled_costs, split_layers, stage_loads


@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 6),
    st.lists(st.tuples(st.floats(0.2, 3), st.integers(2, 12)), min_size=2, max_size=4),
    st.sampled_from([None, 0.2, 0.6]),
)
def test_result_is_the_fastest_layout(layers, measured, attention):
    stages = len(measured)
    if stages > layers:
        return
    costs = PartCosts(attention=attention, embed=0.1, head=1.3)
    start = split_layers(layers, stages)
    seconds, most = [took for took, _ in measured], [room for _, room in measured]
    speeds = [load / took for load, took in zip(stage_loads(start, costs), seconds, strict=True)]
    step = 2 if attention is None else 1
    edges = [(0, *cuts, 2 * layers) for cuts in combinations(range(step, 2 * layers, step), stages - 1)]
    possible = [[Extent(*pair) for pair in pairwise(cut)] for cut in edges]
    possible = [
        max(load / speed for load, speed in zip(stage_loads(cut, costs), speeds, strict=True))
        for cut in possible
        if all(2 <= stage.stop - stage.start <= room for stage, room in zip(cut, most, strict=True))
    ]
    moved = rebalanced(start, seconds, costs, most=most)
    best = min(possible, default=max(seconds))
    if moved is None:
        assert best / WORTH_A_CUT >= WORTH_A_MOVE * max(seconds) * (1 - 1e-9)
        return
    assert 1 - moved.saving <= best / max(seconds) / WORTH_A_CUT + 1e-4
    assert 1 - moved.saving >= best / max(seconds) - 1e-4
    assert all(2 * count <= room for count, room in zip(moved.layers, most, strict=True))


def test_layers_move_away_from_the_slowest_stage():
    stages, costs = extents([20, 20.5, 20.5, 19]), modelled_costs(LLAMA_70B)
    took = [0.6800, 0.6743, 0.7885, 0.6746]
    moved = rebalanced(stages, took, costs)
    assert moved is not None
    assert moved.layers == [21, 21, 18, 20]
    full = rebalanced(stages, took, costs, most=[40, 160, 160, 160])  # the first GPU holds no half more
    assert full is not None
    assert full.layers == [20, 21.5, 18.5, 20]


def test_small_differences_from_clocks_move_no_layers():
    """Four H200s of one host, 70B, at their power limit: moving layers by such times saved nothing."""
    stages, costs = extents([20, 20.5, 20.5, 19]), modelled_costs(LLAMA_70B)
    assert rebalanced(stages, [0.6800, 0.6743, 0.7185, 0.6746], costs) is None


def test_layers_stay_if_moving_saves_nothing():
    costs = modelled_costs(LLAMA_70B)
    stages = split_layers(80, 4, costs)
    assert rebalanced(stages, stage_loads(stages, costs), costs) is None
    assert rebalanced(extents([80]), [1.0], costs) is None
