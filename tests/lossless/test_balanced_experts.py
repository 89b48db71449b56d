"""The promises of training hold with a load-balancing loss of the routers."""

from __future__ import annotations

import numpy as np
import pytest
from adapter_folders import distance, weights
from small_jobs import write_job, write_rows
from watched_runs import crash_after

from lorafusion_jax.config import load_config
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.families.experts import Experts, Router
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.planning.checks import layer_problems
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import RunFolder, resume, train

pytestmark = pytest.mark.usefixtures("kept_programs")
TOLERANCE = 1e-5  # sums of float32 in another order, carried along by a few steps
FACTOR = 3.0  # large, so that it decides what is learned
MESH = {"stages": 2}  # the second one has no router, and the loss of the first


@pytest.fixture(scope="module")
def run(make_base, tmp_path_factory):
    """run(names, factor, rates, **sections) → the folder of a run on a layer with experts and one with an MLP.

    With `cut_after` it ends as by a kill after so many events of a kind, and is resumed.
    """
    folder = tmp_path_factory.mktemp("balanced")
    experts = Experts(width=32, inner=12, count=5, active=2, router=Router(normalise=False))
    pattern = (LayerType(rope=Rope()), LayerType(rope=Rope(), dense=True))
    base = make_base(folder / "base", family="qwen3_moe", qk_norm=True, experts=experts, pattern=pattern)
    done: dict[str, RunFolder] = {}

    def run(names=("oak", "elm"), factor=FACTOR, rates=None, cut_after=None, **sections) -> RunFolder:
        if (key := str((names, factor, rates, cut_after, sections))) not in done:
            adapters = [
                {
                    "name": name,
                    "data": {"train": write_rows(folder, name, 6, longest=8)},
                    "lora": {"rank": 2 + len(name) % 2, "targets": ["v_proj"], "dropout": 0},
                    "optim": {"name": "sgd", "lr": (rates or {}).get(name, 0.05), "clip": 0, "schedule": "constant"},
                    "batch": {"global_samples": 3},
                }
                for name in names
            ]
            config = load_config(write_job(folder, base, adapters, train={"router_aux": factor}, **sections))
            out = folder / f"run-{len(done)}"
            if cut_after is not None:
                with pytest.raises(KeyboardInterrupt):
                    train(config, out, listeners=[crash_after(*cut_after)])
            result = train(config, out) if cut_after is None else resume(out)
            assert result.exit_code == (3 if rates else 0)
            done[key] = RunFolder(out)
        return done[key]

    return run


def losses(folder: RunFolder, name: str) -> list[float]:
    rows = read_rows(folder.path / "metrics.jsonl")
    return [row["loss"] for row in rows if row["kind"] == "step" and row["adapter"] == name]


def test_joint_training_on_stages_equals_separate_training_on_a_device(run):
    joint, alone = run(mesh=MESH), run(("elm",))
    assert distance(weights(joint, "elm"), weights(alone, "elm")) < TOLERANCE
    np.testing.assert_allclose(losses(joint, "elm"), losses(alone, "elm"), rtol=TOLERANCE)


def test_the_loss_of_the_routers_is_part_of_the_loss_and_changes_the_adapter(run):
    much, less = run(("elm",)), run(("elm",), FACTOR / 3)  # programs are the same
    added = losses(much, "elm")[0] - losses(less, "elm")[0]
    assert 2 * 0.9 < added / (FACTOR - FACTOR / 3) < 5  # k where experts are chosen alike, E where always the same
    assert distance(weights(much, "elm"), weights(less, "elm")) > 1e-3


def test_an_adapter_that_diverges_leaves_the_other_bitwise(run):
    broken, healthy = weights(run(mesh=MESH, rates={"oak": 1e37}), "elm"), weights(run(mesh=MESH), "elm")
    for key in healthy:
        np.testing.assert_array_equal(broken[key], healthy[key], err_msg=key)


@pytest.mark.parametrize("cut_after", [("saved", 1), ("step", 3)], ids=["at a checkpoint", "after one"])
def test_a_killed_run_resumes_bitwise(cut_after, run):
    save = {"every_steps": 1}
    whole, resumed = run(mesh=MESH, save=save), run(mesh=MESH, save=save, cut_after=cut_after)
    for name in ("oak", "elm"):
        assert losses(resumed, name) == losses(whole, name)
        for key, array in weights(whole, name).items():
            np.testing.assert_array_equal(weights(resumed, name)[key], array, err_msg=f"{name} {key}")


@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
def test_a_base_whose_routers_have_no_such_loss_is_refused(make_base, tmp_path, family):
    experts = Experts(width=32, inner=20, count=4, active=2, router=Router(score="sigmoid", correction=True))
    base = make_base(tmp_path / "base", family=family, **({} if family == "llama" else {"experts": experts}))
    adapters = [{"name": "elm", "data": {"train": write_rows(tmp_path, "elm", 3)}, "lora": {"targets": ["v_proj"]}}]
    config = load_config(write_job(tmp_path, base, adapters, train={"router_aux": 0.001}))
    (problem,) = layer_problems(config)[1]
    with pytest.raises(ConfigError, match=f"router_aux=0.001, and this base .{family}. has") as raised:
        train(config, tmp_path / "run")
    assert str(raised.value) == str(problem), "lorafusion check says something else"
