"""What an adapter is, and how targets are named."""

import pytest

from lorafusion_jax.adapters.spec import TARGETS, AdapterSpec, bank_rank, resolve_targets
from lorafusion_jax.errors import ConfigError, ErrorList


def test_scale_is_alpha_over_rank_or_over_its_root():
    assert AdapterSpec(name="a", rank=16, alpha=32).scale == 2.0
    assert AdapterSpec(name="a", rank=16, alpha=32, rslora=True).scale == 8.0


def test_all_wrong_numbers_are_told_at_once():
    with pytest.raises(ErrorList) as caught:
        AdapterSpec(name="a", rank=0, alpha=float("nan"), dropout=1.0, targets=())
    codes = [error.code for error in caught.value.errors]
    assert codes == ["lora.rank", "lora.alpha", "lora.dropout", "lora.no-target"]


@pytest.mark.wrong_types
@pytest.mark.parametrize("rank", [2.5, "8", None])
def test_a_rank_that_is_no_whole_number_is_refused(rank):
    with pytest.raises(ConfigError, match="is not a whole number") as caught:
        AdapterSpec(name="a", rank=rank, alpha=4)
    assert caught.value.code == "lora.rank"


@pytest.mark.wrong_types
def test_one_target_may_stand_for_itself():
    assert AdapterSpec(name="a", rank=2, alpha=4, targets="up").targets == ("up",)  # pyright: ignore[reportArgumentType]


def test_targets_come_in_the_order_of_the_model():
    assert resolve_targets("all-linear") == TARGETS
    assert resolve_targets(["down_proj", "q_proj", "q_proj"]) == ("q_proj", "down_proj")
    assert resolve_targets("v_proj") == ("v_proj",)


def test_unknown_targets_are_told_with_a_guess_and_the_names_there_are():
    with pytest.raises(ErrorList) as caught:
        resolve_targets(["qproj", "v_proj", "fc1"])
    first, second = caught.value.errors
    assert first.code == second.code == "lora.unknown-target"
    assert "did you mean 'q_proj'" in first.what
    assert "did you mean" not in second.what
    assert all(name in first.fix for name in TARGETS)


@pytest.mark.parametrize(("typed", "meant"), [("all", "all-linear"), ("gate", "gate_proj")])
def test_the_beginning_of_a_target_is_told_the_whole(typed, meant):
    with pytest.raises(ConfigError, match=f"no projection '{typed}'; did you mean '{meant}'"):
        resolve_targets([typed])


def test_empty_list_of_targets_is_an_error():
    with pytest.raises(ConfigError) as caught:
        resolve_targets([])
    assert caught.value.code == "lora.no-target"


def test_rank_of_a_projection_is_the_largest_that_targets_it():
    specs = [AdapterSpec(name="a", rank=4, alpha=4), AdapterSpec(name="b", rank=16, alpha=4, targets=("q_proj",))]
    assert [bank_rank(specs, name) for name in ("q_proj", "v_proj", "lm_head")] == [16, 4, 0]
