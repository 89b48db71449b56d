"""Compilation is what a user waits for: every program of a stage compiles once, also where layouts differ."""

import pytest
from more_cases import nightly

from lorafusion_jax.config import load_config
from lorafusion_jax.session import stage_state
from lorafusion_jax.session.programs import StagePrograms
from lorafusion_jax.training import train

LAYERS, ENDS = ("inputs", "forward", "backward", "inputs_without_dropout", "evaluate"), ("embed", "head", "totals")


@pytest.mark.parametrize("mesh", [{}, nightly({"stages": 2, "data": 2})], ids=["one", "stages of replicas"])
def test_every_program_compiles_once(write_job, write_rows, tmp_path, monkeypatch, mesh):
    made = []

    class Watched(StagePrograms):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(stage_state, "StagePrograms", Watched)
    equal = {"lora": {"rank": 4, "dropout": 0.1}, "batch": {"global_samples": 3}}  # two of a sweep share one update
    job = write_job(
        [
            {
                "name": name,
                "data": {"train": write_rows(name, 9, longest=8), "eval": write_rows("held", 3, longest=8)},
                **equal,
            }
            for name in ("law", "med")
        ],
        mesh=mesh,
        batch={"capacity_tokens": 64, "tile_tokens": 16},  # programs as those of tests/cli, which are on the disk
        save={"every_steps": 2},  # the pipeline drains and fills again in between
    )
    train(load_config(job), tmp_path / "run")
    assert len(made) == mesh.get("stages", 1)
    for number, programs in enumerate(made):
        wanted = dict.fromkeys((*LAYERS, *ENDS), 1)
        if number:
            wanted["embed"] = 0
        if number < len(made) - 1:
            wanted["head"] = wanted["totals"] = 0
        jitted = {name: getattr(programs.layers, name) for name in LAYERS}
        jitted |= {name: getattr(programs.ends, name) for name in ENDS}
        assert {name: program._cache_size() for name, program in jitted.items()} == wanted, f"stage {number}"
        assert {kind[0]: program._cache_size() for kind, program in programs.adapters.compiled.items()} == {
            "close": 1,
            "step": 1,
            "take": 1,
        }
