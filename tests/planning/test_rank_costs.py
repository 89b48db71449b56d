"""Predicted times and floors know the ranks of each adapter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from shapes import LLAMA_8B

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.layout.extent import extents
from lorafusion_jax.planning.memory import MemoryProblem
from lorafusion_jax.planning.planned import stage_floors_s
from lorafusion_jax.planning.ranks import RATES, seconds_per_token
from pallas_kernels.cost import H200

ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "ranks_h200_2026-11-24" / "ranks.jsonl"
QWEN3_8B = replace(LLAMA_8B, intermediate_size=12288, num_layers=36)
TOKENS, LAYERS = 8192, 4  # of the measured microbatches


def adapters(*ranks, **settings):
    return [AdapterSpec(name=f"a{at}", rank=rank, alpha=16, dropout=0.1, **settings) for at, rank in enumerate(ranks)]


def layer_s(ranks, tokens=None):
    return TOKENS * seconds_per_token(adapters(*ranks), QWEN3_8B, RATES["h200"], tokens)


@pytest.mark.parametrize(
    ("name", "ranks"), [("3 x r16, r128", (16, 16, 16, 128)), ("4 x r128", (128,) * 4), ("4 x r256", (256,) * 4)]
)
def test_extra_ranks_cost_what_was_measured(name, ranks):
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    measured = {row["name"]: 1e-3 * row["ms"] / LAYERS for row in rows if row["part"] == "microbatch"}
    assert layer_s(ranks) == pytest.approx(measured[name] - measured["4 x r16"], rel=0.05)


def test_ranks_of_the_default_rates_add_nothing_and_small_ones_little():
    assert layer_s((16, 8, 16, 4)) == 0
    assert layer_s((64,) * 4) == pytest.approx(1.0e-3, rel=0.05)  # 36 ms in 36 layers


def test_large_ranks_cost_their_rows_and_projections():
    few, many = ({"a0": share, "a1": 100 - share} for share in (90, 10))
    assert layer_s((16, 128), few) < 0.6 * layer_s((16, 128), many)
    only_q = seconds_per_token(adapters(128, targets=("q_proj",)), QWEN3_8B, RATES["h200"])
    assert 0 < TOKENS * only_q < 0.15 * layer_s((128,))


def test_a_floor_counts_the_rank_of_each_row():
    def floor(ranks, shares=None):
        problem = MemoryProblem(
            model=LLAMA_8B,
            adapters=tuple(adapters(*ranks)),
            optimizers=("adamw",) * len(ranks),
            layers=extents([32]),
            capacity_tokens=TOKENS,
        )
        return stage_floors_s(problem, 0, H200, shares)[0]

    equal, mostly_small = (0.5, 0.5), (0.9, 0.1)
    assert floor((16, 16)) == floor((16, 16), equal)
    assert floor((16, 16)) < floor((16, 256), mostly_small) < floor((16, 256), equal) < floor((16, 256))
