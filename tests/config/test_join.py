"""A job file whose adapters join a run: what the run has already fills it up, and nothing else may stand there."""

import json
from pathlib import Path

import pytest

from lorafusion_jax.config import load_config
from lorafusion_jax.config.data_sources import as_written
from lorafusion_jax.config.join import add_adapters, read_joining
from lorafusion_jax.errors import ConfigError, ErrorList

LAW = {"name": "law", "data": {"train": "law.jsonl"}}
TAX = {"name": "tax", "data": {"train": "tax.jsonl", "eval": "hf:org/set"}, "lora": {"init_from": "old/tax"}}
RUN = {
    "base": {"model": "base"},
    "batch": {"capacity_tokens": 512, "tile_tokens": 16, "global_samples": 4},
    "data": {"max_length": 512},
    "train": {"max_steps": 7},
}


def write(folder: Path, **values) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "jobs.yaml"
    path.write_text(json.dumps(values))
    return path


@pytest.fixture
def begun(tmp_path):
    """The configuration of a run, with paths from a folder of its own."""
    (tmp_path / "run" / "base").mkdir(parents=True)
    return load_config(write(tmp_path / "run", **RUN, adapters=[LAW]))


def codes(caught) -> list[str]:
    return [error.code for error in getattr(caught.value, "errors", [caught.value])]


def test_paths_start_at_the_folder_of_the_file(begun, tmp_path):
    (tax,) = read_joining(write(tmp_path / "more", adapters=[TAX], data={"max_length": 64}), begun)
    assert as_written(tax.data.train) == str(tmp_path / "more" / "tax.jsonl")
    assert as_written(tax.data.eval) == "hf:org/set"
    assert tax.lora.init_from == str(tmp_path / "more" / "old/tax")
    (beside,) = read_joining(write(tmp_path / "run", adapters=[TAX], data={"max_length": 64}), begun)
    assert as_written(beside.data.train) == "tax.jsonl"


def test_a_reference_starts_at_the_folder_of_the_file_unless_it_is_an_adapter(begun, tmp_path):
    folder = tmp_path / "more" / "teachers" / "old"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")

    def pairs(name: str, reference: str) -> dict:
        objective = {"name": "dpo", "reference": reference, "beta": 0.3}
        return {"name": name, "data": {"train": "pairs.jsonl", "max_length": 64}, "objective": objective}

    adapters = [pairs("one", "teachers/old"), pairs("two", "one"), pairs("three", "start")]
    joining = read_joining(write(tmp_path / "more", adapters=adapters), begun)
    assert [adapter.objective.chosen.reference for adapter in joining] == [str(folder), "one", "start"]
    assert joining[0].objective.chosen.options.beta == 0.3


def test_a_job_file_for_the_same_run_may_say_the_same(begun, tmp_path):
    base = {"base": {"model": "../run/base"}}
    path = write(tmp_path / "more", **(RUN | base), adapters=[TAX])
    (tax,) = read_joining(path, begun, ["optim.lr=0.5", "batch.global_samples=2"])
    assert (tax.optim.lr, tax.global_samples) == (0.5, 2)
    assert [adapter.name for adapter in add_adapters(begun, [tax]).adapters] == ["law", "tax"]


def test_what_belongs_to_the_run_cannot_differ(begun, tmp_path):
    other = {"base": {"model": "other", "dtype": "float32"}, "train": {"max_steps": 8}}
    path = write(tmp_path / "more", **other, adapters=[TAX], data={"max_length": 64})
    with pytest.raises(ErrorList) as caught:
        read_joining(path, begun)
    assert codes(caught) == ["add.other-settings"] * 3
    assert "train.max_steps is 7 in the run and 8 here." in str(caught.value)


@pytest.mark.parametrize("name", ["law", "Law"])
def test_names_must_be_new(name, begun, tmp_path):
    path = write(tmp_path / "more", adapters=[TAX | {"name": name}], data={"max_length": 64})
    with pytest.raises(ConfigError, match=r"add\.name"):
        read_joining(path, begun)


def test_samples_must_fit_into_the_runs_microbatches(begun, tmp_path):
    path = write(tmp_path / "more", adapters=[TAX], data={"max_length": 513})
    with pytest.raises(ConfigError, match=r"config\.max-length.*microbatch of 512 tokens"):
        read_joining(path, begun)


def test_a_job_file_cannot_say_that_it_was_extended(begun, tmp_path):
    path = write(tmp_path / "more", adapters=[TAX | {"extended": []}], data={"max_length": 64})
    with pytest.raises(ConfigError, match=r"config\.unknown-key"):
        read_joining(path, begun)
