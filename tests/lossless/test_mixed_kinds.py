"""Adapters of all built-in kinds in one job: each trains as alone, resumes bitwise and is exported as what it is."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import small_jobs
from more_cases import mostly_nightly
from small_jobs import exported, largest_difference

from lorafusion_jax.cli.main import run
from lorafusion_jax.config import load_config
from lorafusion_jax.session.kind_programs import KindPrograms
from lorafusion_jax.training import train
from lorafusion_jax.training.verify import verify_exports

pytestmark = pytest.mark.usefixtures("kept_programs")
Q = {"targets": ["q_proj"]}  # each program of an adapter compiles kernels for all of its leaves
KINDS = {
    "vera": {"kind": "vera"} | Q,
    "fa": {"kind": "lora-fa", "targets": ["down_proj"]},  # gradients of q_proj cancel to less than the tolerance
    "pissa": {"kind": "pissa"} | Q,
    "bias": {"lora_bias": True, "targets": ["down_proj"]},
    "some": {"kind": "dora", "dropout": 0.2, "layers_to_transform": 1, "exclude": ["self_attn.q_proj"]},
    "pattern": {
        "rank_pattern": {r"0\.self_attn\..*": 5, "q_proj": 1},
        "alpha_pattern": {"down_proj": 7},
        "exclude": ".*1.mlp.*",
    },
}


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_base):
    folder = tmp_path_factory.mktemp("job")
    rows = {name: small_jobs.write_rows(folder, name, 8, longest=12) for name in (*KINDS, "plain")}

    def make(*names: str, **sections):
        adapters = [
            {
                "name": name,
                "data": {"train": rows[name], "eval": rows[name]},
                "batch": {"global_samples": 4},
                "lora": {"rank": 3, **KINDS.get(name, {})},
                "optim": {"lr": 0.02, "schedule": "constant"} | ({"lr_ratio": 4} if name == "bias" else {}),
            }
            for name in names
        ]
        return small_jobs.write_job(folder, tiny_base, adapters, **sections)

    return make


@pytest.fixture(scope="module")
def watched(job, tmp_path_factory):
    """The run of all, and for whom it prepared norms."""
    names, prepare = [], KindPrograms.prepare
    out = tmp_path_factory.mktemp("runs") / "joint"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            KindPrograms, "prepare", lambda self, *rest: (names.append(rest[0].name), prepare(self, *rest))[1]
        )
        assert run(["train", str(job(*KINDS)), "--out", str(out)]) == 0
    return out, names


@pytest.fixture(scope="module")
def joint(watched):
    return watched[0]


@pytest.mark.nightly  # compiles passes of six kinds once more; extending/test_toy_kind.py does so for others
def test_folders_compute_what_was_trained(joint):
    for check in verify_exports(joint).values():
        assert check.delta < 1e-6 * check.trained


def test_all_learn_and_folders_say_what_was_trained(joint):
    rows = [json.loads(line) for line in (joint / "metrics.jsonl").read_text().splitlines()]
    for name in KINDS:
        evals = [row["eval_loss"] for row in rows if row["kind"] == "eval" and row["adapter"] == name]
        assert evals[-1] < evals[0]
    configs = {name: json.loads((joint / f"adapters/{name}/latest/adapter_config.json").read_text()) for name in KINDS}
    assert {name for name in KINDS if configs[name]["peft_type"] != "LORA"} == {"vera"}
    assert {name for name in KINDS if configs[name].get("use_dora")} == {"some"}
    assert {name for name in KINDS if configs[name].get("lora_bias")} == {"bias"}
    assert (configs["some"]["layers_to_transform"], configs["some"]["exclude_modules"]) == ([1], ["self_attn.q_proj"])
    assert {key: configs["pattern"][key] for key in ("r", "rank_pattern", "alpha_pattern", "exclude_modules")} == {
        "r": 3,
        "rank_pattern": {r"0\.self_attn\..*": 5, "q_proj": 1},
        "alpha_pattern": {"down_proj": 7},
        "exclude_modules": ".*1.mlp.*",
    }
    ranks = {key: array.shape[0] for key, array in exported(joint, "pattern").items() if "lora_A" in key}
    assert {key.removeprefix("base_model.model.model.layers."): rank for key, rank in ranks.items()} == {
        "0.self_attn.q_proj.lora_A.weight": 5,
        "0.mlp.down_proj.lora_A.weight": 3,
        "1.self_attn.q_proj.lora_A.weight": 1,
    }
    assert {key.split(".layers.")[1].rsplit(".lora_", 1)[0] for key in exported(joint, "some")} == {"1.mlp.down_proj"}
    assert {array.shape[0] for key, array in exported(joint, "pissa").items() if "lora_A" in key} == {6}
    assert {key for key in exported(joint, "vera") if "layers" not in key} == {"base_model.vera_A", "base_model.vera_B"}


@pytest.mark.parametrize(
    ("name", "mesh"),
    mostly_nightly([(name, mesh) for mesh in ({}, {"stages": 2, "data": 2}) for name in KINDS], [("some", {})]),
)
def test_joint_equals_alone(joint, job, tmp_path, name, mesh):
    assert run(["train", str(job(name, mesh=mesh)), "--out", str(tmp_path / "alone")]) == 0
    assert largest_difference(exported(joint, name), exported(tmp_path / "alone", name)) < 1e-5


def test_a_folder_brings_its_patterns(joint, job, tmp_path, capsys):
    for name in ("pattern", "bias", "some"):
        start = {"init_from": str(joint / "adapters" / name / "latest")} | {
            key: value for key, value in KINDS[name].items() if key == "kind"
        }
        file = json.loads(job(name).read_text())
        file["adapters"][0]["lora"] = start
        (tmp_path / "job.yaml").write_text(json.dumps(file))
        for file in job(name).parent.glob("*.jsonl"):
            (tmp_path / file.name).write_text(file.read_text())
        config = load_config(tmp_path / "job.yaml")
        assert config.adapters[0].lora.patterns == load_config(job(name)).adapters[0].lora.patterns
        assert run(["check", str(tmp_path / "job.yaml")]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ("rank_pattern={k_prj: 2}", "'k_prj' of lora.rank_pattern matches none of its projections"),
        ("layers_to_transform=[0, 7]", "layers_to_transform has 7, and the model has layers 0 to 1"),
        ("exclude=q_pro", "lora.exclude=q_pro matches no projection"),
        ("exclude=[q_proj, down_proj]", "lora.exclude leaves no projection to train"),
        ("rank_pattern={(a+)+: 2}", "a group that repeats can take forever to match"),
        ("alpha_pattern={'(q': 2}", "it is no regular expression"),
        ("layers_to_transform=-1", "a whole number from 0 to 4095, or a list of them"),
    ],
)
def test_patterns_without_effect_are_errors(changes, says, job, capsys):
    assert run(["check", str(job("plain")), f"adapters.plain.lora.{changes}"]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_resumed_run_equals_uninterrupted_run(joint, job, tmp_path):
    def power_cut(event) -> None:
        if event.kind == "step" and event.adapter == "some" and event.step == 2:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(load_config(job(*KINDS, save={"every_steps": 1})), tmp_path / "cut", listeners=[power_cut])
    assert run(["resume", str(tmp_path / "cut")]) == 0
    for name in KINDS:
        ours, theirs = exported(tmp_path / "cut", name), exported(joint, name)
        for key in theirs:
            np.testing.assert_array_equal(ours[key], theirs[key])


def test_norms_are_computed_once_for_each_step(watched):
    """Twice before the first (for placeholders of the base, and for the base), and then after every step."""
    folder, names = watched
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps, blocks = sum(row["kind"] == "step" and row["adapter"] == "some" for row in rows), 2
    assert Counter(names) == {"some": blocks * (2 + steps)}


def test_dora_starts_without_dropout(job):
    config = load_config(job("plain"), ["adapters.plain.lora.kind=dora"])
    assert config.adapters[0].lora.dropout == 0
