"""The online scheduler counts with the models that are trained, if it is given them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from shapes import GEMMA_4_E2B

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.places import Places
from lorafusion_jax.config.run_sections import BaseSettings, BatchSettings, MeshSettings, TrainSettings
from lorafusion_jax.config.stack import session_config
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.planning.memory import MemoryProblem, memory_problem, stage_memory
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


def session(base=None, places=None, **train):
    """The job of a session, as of a service with these settings."""
    settings = {"batch": BatchSettings(), "train": TrainSettings(**train), "directory": ""}
    base = BaseSettings(model="tall", **(base or {}))
    return session_config(base, MeshSettings(), Places.of(places or {32: 6}), **settings)


@pytest.mark.parametrize("stages", [1, 3])
def test_bytes_are_those_of_the_memory_plan(stages):
    facts, law = ModelFacts({"tall": PLAIN}), job(shape_of(PLAIN, "tall"), rank=24)
    adapters = (AdapterSpec(name="law", rank=24, alpha=24.0),)
    problem = MemoryProblem(model=PLAIN, adapters=adapters, optimizers=("adamw",), layers=stage_layers(PLAIN, stages),
                            capacity_tokens=4096, remat="nothing")  # fmt: skip
    planned = max(stage.total for stage in stage_memory(problem))
    counted = facts.stage_bytes([law], stages, True).total(4096, facts.trainable_bytes([law], stages))
    assert counted == pytest.approx(planned, rel=0.02)  # a straight line in the tokens; programs have steps


@pytest.mark.parametrize("settings", [{}, {"base": {"quantize": "nf4"}}, {"base": {"dtype": "float32"}}])
@pytest.mark.parametrize("remat", ["auto", "everything", "nothing"])
def test_bytes_are_those_of_the_session_that_opens(settings, remat):
    """Its places take memory whoever is in them, in the type of the base, and it saves for backward what it is told."""
    told = session(remat=remat, **settings)
    facts, law = ModelFacts({"tall": PLAIN}, {"tall": told}), job(shape_of(PLAIN, "tall"), rank=24)
    for recompute in (False, True):
        saves = remat if remat != "auto" else "nothing" if recompute else "gemm_inputs"
        (stage,) = stage_memory(replace(memory_problem(told, PLAIN), capacity_tokens=4096, remat=saves))
        assert facts.stage_bytes([law], 1, recompute).total(4096, 0) == pytest.approx(stage.total, rel=0.02)
        slower = facts.stage_costs(law, "h200", 1, recompute).stages[0].backward.token_s
        assert (slower > facts.stage_costs(law, "h200", 1, False).stages[0].backward.token_s) is (
            remat == "auto" and recompute
        )


def test_adapters_without_a_place_take_memory_of_their_own():
    facts = ModelFacts({"tall": PLAIN}, {"tall": session(places={16: 2, 64: 1})})
    base = shape_of(PLAIN, "tall")

    def beyond(*ranks: int) -> float:
        return facts.trainable_bytes(
            [job(base, name=f"job-{number}", rank=rank) for number, rank in enumerate(ranks)], 1
        )

    assert beyond(16, 8) == beyond(16, 16, 16) == beyond(4, 64, 16) == 0
    assert 0 < beyond(16, 16, 16, 16) < beyond(64, 64) < beyond(64, 64, 64) < beyond(128, 64, 64)


@pytest.mark.parametrize(("kind", "places"), [("dora", {16: 2}), ("vera", {16: 2}), ("dora", {16: 1, "dora:64": 1})])
def test_a_job_of_another_kind_takes_the_memory_of_a_session_with_a_place_for_it(kind, places):
    """A place of rank 16 holds no DoRA, and its products are kept for backward as well."""
    told = session(places=places, remat="gemm_inputs")
    facts, base = ModelFacts({"tall": PLAIN}, {"tall": told}), shape_of(PLAIN, "tall")
    jobs = [job(base, name="law", rank=16), job(base, name="med", rank=16, kind=kind)]
    has_place = f"{kind}:64" in places
    opened = session(places=places if has_place else places | {f"{kind}:16": 1}, remat="gemm_inputs")
    (stage,) = stage_memory(replace(memory_problem(opened, PLAIN), capacity_tokens=4096, remat="gemm_inputs"))
    counted = facts.stage_bytes(jobs, 1, False).total(4096, facts.trainable_bytes(jobs, 1))
    assert counted == pytest.approx(stage.total, rel=0.03)
    assert (facts.trainable_bytes(jobs, 1) == 0) is has_place
    plain = [job(base, name="law"), job(base, name="med")]
    assert has_place or counted > facts.stage_bytes(plain, 1, False).total(4096, facts.trainable_bytes(plain, 1))


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
