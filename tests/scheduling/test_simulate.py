"""The simulator against hand-computed timelines; costs and statistics."""

import pytest

from scheduling import (
    AdapterJob,
    CostModel,
    LinkCost,
    Measurement,
    PassCost,
    PlanError,
    StageCost,
    default_cost_model,
    default_cost_parts,
    fit_cost_model,
    make_plan,
    one_forward_one_backward,
    plan_statistics,
    simulate,
    stages_from_parts,
)

JOBS = [AdapterJob("law", [300, 200, 250, 100] * 6, 4), AdapterJob("med", [400, 30, 20, 500] * 6, 2)]


def stage(forward_s, backward_s, update_s=0.0):
    return StageCost(forward=PassCost(fixed_s=forward_s), backward=PassCost(fixed_s=backward_s), update_s=update_s)


def test_two_stages_by_hand():
    # s0: F0 0-1, F1 1-2, waits for B0 (s1: F0 1.5-2.5, B0 2.5-4.5), B0 5-7, B1 …
    plan = make_plan([AdapterJob("a", [128, 128], 2)], capacity_tokens=128, num_stages=2)
    costs = CostModel(stages=(stage(1, 2, 0.25), stage(1, 2, 0.25)), transfer_s=0.5)
    spans = {(s.kind, s.stage, s.slot): (s.start_s, s.end_s) for s in simulate(plan, costs).spans}
    assert spans == {
        ("forward", 0, 0): (0, 1),
        ("forward", 0, 1): (1, 2),
        ("forward", 1, 0): (1.5, 2.5),
        ("backward", 1, 0): (2.5, 4.5),
        ("forward", 1, 1): (4.5, 5.5),
        ("backward", 1, 1): (5.5, 7.5),
        ("update", 1, 1): (7.5, 7.75),
        ("backward", 0, 0): (5, 7),
        ("backward", 0, 1): (8, 10),
        ("update", 0, 1): (10, 10.25),
    }


def test_a_link_sends_one_message_at_a_time_by_hand():
    """The message of slot 1 leaves when that of slot 0 has left; gradients go the other way at the same time."""
    plan = make_plan([AdapterJob("a", [128, 128], 2)], capacity_tokens=128, num_stages=2)
    costs = CostModel(stages=(stage(1, 2), stage(1, 2)), links=(LinkCost(fixed_s=0.5, token_s=4 / 128),))
    spans = {(s.kind, s.stage, s.slot): (s.start_s, s.end_s) for s in simulate(plan, costs).spans}
    assert [spans["forward", 0, slot] for slot in (0, 1)] == [(0, 1), (1, 2)]
    assert [spans["forward", 1, slot] for slot in (0, 1)] == [(5.5, 6.5), (9.5, 10.5)]  # sent in 1 to 5 and 5 to 9
    assert [spans["backward", 1, slot] for slot in (0, 1)] == [(6.5, 8.5), (10.5, 12.5)]
    assert [spans["backward", 0, slot] for slot in (0, 1)] == [
        (13, 15),
        (17, 19),
    ]  # sent from 8.5 and from 12.5


def test_links_are_part_of_the_costs():
    costs = CostModel(stages=(stage(1, 2), stage(1, 2)), links=(LinkCost(fixed_s=0.5, token_s=4.0),))
    assert CostModel.from_json(costs.to_json()) == costs
    with pytest.raises(PlanError, match="stages"):
        costs.check_stages(3)
    with pytest.raises(PlanError, match="token_s of a link"):
        LinkCost(token_s=-1.0)


def test_static_shapes_cost_their_capacity_and_squares_their_samples():
    plan = make_plan([AdapterJob("a", [100, 60], 1)], capacity_tokens=256, num_stages=1)
    part = PassCost(fixed_s=1, token_s=0.01, square_s=0.001)
    spans = simulate(plan, CostModel(stages=(StageCost(forward=part, backward=PassCost()),))).spans
    seconds = sorted(s.end_s - s.start_s for s in spans if s.kind == "forward")
    squares = (100**2 + 4 * 32**2 + 28**2, 60**2 + 7 * 28**2)  # padding is cut evenly, a segment for each eighth
    by_hand = sorted(1 + 2.56 + 0.001 * square for square in squares)
    assert seconds == pytest.approx(by_hand)


def test_the_slowest_replica_decides():
    plan = make_plan([AdapterJob("a", [100, 60], 2)], capacity_tokens=128, num_stages=1, data_parallel=2)
    assert plan.num_slots == 1
    part = PassCost(square_s=1.0)
    duration = simulate(plan, CostModel(stages=(StageCost(forward=part, backward=PassCost()),))).duration_s
    assert duration == 100**2 + 2 * 14**2


