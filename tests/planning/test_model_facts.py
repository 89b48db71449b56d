"""The online scheduler counts with the models that are trained, if it is given them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from shapes import GEMMA_4_E2B

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.planning.memory import MemoryProblem, stage_memory
from lorafusion_jax.planning.model_facts import ModelFacts
from lorafusion_jax.planning.stages import stage_layers
from scheduling.online import SHAPES, Job, Mesh, ModelShape, Rates, ShapeFacts

KIND = ("h200", 140.0)
PLAIN = ModelConfig(
    family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(ModelShape):
    name: str = ""


def shape_of(model: ModelConfig, name: str) -> Named:
    keys = [key for key in ModelShape.__dataclass_fields__ if hasattr(model, key)]
    return Named(name=name, **{key: getattr(model, key) for key in keys})


def job(base, **changes):
    values = {"name": "law", "user": "ann", "arrival_s": 0.0, "lengths": [900, 500, 1100], "steps": 10}
    return Job(**(values | {"base": base, "global_batch": 8} | changes))


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_bytes_are_those_of_the_memory_plan(stages, quantize):
    facts, law = ModelFacts({"tall": PLAIN}, quantize), job(shape_of(PLAIN, "tall"), rank=24)
    problem = MemoryProblem(
        model=PLAIN,
        adapters=(AdapterSpec(name="law", rank=24, alpha=24.0),),
        optimizers=("adamw",),
        layers=stage_layers(PLAIN, stages),
        capacity_tokens=4096,
        remat="nothing",
        quantize=quantize,
    )
    planned = max(stage.total for stage in stage_memory(problem))
    counted = facts.stage_bytes(law, stages, True).total(4096, facts.trainable_bytes(law, stages))
    assert counted == pytest.approx(planned, rel=0.02)  # a straight line in the tokens; programs have steps


def test_places_take_memory_whoever_is_in_them():
    places = [AdapterSpec(name=f"place-{number}", rank=32, alpha=32.0) for number in range(6)]
    facts, small = ModelFacts({"tall": PLAIN}, places={"tall": places}), job(shape_of(PLAIN, "tall"), rank=24)
    problem = MemoryProblem(model=PLAIN, adapters=tuple(places), optimizers=("adamw",) * 6,
                            layers=stage_layers(PLAIN, 1), capacity_tokens=4096, remat="nothing")  # fmt: skip
    (stage,) = stage_memory(problem)
    assert facts.trainable_bytes(small, 1) == 0
    assert facts.stage_bytes(small, 1, True).total(4096, 0) == pytest.approx(stage.total, rel=0.02)
    assert facts.trainable_bytes(job(small.base, rank=64), 1) > 0  # its session gets a larger place


def test_a_plain_decoder_is_known_by_its_sizes_as_well():
    """The table of sizes and the model agree in time, and within a tenth in room."""
    law = job(shape_of(PLAIN, "tall"))
    ours, sizes = Rates(facts=ModelFacts({"tall": PLAIN})), Rates(facts=ShapeFacts())
    assert law.shape.parameters == SHAPES["llama-3.1-8b"].parameters
    mesh = Mesh(1, 1, 8192)
    step_s = [rates.on_mesh([law], KIND, mesh).steps_per_s[0] for rates in (ours, sizes)]
    assert step_s[0] == pytest.approx(step_s[1], rel=0.02)
    gib = [rates.memory_gib([law], KIND, mesh) for rates in (ours, sizes)]
    assert gib[0] == pytest.approx(gib[1], rel=0.1)


def test_a_base_that_has_one_stage_is_never_cut():
    """Neither where a device is too small for it, nor for samples that are longer than usual."""
    small = job(shape_of(GEMMA_4_E2B, "small"))
    rates = Rates(facts=ModelFacts({"small": GEMMA_4_E2B}))
    assert rates.isolated_rate(small, KIND, 4).mesh.stages == 1
    assert rates.isolated_rate(job(small.base, lengths=[12000]), KIND, 4).mesh.stages == 1
    assert rates.isolated_rate(small, ("h200", 8.0), 4) is None


def test_a_window_makes_long_samples_cheaper():
    near = replace(PLAIN, family="mistral", sliding_window=256)
    facts = ModelFacts({"far": PLAIN, "near": near})
    times = [facts.stage_costs(job(shape_of(PLAIN, name)), "h200", 1, False) for name in ("far", "near")]
    assert times[1].stages[0].forward.square_s < times[0].stages[0].forward.square_s / 2
