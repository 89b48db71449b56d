"""The lower bound on a stage's time is the sum of its ops, plus the head on the last stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from shapes import LLAMA_8B

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.layout.extent import extents
from lorafusion_jax.planning.memory import MemoryProblem
from lorafusion_jax.planning.planned import stage_floors_s
from pallas_kernels.cost import H200, product
from pallas_kernels.cost_ops import MlpCost, SiblingsCost

T, D, F, V = 8192, 4096, 14336, 128256
ADAPTERS = (
    AdapterSpec(name="law", rank=16, alpha=32, dropout=0.1),
    AdapterSpec(name="med", rank=8, alpha=32, targets=("q_proj", "v_proj")),
)
PROBLEM = MemoryProblem(
    model=LLAMA_8B, adapters=ADAPTERS, optimizers=("adamw",) * 2, layers=extents([32]), capacity_tokens=T
)


def halves(rank, **changes):
    """Seconds of attention's and of the MLP's linear layers, with LoRA of one rank on all."""
    shared: dict[str, Any] = {"tokens": T, "adapters": 2} | changes
    qkv = SiblingsCost(in_features=D, out_features=(D, 1024, 1024), ranks=(rank,) * 3, **shared)
    o = SiblingsCost(in_features=D, out_features=(D,), ranks=(rank,), **shared)
    mlp = MlpCost(width=D, inner=F, ranks=(rank,) * 3, **shared)
    return qkv.floor_s(H200) + o.floor_s(H200), mlp.floor_s(H200)


def head(rows):
    return product(rows=rows, inner=D, columns=V).floor_s(H200) + product(rows=rows, inner=V, columns=D).floor_s(H200)


def test_stages_are_their_layers_and_the_last_one_has_the_head():
    attention, mlp = halves(16, dropout=True)
    assert stage_floors_s(PROBLEM, 1000, H200) == pytest.approx([32 * (attention + mlp) + head(1000)])
    cut = replace(PROBLEM, layers=extents([10, 11.5, 10.5]))
    layers = [10 * (attention + mlp), 11.5 * (attention + mlp), 10.5 * (attention + mlp)]
    layers[1] += (attention - mlp) / 2  # it ends after the attention of a layer, whose MLP begins the next stage
    layers[2] += (mlp - attention) / 2 + head(1000)
    assert stage_floors_s(cut, 1000, H200) == pytest.approx(layers)


def test_projections_without_lora_count_as_frozen():
    only = replace(PROBLEM, adapters=(replace(ADAPTERS[1], dropout=0.1),), optimizers=("adamw",))
    mlp = MlpCost(tokens=T, width=D, inner=F, ranks=(0, 0, 0))
    qkv = SiblingsCost(tokens=T, in_features=D, out_features=(D, 1024, 1024), ranks=(8, 0, 8), dropout=True)
    o = SiblingsCost(tokens=T, in_features=D, out_features=(D,), ranks=(0,))
    layer = qkv.floor_s(H200) + o.frozen_floor_s(H200) + mlp.frozen_floor_s(H200)
    assert stage_floors_s(only, 0, H200) == pytest.approx([32 * layer + head(0)])


def test_float32_moves_twice_the_bytes():
    attention, mlp = halves(16, dropout=True, item=4)
    wide = replace(PROBLEM, item=4, layers=extents([31, 1]))
    assert stage_floors_s(wide, 1000, H200)[0] == pytest.approx(31 * (attention + mlp))