def test_fit_recovers_the_costs():
    truth = StageCost(
        forward=PassCost(fixed_s=2e-3, token_s=3e-6, square_s=4e-10), backward=PassCost(fixed_s=1e-3, token_s=6e-6)
    )
    sizes = [(256, 9_000), (1024, 400_000), (1024, 1_000_000), (4096, 3_000_000), (8192, 60_000_000)]
    times = [
        Measurement(0, kind, n, q, getattr(truth, kind).seconds(n, q))
        for n, q in sizes
        for kind in ("forward", "backward")
    ]
    fitted = fit_cost_model(times).stages[0]
    for kind in ("forward", "backward"):
        for field in ("fixed_s", "token_s", "square_s"):
            assert getattr(getattr(fitted, kind), field) == pytest.approx(
                getattr(getattr(truth, kind), field), abs=1e-12
            )


def test_fit_never_goes_below_zero():
    times = [
        Measurement(0, kind, n, 0, max(0.0, 1e-6 * n - 1e-3))
        for n in (1000, 2000, 4000)
        for kind in ("forward", "backward")
    ]
    part = fit_cost_model(times).stages[0].forward
    assert min(part.fixed_s, part.token_s, part.square_s) >= 0
    assert part.seconds(4000, 0) == pytest.approx(3e-3, rel=0.15)


@pytest.mark.parametrize("device", ["h100", "h200", "cpu"])
def test_default_costs_round_trip(device):
    costs = default_cost_model(device, num_stages=2)
    assert CostModel.from_json(costs.to_json()) == costs
    assert "not measured" in costs.source


def test_h200_default_is_near_the_measured_runs():
    # Measured on an H200: 447 to 469 ms a slot of 8192 tokens, five workloads, 8B with four adapters.
    parts = default_cost_parts(
        "h200", layer_parameters=218e6, table_parameters=525e6, hidden_size=4096, mlp_width=14336
    )
    squares = 13 * 630**2
    for costs in (stages_from_parts(parts, [32]).stages[0], default_cost_model("h200").stages[0]):
        assert 0.44 < costs.forward.seconds(8192, squares) + costs.backward.seconds(8192, squares) < 0.48


def test_statistics_add_up():
    plan = make_plan(JOBS, capacity_tokens=1024, num_stages=2)
    figures = plan_statistics(plan, default_cost_model(num_stages=2))
    assert figures.slots == figures.microbatches + figures.noops == plan.num_slots
    assert figures.tokens == sum(adapter.tokens for adapter in figures.adapters) == plan.tokens
    assert [adapter.steps for adapter in figures.adapters] == [6, 12]
    assert max(adapter.finish_s for adapter in figures.adapters) == pytest.approx(figures.duration_s)
    assert figures.gap == plan.num_slots / plan.lower_bound - 1
    assert 0 < figures.density + figures.tile_share <= 1
    shares = [limit.share for limit in figures.limits]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(
    ("jobs", "limits", "words"),
    [
        ([AdapterJob("a", [100] * 40, 1)], {"capacity_tokens": 128, "num_stages": 4}, "more adapters"),
        ([AdapterJob("a", [600] * 60, 60)], {"capacity_tokens": 1024, "num_stages": 2}, "longest sample: 600 tokens"),
        ([AdapterJob("a", [128] * 4, 4)], {"capacity_tokens": 128, "num_stages": 8}, "longer run"),
        (
            [AdapterJob(f"a{i}", [130] * 60, 1) for i in range(9)],
            {"capacity_tokens": 256, "num_stages": 2},
            "tiles of 128",
        ),
    ],
    ids=["one adapter", "long samples", "short run", "tiles"],
)
def test_hint_names_the_largest_limit(jobs, limits, words):
    plan = make_plan(jobs, **limits)
    assert words in plan_statistics(plan, default_cost_model(num_stages=limits["num_stages"])).hint


def test_uneven_stages_are_named():
    plan = make_plan([AdapterJob("a", [128] * 200, 200)], capacity_tokens=128, num_stages=2)
    figures = plan_statistics(plan, CostModel(stages=(stage(1, 1), stage(3, 3))))
    assert "unequal cost" in figures.hint


def test_program_of_the_plan_is_the_default():
    plan = make_plan(JOBS, capacity_tokens=1024, num_stages=2)
    costs = default_cost_model(num_stages=2)
    assert simulate(plan, costs, program=one_forward_one_backward(plan)) == simulate(plan, costs)
