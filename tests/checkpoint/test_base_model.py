"""A base model that is not there: the folder is named before any hub, with the data files that are missing, too."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lorafusion_jax.checkpoint.base_model import base_directory, base_in_commands, find_base
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.errors import CheckpointError, ErrorList
from lorafusion_jax.generation.sources import find_source


def job(folder, model, **data):
    adapters = [{"name": name, "data": {"train": train}} for name, train in data.items()]
    return JobConfig.model_validate(
        {
            "base": {"model": model},
            "adapters": adapters or [{"name": "ash", "data": {"train": "ash.csv"}}],
            "directory": str(folder),
        }
    )


@pytest.fixture
def hub(monkeypatch):
    """A hub that cannot be reached, and the names that it was asked for."""
    asked = []

    def snapshot_download(name, **options):
        asked.append(name)
        raise ConnectionError("[Errno -2] Name or service not known")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    return asked


def test_beside_other_models_a_name_is_a_folder(tmp_path, hub):
    (tmp_path / "weights" / "Qwen3-8B").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"model\.missing.*weights/Qwen3-8b") as caught:
        base_directory(job(tmp_path, "weights/Qwen3-8b"))
    assert caught.value.fix == "did you mean 'weights/Qwen3-8B'?"
    (tmp_path / "weights" / "Qwen3-8B" / "config.json").touch()
    with pytest.raises(CheckpointError) as caught:
        base_directory(job(tmp_path, "weights/gemma"))
    assert caught.value.fix.startswith("weights/Qwen3-8B; or base.model: ")
    assert hub == []


def test_a_folder_of_models_is_no_model_and_those_in_it_are_named(tmp_path):
    (tmp_path / "models" / "8B").mkdir(parents=True)
    assert find_base(tmp_path, "models") == tmp_path / "models"
    (tmp_path / "models" / "8B" / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"model\.missing(.|\n)*fix: models/8B; or"):
        find_base(tmp_path, "models")
    with pytest.raises(CheckpointError, match=r"generate\.source(.|\n)*fix: .*models/8B; or lorafusion generate RUN"):
        find_source(tmp_path / "models")


def test_commands_name_a_base_from_where_they_are_typed(tmp_path, monkeypatch):
    """A job file names it from its own folder, which is mostly another one."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "my weights").mkdir()
    monkeypatch.chdir(tmp_path)
    assert base_in_commands(job(tmp_path / "jobs", "../my weights")) == "'my weights'"
    monkeypatch.chdir("jobs")
    assert base_in_commands(job(tmp_path / "jobs", "../my weights")) == f"'{tmp_path}/my weights'"
    assert base_in_commands(job(tmp_path / "jobs", "org/base")) == "org/base"


def test_a_hub_that_does_not_answer_is_the_second_thing_said(tmp_path, hub):
    with pytest.raises(CheckpointError) as caught:
        base_directory(job(tmp_path, "weights/Qwen3-8B"))
    problem = caught.value
    assert (problem.code, problem.where) == ("model.hub", str(tmp_path / "weights/Qwen3-8B"))
    assert problem.what == "there is no model directory weights/Qwen3-8B, and no hub gave a model of this name."
    assert "Name or service not known" in problem.why
    assert "folder with config.json" in problem.fix
    assert hub == ["weights/Qwen3-8B"]


def test_who_looks_for_a_base_says_how_it_is_given(hub):
    with pytest.raises(CheckpointError, match=r"model\.hub") as caught:
        find_base(Path(), "org/model", fix="--base FOLDER")
    assert caught.value.fix == "--base FOLDER"


def test_the_cause_of_a_silent_hub_is_a_line_without_names_of_classes(tmp_path, monkeypatch):
    class LocalEntryNotFoundError(FileNotFoundError):
        """What the client of the hub makes of a connection that failed."""

    def snapshot_download(name, **options):
        try:
            raise TimeoutError("timed out after 10 s")
        except TimeoutError as problem:
            raise LocalEntryNotFoundError("Got: ConnectTimeout\nPlease check your connection.") from problem

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(CheckpointError) as caught:
        base_directory(job(tmp_path, "org/model"))
    assert caught.value.why == "the hub cannot be reached: timed out after 10 s"


def test_a_hub_that_refuses_says_why_in_its_first_line(tmp_path, monkeypatch):
    def snapshot_download(name, **options):
        raise ValueError("401: Repository Not Found\nadvice of several lines") from KeyError("x-request")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(CheckpointError) as caught:
        base_directory(job(tmp_path, "org/model"))
    assert caught.value.why == "401: Repository Not Found"


def test_missing_data_is_told_with_the_missing_base(tmp_path, hub):
    (tmp_path / "oak.jsonl").write_text("{}")
    with pytest.raises(ErrorList) as caught:
        prepare(
            job(tmp_path, "./none", ash="a/ash.jsonl", oak="oak.jsonl", elm="elm.csv", fir="a/ash.jsonl", yew="hf:o/s")
        )
    codes = [(error.code, error.where) for error in caught.value.errors]
    assert [code for code, _ in codes] == ["model.missing", "data.missing-file", "data.missing-file"]
    assert [where for _, where in codes[1:]] == [str(tmp_path / "a/ash.jsonl"), str(tmp_path / "elm.csv")]
