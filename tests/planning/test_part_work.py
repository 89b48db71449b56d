"""Predicted times of layers with experts and delta nets, against those measured on one H200."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.workloads import SHAPES
from lorafusion_jax.families.delta_net import DeltaNet
from lorafusion_jax.families.experts import Experts
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.planning.prediction import HIDDEN_GATHERS, predicted_parts
from lorafusion_jax.planning.stages import row_weights
from scheduling import GatherCost, shared_parts, stages_from_parts

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
MIX = 1667  # Σ length² / Σ length of the benchmark's mixture
BOUND = 0.15  # the rates are those of whole runs, whose clocks are lower than those of one layer
MOE = ModelConfig(
    family="qwen3_moe", vocab_size=256, intermediate_size=6144, num_layers=1, qk_norm=True, hidden_size=2048,
    num_heads=32, num_kv_heads=4, head_dim=128, experts=Experts(width=2048, inner=768, count=128, active=8),
)  # fmt: skip
EIGHT = ModelConfig(
    family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=8, num_heads=32,
    num_kv_heads=8, head_dim=128,
)  # fmt: skip
MIXERS = {"gated delta net": LayerType(linear=True), "gated attention": LayerType(rope=Rope(channels=64))}


def hybrid(mixer: str) -> ModelConfig:
    return ModelConfig(
        family="qwen3_5_text", vocab_size=256, num_layers=1, qk_norm=True, norm_offset=1.0, attention_gate=True,
        delta_net=DeltaNet(width=4096, key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        pattern=(MIXERS[mixer],), hidden_size=4096, intermediate_size=12288, num_heads=16, num_kv_heads=4,
        head_dim=256,
    )  # fmt: skip


def rows(folder: str) -> list[dict]:
    lines = next((RESULTS / folder).glob("*.jsonl")).read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["section"] == "layer"]


def predicted_ms(model: ModelConfig, tokens: int, lengths: list[int]) -> float:
    layer, squares = predicted_parts(model, "h200").layer, sum(length**2 for length in lengths)
    return 1e3 * (layer.forward.seconds(tokens, squares) + layer.backward.seconds(tokens, squares))


@pytest.mark.parametrize("tokens", [8192, 16384])
def test_a_layer_of_experts_takes_what_is_predicted(tokens):
    measured = {row["adapters_on"]: row["ms"] for row in rows("experts_h200_2026-11-24") if row["tokens"] == tokens}
    predicted = predicted_ms(MOE, tokens, [tokens // 8] * 8)
    for adapters in ("attention", "attention, experts"):
        assert predicted == pytest.approx(measured[adapters], rel=BOUND)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_layer_of_a_hybrid_takes_what_is_predicted(mixer):
    layers = [row for row in rows("delta_net_h200_2026-11-27") if row["rule"] == "pallas_triton"]
    measured = {row["mixer"]: row["adapted_ms"] for row in layers}
    assert predicted_ms(hybrid(mixer), 8192, [1024] * 8) == pytest.approx(measured[mixer], rel=BOUND)


def test_other_devices_have_no_kernels_of_the_delta_rule():
    """What kernels spare of a layer is what an H200 measured beside XLA's form."""
    layer = hybrid("gated delta net").layer(0)
    spared = (row_weights(layer, hopper=False) - row_weights(layer)) / row_weights(layer)
    xla, kernels = (
        next(row["adapted_ms"] for row in rows("delta_net_h200_2026-11-27") if row["rule"] == rule)
        for rule in ("xla", "pallas_triton")
    )
    before = {row["mixer"]: row["adapted_ms"] for row in rows("delta_net_h200_2026-11-24")}
    assert xla == pytest.approx(before["gated delta net"], rel=0.02), "XLA's form has changed"
    assert spared == pytest.approx((xla - kernels) / kernels, rel=0.3)  # a layer's time is not of its products alone


@pytest.mark.parametrize("file", ["tensor.jsonl", "one_adapter.jsonl"])
def test_devices_that_share_layers_gain_what_is_predicted(file):
    """A microbatch on one GPU over that on two, whose all-reduces were fitted to these rows."""
    lines = (RESULTS / "tensor_h200_2026-11-27" / file).read_text().splitlines()
    measured = {row["mesh"]: row["slot_ms"] for row in map(json.loads, lines) if row["section"] == "run"}
    seconds = {}
    for count in (1, 2):
        parts = predicted_parts(EIGHT.part_of(count), "h200", table=EIGHT.vocab_size * EIGHT.hidden_size // count)
        costs = stages_from_parts(parts if count == 1 else shared_parts(parts, count), [8]).stages[0]
        seconds[count] = sum(part.seconds(8192, 8 * 1024**2) for part in (costs.forward, costs.backward))
    assert seconds[1] / seconds[2] == pytest.approx(measured["one"] / measured["tensor"], rel=0.05)


def test_gathering_is_hidden_as_measured():
    """A slot of 32B whose base two GPUs share. Rows without a sample attend to each other, too."""
    lines = (RESULTS / "end_to_end_h200_2026-11-29_two" / "end_to_end.jsonl").read_text().splitlines()
    (row,) = (row for row in map(json.loads, lines) if row["mesh"]["fsdp"] == 2)
    model, tokens = ModelConfig(**SHAPES[row["model"]]), row["capacity_tokens"]
    parts, table = predicted_parts(model, "h200"), model.vocab_size * model.hidden_size
    layer_bytes, useful = 2 * model.layer(0).num_parameters, tokens * row["density"]
    squares = MIX * useful + (tokens - useful) ** 2

    def slot_s(hidden: float) -> float:
        gather = GatherCost(layer_bytes=layer_bytes, table_bytes=2 * table, devices=2, hidden=hidden)
        costs = stages_from_parts(parts, [model.num_layers], gather=gather).stages[0]
        return sum(part.seconds(tokens, squares) for part in (costs.forward, costs.backward))

    assert slot_s(HIDDEN_GATHERS) == pytest.approx(row["slot_s"], rel=0.02)
    assert slot_s(HIDDEN_GATHERS + 0.5) < 0.95 * row["slot_s"]


def test_a_delta_net_grows_with_its_rows_alone():
    one, many = (predicted_ms(hybrid("gated delta net"), 8192, lengths) for lengths in ([8192], [1024] * 8))
    assert one == many
