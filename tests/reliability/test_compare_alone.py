"""`lorafusion verify RUN ADAPTER`: a few steps with the others of a run and alone."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_jobs
from more_cases import mostly_nightly, nightly
from planted_scale import scale_a_row_of_each_tile
from random_sweeps import NAMES, random_sweep

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.cli.main import run as lorafusion
from lorafusion_jax.config import load_config
from lorafusion_jax.data.prepare import Prepared, prepare
from lorafusion_jax.planning.training_plan import plan_training
from lorafusion_jax.session import assembler
from lorafusion_jax.session.batch_end import BatchEnds
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.training import compare_alone
from lorafusion_jax.training.compare_alone import (
    ROUNDING,
    Watched,
    WatchedSession,
    compare,
    compare_job,
    first_steps,
    packed_otherwise,
)
from lorafusion_jax.training.job import Job
from scheduling import verify_plan

NAME, STEPS = "law", 3  # adamw at a rate of 1e-2, dropout, batches of several samples


def test_an_adapter_of_a_run_is_what_it_is_alone(whole_run, capsys):
    before = sorted(whole_run.run.rglob("*"))
    assert lorafusion(["verify", str(whole_run.run), "law", "--steps", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["others"], report["good"]) == (2, 1, True)
    tensors = 8  # A and B of two projections in two layers
    assert len(report["differences"]) == 2 * (1 + tensors) + 2 * tensors, "of both steps; first weights, and what moved"
    assert max(difference["bound"] for difference in report["differences"]) <= 1e-5
    assert sorted(whole_run.run.rglob("*")) == before


def test_a_difference_is_told_with_its_step_and_tensor(whole_run, monkeypatch, capsys):
    spoilt = replace_gradient(compare_alone.WatchedSession.run)
    monkeypatch.setattr(compare_alone.WatchedSession, "run", spoilt)
    assert lorafusion(["verify", str(whole_run.run), "law", "--steps", "2"]) == 1
    shown = capsys.readouterr()
    assert "error[verify.different]" in shown.err
    assert "step 2, layers.1.self_attn.q_proj.lora_b differs by 1.0e-04" in shown.err


def replace_gradient(run):
    def spoilt(self, follow=None):
        watched = run(self, follow)
        if follow is not None:
            return watched
        leaf = "layers.self_attn.q_proj.lora_b"
        first, gradient = watched.gradients
        factor = np.array([1.0, 1 + 1e-4], np.float32)[:, None, None]
        return replace(watched, gradients=[first, gradient | {leaf: gradient[leaf] * factor}])

    return spoilt


def test_an_adapter_that_the_run_does_not_have(whole_run, capsys):
    assert lorafusion(["verify", str(whole_run.run), "lwa"]) == 2
    assert "error[verify.adapter]" in capsys.readouterr().err


def test_a_nan_is_above_every_bound():
    good, bad = watched(1.0), watched(np.nan)
    assert [difference.excess for difference in compare(bad, good, good, 1e-6)][:2] == [np.inf, np.inf]
    assert max(difference.excess for difference in compare(good, good, good, 1e-6)) == 0


def watched(value):
    leaf = {"layers.q_proj.lora_a": np.full((2, 1), value)}
    return Watched(losses=[1.0], gradients=[leaf], closed=[], first=leaf, last=leaf)


def test_the_steps_are_those_of_the_plan(whole_run):
    plan = RunFolder(whole_run.run).read_plan()
    part = first_steps(plan, "law", 2)
    assert [batch for _, name, batch in part.batches_ending() if name == "law"] == [0, 1]
    assert part.slots == plan.slots[: part.num_slots]


def test_the_other_packing_is_a_plan_of_the_same_samples(whole_run):
    plan = RunFolder(whole_run.run).read_plan()
    other = packed_otherwise(plan)
    verify_plan(other, plan.jobs)
    assert [set(slot.samples) for slot in other.slots] != [set(slot.samples) for slot in plan.slots]


SWEEPS = [("float32", seed) for seed in range(40)] + [("bfloat16", seed) for seed in range(16)]


@pytest.mark.parametrize(("dtype", "seed"), mostly_nightly(SWEEPS, [("float32", 3)]))
def test_no_false_alarm(dtype, seed, tmp_path, tiny_base, kept_programs, record_property):
    """Adam turns the rounding of tiny gradients into whole steps; gradients at the same weights do not."""
    config, prepared, plan = random_sweep(tmp_path, tiny_base, seed, dtype)
    name = NAMES[seed // 2 % len(NAMES)]
    report = compare_job(config, prepared, plan, name, STEPS)
    record(record_property, report.differences[0])
    assert report.good, report.differences[0]
    assert report.others > 0


def record(record_property, worst):
    """For the rows of `benchmarks.verify_sweeps`."""
    record_property("of_bound", f"{worst.excess:.3g}")
    record_property("step", worst.step)
    record_property("tensor", worst.tensor)


# --- planted faults: each only in the joint training ---


@pytest.fixture(scope="module")
def sessions(tmp_path_factory, tiny_base, kept_programs):
    """Three sessions of one job, with the programs of `whole_run`: jointly, alone, alone and packed otherwise."""
    folder = tmp_path_factory.mktemp("sweep")
    entries = [
        {"name": name, "data": {"train": small_jobs.write_rows(folder, name, 16, longest=4)}, "epochs": 2}
        for name in (NAME, "med")
    ]
    batch = {"capacity_tokens": 64, "tile_tokens": 16, "global_samples": 5}
    lora, optim = {"rank": 4, "dropout": 0.1}, {"lr": 1e-2, "weight_decay": 0.1}
    config = load_config(small_jobs.write_job(folder, tiny_base, entries, batch=batch, lora=lora, optim=optim))
    prepared = prepare(config)
    plan = plan_training(config, prepared)
    own_config = config.model_copy(update={"adapters": (config.adapter(NAME),)})
    own_data = Prepared(tokenizer=prepared.tokenizer, adapters={NAME: prepared.adapters[NAME]})
    alone = first_steps(plan_training(own_config, own_data), NAME, STEPS)
    jobs = (
        Job(config=config, prepared=prepared, plan=first_steps(plan, NAME, STEPS)),
        Job(config=own_config, prepared=own_data, plan=alone),
        Job(config=own_config, prepared=own_data, plan=packed_otherwise(alone)),
    )
    opened = [WatchedSession(job, NAME) for job in jobs]
    yield opened
    for session in opened:
        session.close()


def of_piece(change):
    """Changes the last sample of the adapter in its first slot of two."""

    def plant(patch):
        original = assembler.Assembler.pieces

        def pieces(self, part, tasks):
            originals = original(self, part, tasks)
            own_indices = [at for at, piece in enumerate(originals) if piece.adapter == self._index[NAME]]
            return change(originals, own_indices) if len(own_indices) > 1 else originals

        patch.setattr(assembler.Assembler, "pieces", pieces)

    return plant


def with_last(change):
    def changed(pieces, own_indices):
        return [change(piece) if index == own_indices[-1] else piece for index, piece in enumerate(pieces)]

    return of_piece(changed)


def of_rows(change):
    """Changes arrays of every microbatch that holds the adapter."""

    def plant(patch):
        original = assembler.assemble

        def assemble(pieces, **sizes):
            batch = original(pieces, **sizes)
            return change(batch) if len({piece.adapter for piece in pieces}) > 1 else batch

        patch.setattr(assembler, "assemble", assemble)

    return plant


def of_step(change):
    def plant(patch):
        original = BatchEnds.step

        def step(self, adapter, numbers):
            return original(self, adapter, change(numbers) if adapter == NAME else numbers)

        patch.setattr(BatchEnds, "step", step)

    return plant


def other_state(patch):
    """The adapter steps with the optimizer state that it had a step before."""
    original, states = Stage.step, []

    def step(self, index, summaries, numbers):
        if self.names[index] == NAME:
            states.append(jax.tree.map(jnp.copy, self.optimizers[NAME]))
            self.optimizers[NAME] = jax.tree.map(jnp.copy, states[max(len(states) - 2, 0)])
        return original(self, index, summaries, numbers)

    patch.setattr(Stage, "step", step)


def repeated(pieces, own_indices):
    """A sample takes the place of another, a longer one."""
    short, long = sorted(own_indices[-2:], key=lambda index: len(pieces[index].tokens))
    return [pieces[short] if index == long else piece for index, piece in enumerate(pieces)]


def shifted(array):
    return np.roll(array, 1)


FAULTS = {
    "key of another sample": with_last(lambda piece: piece._replace(key=piece.key ^ 1)),
    "lost row": with_last(lambda piece: piece._replace(loss_mask=np.where(first_learnt(piece), 0, piece.loss_mask))),
    "lost sample": of_piece(
        lambda pieces, own_indices: [p for index, p in enumerate(pieces) if index != own_indices[-1]]
    ),
    "sample twice": of_piece(repeated),
    "weight of another batch": with_last(lambda piece: piece._replace(weight=piece.weight * 1.01)),
    "loss mask moved by one": with_last(lambda piece: piece._replace(loss_mask=shifted(piece.loss_mask))),
    "another token": with_last(lambda piece: piece._replace(tokens=np.where(first_learnt(piece), 7, piece.tokens))),
    "dropout of other positions": of_rows(lambda rows: rows._replace(row_key=shifted(rows.row_key))),
    "two rows of a position": of_rows(lambda rows: rows._replace(positions=rows.positions // 2)),
    "attention sees the sample before": of_rows(lambda rows: rows._replace(segment_ids=rows.segment_ids // 2)),
    "a tile of another adapter": of_rows(lambda rows: rows._replace(tile_adapter=tile_of_first(rows))),
    "another rate": of_step(lambda numbers: numbers._replace(lr=numbers.lr * np.float32(1.0001))),
    "another decay": of_step(lambda numbers: numbers._replace(weight_decay=numbers.weight_decay + np.float32(1e-3))),
    "state of the step before": other_state,
}


def first_learnt(piece):
    return np.arange(len(piece.loss_mask)) == np.flatnonzero(piece.loss_mask)[0]


def tile_of_first(rows):
    """The first tile that two adapters share a border at goes to the adapter before."""
    tiles = rows.tile_adapter.copy()
    border = next(tile for tile in range(1, len(tiles)) if tiles[tile] != tiles[tile - 1] and tiles[tile] >= 0)
    tiles[border] = tiles[border - 1]
    return tiles


@pytest.mark.parametrize(
    "fault", [None, *mostly_nightly(FAULTS, ["key of another sample", "lost row", "another rate"])]
)
def test_planted_faults_are_found(fault, sessions, monkeypatch, record_property):
    joint, alone, otherwise = sessions
    with monkeypatch.context() as patch:
        if fault is not None:
            FAULTS[fault](patch)
        followed = joint.run()
    differences = compare(followed, alone.run(followed), otherwise.run(followed), ROUNDING["float32"])
    record(record_property, differences[0])
    assert (differences[0].excess > 1) == (fault is not None), differences[:3]


@pytest.mark.parametrize("factor", [nightly(0.9)])
def test_a_wrong_dropout_scale_in_a_few_rows_is_found(factor, tmp_path, tiny_base, monkeypatch, forget_programs):
    """One row of every tile, where adapters share a microbatch."""
    config, prepared, plan = random_sweep(tmp_path, tiny_base, 3)
    assert config.adapter("tea").lora.dropout > 0
    scale_a_row_of_each_tile(monkeypatch, factor)
    forget_programs()
    assert compare_job(config, prepared, plan, "tea", 2).differences[0].excess > 10
    forget_programs()
