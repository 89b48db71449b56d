"""`lora.init_from`: settings come from the folder, and the base model is compared by what is known of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import small_jobs
from safetensors.numpy import load_file, save_file

from lorafusion_jax.checkpoint.base_model import exported_base
from lorafusion_jax.checkpoint.warm_start_base import check_start_bases, unproven_bases
from lorafusion_jax.config import load_config
from lorafusion_jax.errors import CheckpointError, LoraFusionError
from lorafusion_jax.generation.sources import find_source
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.session.export import model_card
from lorafusion_jax.training import train

COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "f" * 40


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_base, kept_programs):
    """A run on a base that the job names by a relative path, and its job."""
    home = tmp_path_factory.mktemp("made")
    shutil.copytree(tiny_base, home / "base")
    train_file = small_jobs.write_rows(home, "law", 4, longest=8)
    adapter = {
        "name": "law",
        "data": {"train": train_file},
        "lora": {"rank": 4, "alpha": 8, "rslora": True, "targets": ["q_proj", "v_proj"], "dropout": 0},
    }
    job = small_jobs.write_job(
        home, "base", [adapter], batch={"global_samples": 2, "capacity_tokens": 64, "tile_tokens": 16}
    )
    assert train(load_config(job), home / "run").exit_code == 0
    return home


@pytest.fixture
def home(made, tmp_path):
    shutil.copytree(made, tmp_path / "home", symlinks=True)
    return tmp_path / "home"


def job_from(home, **lora):
    values = json.loads((home / "jobs.yaml").read_text())
    values["adapters"][0]["lora"] = {"init_from": "start", "dropout": 0} | lora
    (home / "jobs.yaml").write_text(json.dumps(values))
    if not (home / "start").exists():
        shutil.copytree(home / "run" / "adapters" / "law" / "latest", home / "start")
    return home / "jobs.yaml"


def as_of_another_program(home, **changes):
    """Takes away what only our folders have."""
    config = home / "start" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    for name in ("SHA256SUMS", "run.json"):
        (home / "start" / name).unlink(missing_ok=True)


def test_settings_come_from_the_folder(home):
    values = json.loads(job_from(home).read_text()) | {"lora": {"rank": 64, "targets": ["up_proj"]}}
    (home / "jobs.yaml").write_text(json.dumps(values))
    lora = load_config(home / "jobs.yaml").adapters[0].lora
    assert (lora.rank, lora.alpha, lora.rslora, lora.targets) == (4, 8.0, True, ["q_proj", "v_proj"])


def exported_texts(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in ("adapter_config.json", "README.md", "run.json")}


def test_an_exported_folder_tells_no_path_of_its_machine(home, made):
    texts = exported_texts(home / "run/adapters/law/latest")
    assert json.loads(texts["adapter_config.json"])["base_model_name_or_path"] == "base"
    assert "base_model:" not in texts["README.md"]
    assert not [name for name, text in texts.items() if str(made) in text]


def test_the_hub_name_that_a_job_gives_names_the_base(home):
    values = json.loads(job_from(home).read_text())
    values["base"]["hub_id"] = "org/Tiny-1B"
    (home / "jobs.yaml").write_text(json.dumps(values))
    config = load_config(home / "jobs.yaml")
    assert check_start_bases(config) == []
    assert exported_base(config) == ("org/Tiny-1B", None)
    assert "\nbase_model: org/Tiny-1B\n" in model_card(config.adapters[0], 3, config)
    values["base"]["hub_id"] = "../Tiny-1B"
    (home / "jobs.yaml").write_text(json.dumps(values))
    with pytest.raises(LoraFusionError, match="the name of a model on the hub, org/name"):
        load_config(home / "jobs.yaml")


def test_digests_tell_the_base_whatever_it_is_called(home):
    config = load_config(job_from(home))
    assert (check_start_bases(config), unproven_bases(config)) == ([], [])
    (home / "base").rename(home / "elsewhere")
    values = json.loads((home / "jobs.yaml").read_text())
    values["base"]["model"] = "elsewhere"
    (home / "jobs.yaml").write_text(json.dumps(values))
    assert check_start_bases(load_config(home / "jobs.yaml")) == []
    tensors = load_file(home / "elsewhere" / "model.safetensors")
    first = next(iter(tensors))
    save_file(
        tensors | {first: tensors[first] + 1}, home / "elsewhere" / "model.safetensors", metadata={"format": "pt"}
    )
    (error,) = check_start_bases(load_config(home / "jobs.yaml"))
    assert error.code == "peft.other-base"
    assert "model.safetensors" in error.why


def snapshot(commit):
    return f"/cache/models--org--tiny/snapshots/{commit}"


AT_COMMIT = {"model": "org/tiny", "revision": COMMIT}


@pytest.mark.parametrize(
    ("base_name", "revision", "base", "verdict"),
    [
        ("org/tiny", None, {"model": "org/tiny"}, "same"),
        ("org/other", None, {"model": "org/tiny"}, "other"),
        ("org/tiny", OTHER, AT_COMMIT, "other"),
        (snapshot(COMMIT), None, AT_COMMIT, "same"),
        (snapshot(OTHER), None, AT_COMMIT, "other"),
        ("org/Base", None, {}, "unknown"),
        ("/" + "x" * 300, None, {}, "unknown"),  # longer than a name of a file can be
        ("org/other", None, {}, "other"),
        (None, None, {}, "unknown"),
        ("/somewhere/else", None, {}, "unknown"),
    ],
)
def test_what_names_tell_of_the_base(home, base_name, revision, base, verdict):
    job_from(home)
    as_of_another_program(home, base_model_name_or_path=base_name, revision=revision)
    config = load_config(home / "jobs.yaml")
    config = config.model_copy(update={"base": config.base.model_copy(update=base)})
    told = "other" if check_start_bases(config) else "unknown" if unproven_bases(config) else "same"
    assert told == verdict


def test_a_base_that_may_not_be_looked_at_is_not_here(home, monkeypatch):
    """As /root/models of the container in which an adapter was trained."""
    look = Path.is_dir
    closed = "/closed/models/tiny"

    def refuse(path, **options):
        if str(path) == closed:
            raise PermissionError(13, "Permission denied", closed)
        return look(path, **options)

    monkeypatch.setattr(Path, "is_dir", refuse)
    job_from(home)
    as_of_another_program(home, base_model_name_or_path=closed, revision=None)
    config = load_config(home / "jobs.yaml")
    assert (check_start_bases(config), len(unproven_bases(config))) == ([], 1)
    with pytest.raises(CheckpointError, match=r"(?s)model\.missing.*--base FOLDER"):
        find_source(home / "start")


def test_who_says_that_the_base_is_the_same_is_believed_over_its_name(home):
    job_from(home)
    as_of_another_program(home, base_model_name_or_path="unsloth/tiny", revision=None)
    config = load_config(home / "jobs.yaml")
    (error,) = check_start_bases(config)
    assert error.fix.endswith("lora.same_base: true")
    config = load_config(home / "jobs.yaml", ["lora.same_base=true"])
    assert check_start_bases(config) == []
    assert len(unproven_bases(config)) == 1  # it is stated
    changed = home / "changed"
    shutil.copytree(home / "base", changed)
    tensors = load_file(changed / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, changed / "model.safetensors")
    as_of_another_program(home, base_model_name_or_path=str(changed), revision=None)
    (error,) = check_start_bases(config)  # files say more than names and settings
    assert "same_base" not in error.fix


def test_a_contradiction_names_both(home):
    with pytest.raises(LoraFusionError) as caught:
        train(load_config(job_from(home, rank=2)), home / "second")
    assert caught.value.code == "peft.other-settings"
    assert "the folder has rank 4" in caught.value.why
    assert "the job file has rank 2" in caught.value.why


SOME = {  # what adapter_config.json says → projections that have tensors
    "a list of layers": ({"layers_to_transform": [1]}, ["1.self_attn.q_proj", "1.self_attn.v_proj"]),
    "an expression": (
        {"target_modules": r"model\.layers\.(0\.self_attn\.v|1\.self_attn\.q)_proj"},
        ["0.self_attn.v_proj", "1.self_attn.q_proj"],
    ),
    "whole paths": (
        {"target_modules": ["model.layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj"]},
        ["0.self_attn.q_proj", "0.self_attn.v_proj"],
    ),
}


def start_with(home, settings, kept):
    """A job whose start is a folder of another program, with tensors for these projections only."""
    job = job_from(home)
    file = home / "start" / "adapter_model.safetensors"
    tensors = {key: tensor for key, tensor in load_file(file).items() if any(f".{path}." in key for path in kept)}
    save_file(tensors, file)
    as_of_another_program(home, **settings)
    return job, tensors


@pytest.mark.parametrize("what", SOME)
def test_an_adapter_of_some_projections_goes_on_on_these_alone(what, home, kept_programs):
    """Its export has no tensors for the others."""
    job, tensors = start_with(home, *SOME[what])
    assert train(load_config(job), home / "second").exit_code == 0
    trained = small_jobs.exported(home / "second", "law")
    assert trained.keys() == tensors.keys()
    assert all((trained[key] != tensors[key]).any() for key in tensors if "lora_B" in key)
    _, arrays = read_adapter(home / "second" / "adapters" / "law" / "latest")
    assert sorted(arrays) == sorted(f"layers.{path}" for path in SOME[what][1])


def test_projections_that_the_folder_lacks_are_told(home):
    job, _ = start_with(home, *SOME["an expression"])
    values = json.loads(job.read_text())
    values["adapters"][0]["lora"] |= {"layers_to_transform": None, "exclude": []}
    job.write_text(json.dumps(values))
    with pytest.raises(LoraFusionError) as caught:
        train(load_config(job), home / "second")
    assert caught.value.code == "peft.other-settings"
    assert "layers.0.self_attn.q_proj" in caught.value.where
    assert not (home / "second").exists()
