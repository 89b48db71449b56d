"""`lorafusion verify RUN ADAPTER`: a few steps with the others of a run and alone."""

from __future__ import annotations

import json

import numpy as np

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.cli.main import run as lorafusion
from lorafusion_jax.training import compare_alone
from lorafusion_jax.training.compare_alone import compare, first_steps


def test_an_adapter_of_a_run_is_what_it_is_alone(whole_run, capsys):
    before = sorted(whole_run.run.rglob("*"))
    assert lorafusion(["verify", str(whole_run.run), "law", "--steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["others"], found["bound"], found["good"]) == (2, 1, 1e-5, True)
    assert len(found["differences"]) == 8, "A and B of two projections in two layers"
    assert sorted(whole_run.run.rglob("*")) == before


def test_a_difference_is_told_with_its_tensor(whole_run, monkeypatch, capsys):
    def spoilt(config, prepared, plan, name):
        array = np.full((2, 2), 1.0 + 1e-4 * len(config.adapters))
        return {"layers.0.self_attn.q_proj": (np.ones((2, 2)), array)}

    monkeypatch.setattr(compare_alone, "_train", spoilt)
    assert lorafusion(["verify", str(whole_run.run), "law"]) == 1
    shown = capsys.readouterr()
    assert "error[verify.different]" in shown.err
    assert "layers.0.self_attn.q_proj.lora_B" in shown.err


def test_an_adapter_that_the_run_does_not_have(whole_run, capsys):
    assert lorafusion(["verify", str(whole_run.run), "lwa"]) == 2
    assert "error[verify.adapter]" in capsys.readouterr().err


def test_a_nan_is_above_every_bound():
    good, bad = {"x": (np.ones((1, 1)),) * 2}, {"x": (np.ones((1, 1)), np.full((1, 1), np.nan))}
    assert np.isnan(compare(bad, good)[0].value)


def test_the_steps_are_those_of_the_plan(whole_run):
    plan = RunFolder(whole_run.run).read_plan()
    part = first_steps(plan, "law", 2)
    assert [batch for _, name, batch in part.batches_ending() if name == "law"] == [0, 1]
    assert part.slots == plan.slots[: part.num_slots]
