"""Costs of stages from parts, gathered weights, and both file formats."""

import json

import pytest

from scheduling import (
    AdapterJob,
    CostModel,
    CostParts,
    GatherCost,
    PassCost,
    PlanError,
    StageCost,
    default_cost_model,
    default_cost_parts,
    make_plan,
    read_cost_model,
    simulate,
    stages_from_parts,
)

LAYER = StageCost(
    forward=PassCost(fixed_s=1e-4, token_s=1e-6, square_s=1e-11),
    backward=PassCost(fixed_s=2e-4, token_s=2e-6, square_s=3e-11),
    update_s=1e-5,
)
HEAD = StageCost(forward=PassCost(token_s=5e-6), backward=PassCost(), update_s=1e-6)
EMBED = StageCost(forward=PassCost(fixed_s=3e-4), backward=PassCost(fixed_s=1e-6))
PARTS = CostParts(layer=LAYER, head=HEAD, embed=EMBED, call_s=1e-3, update_s=2e-4, transfer_s=2e-5, source="by hand")


def test_stages_are_sums_of_their_parts():
    costs = stages_from_parts(PARTS, [3, 2, 1])
    tokens, squares = 4096, 10**6
    layer = [getattr(LAYER, kind).seconds(tokens, squares) for kind in ("forward", "backward")]
    first, middle, last = costs.stages
    assert middle.forward.seconds(tokens, squares) == pytest.approx(1e-3 + 2 * layer[0])
    assert first.forward.seconds(tokens, squares) == pytest.approx(1e-3 + 3 * layer[0] + 3e-4)
    assert first.backward.seconds(tokens, squares) == pytest.approx(1e-3 + 3 * layer[1] + 1e-6)
    assert last.forward.seconds(tokens, squares) == pytest.approx(1e-3 + layer[0] + 5e-6 * tokens)
    assert [stage.update_s for stage in costs.stages] == pytest.approx([2.3e-4, 2.2e-4, 2.11e-4])
    assert (costs.transfer_s, costs.source) == (2e-5, "by hand")


def test_one_stage_has_both_ends():
    (stage,) = stages_from_parts(PARTS, [4]).stages
    assert stage.forward.fixed_s == pytest.approx(1e-3 + 4e-4 + 3e-4)
    assert stage.forward.token_s == pytest.approx(4e-6 + 5e-6)


@pytest.mark.parametrize("layers", [[], [2, 0]])
def test_every_stage_needs_a_layer(layers):
    with pytest.raises(PlanError, match="every stage needs a layer"):
        stages_from_parts(PARTS, layers)


def test_gathered_weights_cost_their_bytes():
    gather = GatherCost(layer_bytes=4e8, table_bytes=1e9, devices=4, link_bytes=1e11)
    plain, split = stages_from_parts(PARTS, [3, 2, 1]).stages, stages_from_parts(PARTS, [3, 2, 1], gather=gather).stages
    layers, table = [0.75 * count * 4e8 / 1e11 for count in (3, 2, 1)], 0.75 * 1e9 / 1e11
    forward, backward = (
        [getattr(b, which).fixed_s - getattr(a, which).fixed_s for a, b in zip(plain, split, strict=True)]
        for which in ("forward", "backward")
    )
    assert forward == pytest.approx([layers[0] + table, layers[1], layers[2]])  # the embedding
    assert backward == pytest.approx([layers[0], layers[1], layers[2] + table])  # the head, once in both passes


@pytest.mark.parametrize("tokens", [1, 512, 8192])
def test_a_share_of_the_gathering_is_hidden(tokens):
    plain = stages_from_parts(PARTS, [2]).stages[0].forward.seconds(tokens, 0)
    for hidden in (0.0, 0.25, 0.75):
        gather = GatherCost(layer_bytes=4e8, table_bytes=2e8, devices=2, link_bytes=1e11, hidden=hidden)
        split = stages_from_parts(PARTS, [2], gather=gather).stages[0].forward  # 1 ms of the table is never hidden
        assert split.seconds(tokens, 0) == pytest.approx(1e-3 + (1 - hidden) * 4e-3 + max(plain, hidden * 4e-3))


@pytest.mark.parametrize("hidden", [-0.1, 1.5, float("nan")])
def test_the_hidden_share_is_a_share(hidden):
    with pytest.raises(PlanError, match="from 0 to 1"):
        GatherCost(layer_bytes=1, table_bytes=0, devices=2, hidden=hidden)


def test_hidden_gathering_is_a_floor_of_the_pass():
    gather = GatherCost(layer_bytes=4e8, table_bytes=0, devices=2, link_bytes=1e11, hidden=1.0)
    plain = stages_from_parts(PARTS, [2]).stages[0].forward
    split = stages_from_parts(PARTS, [2], gather=gather).stages[0].forward
    assert split.seconds(8192, 0) == plain.seconds(8192, 0) > 4e-3
    assert split.seconds(1, 0) == pytest.approx(4e-3)
    assert plain.seconds(1, 0) < 4e-3


def test_files_of_parts_and_of_stages_are_read(tmp_path):
    assert CostParts.from_json(PARTS.to_json()) == PARTS
    assert read_cost_model(PARTS.to_json(), [3, 2]) == stages_from_parts(PARTS, [3, 2])
    stages = default_cost_model(num_stages=2)
    assert read_cost_model(stages.to_json(), [1, 1, 1]) == stages  # one entry serves any number of stages
    two = CostModel(stages=(LAYER, HEAD))
    assert read_cost_model(two.to_json(), [5, 5]) == two


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "plan.cost-format"),
        ("[]", "plan.cost-format"),
        (json.dumps({"schema": "other"}), "plan.cost-format"),
        (json.dumps({"schema": "lorafusion.cost-parts/1", "layer": {}}), "plan.cost-format"),
        (CostModel(stages=(LAYER, HEAD)).to_json(), "plan.cost"),
    ],
)
def test_invalid_cost_files_are_rejected(text, code):
    with pytest.raises(PlanError) as caught:
        read_cost_model(text, [1, 1, 1])
    assert caught.value.code == code


def test_default_parts_agree_with_the_default_model():
    # 70B: 80 layers of 855.6 M in linears, a head of 1.05 G; the whole model's average spreads the head over stages.
    parts = default_cost_parts("h100", layer_parameters=855.6e6, table_parameters=1.05e9, hidden_size=8192)
    whole = default_cost_model("h100", parameters=69.5e9, num_layers=80, hidden_size=8192).stages[0]
    (stage,) = stages_from_parts(parts, [80]).stages
    tokens, squares = 6144, 6144 * 700
    mine = stage.forward.seconds(tokens, squares) + stage.backward.seconds(tokens, squares)
    theirs = whole.forward.seconds(tokens, squares) + whole.backward.seconds(tokens, squares)
    assert mine == pytest.approx(theirs, rel=0.01)


def test_uneven_layers_balance_the_simulated_stages():
    parts = default_cost_parts("h200", layer_parameters=218e6, table_parameters=525e6, hidden_size=4096)
    plan = make_plan([AdapterJob("a", [1024] * 400, 400)], capacity_tokens=8192, num_stages=4)
    even, level = (simulate(plan, stages_from_parts(parts, n)).duration_s for n in ([8, 8, 8, 8], [8, 9, 9, 6]))
    assert level < even
