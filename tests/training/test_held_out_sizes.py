"""Held-out sets in microbatches of a size of their own, and one evaluation for adapters that begin alike."""

from __future__ import annotations

import pytest
import small_jobs

from lorafusion_jax.config import load_config
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.planning import held_out
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.session.session import Session
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.training import train

HELD = {"plain": 1, "alike": 1, "pissa": 1, "more": 5, "most": 12}


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_base):
    """Adapters on sets of three sizes. Three have one set; one of them does not begin as the base."""
    folder = tmp_path_factory.mktemp("held-out")
    train_rows = small_jobs.write_rows(folder, "rows", 4, longest=6)
    sets = {count: small_jobs.write_rows(folder, f"held-{count}", count, longest=count) for count in HELD.values()}
    adapters = [
        {
            "name": name,
            "data": {"train": train_rows, "eval": sets[count]},
            "lora": {"rank": 2 + 2 * (name == "alike"), "kind": "pissa" if name in ("pissa", "more") else "lora"},
            "seed": number,
        }
        for number, (name, count) in enumerate(HELD.items())
    ]
    batch = {"capacity_tokens": 128, "tile_tokens": 16, "global_samples": 2}
    return load_config(small_jobs.write_job(folder, tiny_base, adapters, batch=batch, train={"block_layers": 1}))


def run(config, folder, smallest=16, alike=True):
    """Trains with sets of small sizes. Returns the held-out losses, whom the session evaluated and in which sizes."""
    evaluated, sizes = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_out, "SMALLEST", smallest)
        patch.setattr(held_out, "PASS_TOKENS", 0)
        held_out._size_of_set.cache_clear()
        if not alike:
            patch.setattr("lorafusion_jax.training.evaluations.first_loss_key", lambda *_: None)
        evaluate, of_stage = Session.evaluate, Stage.evaluate
        patch.setattr(Session, "evaluate", lambda session, name: evaluated.append(name) or evaluate(session, name))
        patch.setattr(
            Stage, "evaluate", lambda stage, rows, x: sizes.append(rows.tokens.shape[-1]) or of_stage(stage, rows, x)
        )
        train(config, folder)
    held_out._size_of_set.cache_clear()
    rows = read_rows(folder / "metrics.jsonl")
    losses = {(row["adapter"], row["step"]): row["eval_loss"] for row in rows if row["kind"] == "eval"}
    return losses, evaluated, sizes


@pytest.fixture(scope="module")
def joint(config, tmp_path_factory, kept_programs):
    return run(config, tmp_path_factory.mktemp("joint") / "run")


def test_losses_are_those_of_full_microbatches(config, joint, tmp_path):
    losses, _, sizes = joint
    before, _, sizes_before = run(config, tmp_path / "run", smallest=512)
    assert set(sizes_before) == {128}
    assert len(set(sizes)) > 1
    assert losses == pytest.approx(before, rel=1e-6)


def test_an_adapter_is_evaluated_alone_as_with_others(config, joint, tmp_path):
    alone, _, _ = run(select_adapters(config, ["more"]), tmp_path / "run")  # it does not begin as the base
    assert alone["more", 0] == joint[0]["more", 0]


def test_adapters_that_begin_alike_are_evaluated_once(config, joint, tmp_path):
    losses, evaluated, _ = joint
    first = evaluated[: len(evaluated) - len(HELD)]  # before the ends
    assert first == ["plain", "pissa", "more", "most"]
    apart, each, _ = run(config, tmp_path / "run", alike=False)
    assert len(each) == 2 * len(HELD)
    assert apart == losses
