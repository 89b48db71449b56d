"""Errors of every reader about names and values of 100 kB: each part of a message has 2 000 characters at most."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from safetensors.numpy import save
from small_jobs import write_job, write_rows

from lorafusion_jax.api.status import run_numbers
from lorafusion_jax.checkpoint.base_weights import weight_problems
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.config.load import load_config
from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data import load_samples, load_tokenizer
from lorafusion_jax.errors import MOST_SHOWN, LoraFusionError, raise_all
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.generation.text import read_rows
from lorafusion_jax.models.checkpoint import list_tensors
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.planning.prediction import read_costs
from lorafusion_jax.report.measured import read_timeline
from scheduling import PlanError

LONG = "x" * 10**5
LABEL = 20  # "  because ", and "error[…] " has its code
MOST_ERRORS = 40  # of a list


@pytest.fixture
def home(tmp_path, tiny_base):
    """A job, a base, an adapter's folder and a run's, all in one."""
    shutil.copytree(tiny_base, tmp_path / "base")
    write_job(tmp_path, tmp_path / "base", [{"name": "law", "data": {"train": write_rows(tmp_path, "law", 2)}}])
    (tmp_path / "adapter").mkdir()
    (tmp_path / "run").mkdir()
    return tmp_path


def text(value: Any) -> bytes:
    return (value if isinstance(value, str) else json.dumps(value)).encode()


def parquet_file(table: pa.Table) -> bytes:
    file = io.BytesIO()
    parquet.write_table(table, file)
    return file.getvalue()


def job(home: Path) -> None:
    load_config(home / "jobs.yaml")


def toml(home: Path) -> None:
    load_config(home / "jobs.toml")


def rows_of(name: str) -> Callable[[Path], object]:
    def read(home: Path) -> None:
        load_samples(
            name,
            settings=DataSettings(train=name),
            tokenizer=load_tokenizer(home / "base"),
            adapter="law",
            base_dir=home,
            cache_dir=home / "cache",
        )

    return read


def of_base(read: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda home: read(home / "base")


def of_run(read: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda home: read(home / "run")


GOOD = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}
TABLE = pa.table({LONG: ["a"], "completion": ["b"]})
READERS: dict[str, tuple[str, bytes, Callable[[Path], object]]] = {
    "a key of a job": ("jobs.yaml", text({LONG: 1}), job),
    "a value of a job": ("jobs.yaml", text({"adapters": LONG}), job),
    "an adapter's name": ("jobs.yaml", text({"adapters": [{"name": LONG, "data": {"train": LONG}}]}), job),
    "a line of YAML": ("jobs.yaml", text(f"a: [{LONG}"), job),
    "a tag of YAML": ("jobs.yaml", text(f"a: !{LONG} 1"), job),
    "a line of TOML": ("jobs.toml", text(f"a = {LONG}"), toml),
    "a key of TOML": ("jobs.toml", text(f"{LONG} = 1"), toml),
    "a column": ("law.jsonl", text({LONG: "a"}), rows_of("law.jsonl")),
    "a line of rows": ("law.jsonl", text("{" + LONG), rows_of("law.jsonl")),
    "a role": ("law.jsonl", text({"messages": [{"role": LONG, "content": "a"}]}), rows_of("law.jsonl")),
    "a text of JSON": ("law.json", text(LONG), rows_of("law.json")),
    "a head of CSV": ("law.csv", text(f"{LONG},b\n1,2\n"), rows_of("law.csv")),
    "a column of Parquet": ("law.parquet", parquet_file(TABLE), rows_of("law.parquet")),
    "an architecture": ("base/config.json", text({"architectures": [LONG]}), of_base(ModelConfig.from_hf)),
    "a line of config.json": ("base/config.json", text("{" + LONG), of_base(ModelConfig.from_hf)),
    "a type of tokenizer": ("base/tokenizer.json", text({"model": {"type": LONG}}), of_base(load_tokenizer)),
    "settings of a tokenizer": ("base/tokenizer_config.json", text("{" + LONG), of_base(load_tokenizer)),
    "a name in a template": ("base/chat_template.jinja", text("{% " + LONG + " %}"), of_base(load_tokenizer)),
    "what a template raises": (
        "base/chat_template.jinja",
        text("{{ raise_exception('" + LONG + "') }}"),
        rows_of("law.jsonl"),
    ),
    "a tensor of the base": (
        "base/model.safetensors",
        save({LONG: np.full(2, np.inf, np.float32)}),
        of_base(lambda base: raise_all(weight_problems(base))),
    ),
    "a file of the index": (
        "base/model.safetensors.index.json",
        text({"weight_map": {"a": LONG}}),
        of_base(list_tensors),
    ),
    "a header of tensors": (
        "base/model.safetensors",
        (10**5 + 1).to_bytes(8, "little") + text("{" + LONG),
        of_base(list_tensors),
    ),
    "a key of an adapter": (
        "adapter/adapter_config.json",
        text(GOOD | {"target_modules": [LONG]}),
        lambda home: read_adapter(home / "adapter"),
    ),
    "an expression of targets": (
        "adapter/adapter_config.json",
        text(GOOD | {"target_modules": "(" + LONG}),
        lambda home: read_adapter(home / "adapter"),
    ),
    "a kind of adapter": (
        "adapter/adapter_config.json",
        text(GOOD | {"peft_type": LONG}),
        lambda home: read_adapter(home / "adapter"),
    ),
    "a plan": ("run/plan.json", text({"version": LONG}), of_run(lambda run: RunFolder(run).read_plan())),
    "a record of a run": ("run/run.json", text(LONG), of_run(lambda run: RunFolder(run).read_record())),
    "a job of a run": ("run/config.yaml", text({LONG: 1}), of_run(lambda run: RunFolder(run).read_config())),
    "what status reads": ("run/run.json", text({"plan": LONG}), of_run(run_numbers)),
    "costs": ("costs.json", text({LONG: 1}), lambda home: read_costs(home / "costs.json", [1, 1])),
    "a timeline": ("timeline.json", text({"spans": LONG}), read_timeline),
    "prompts": (
        "prompts.jsonl",
        text({"prompt": "a", "adapter": LONG, "temperature": LONG}),
        lambda home: read_rows([(home / "prompts.jsonl").read_text()], ["law"], Sampling(), name="prompts.jsonl"),
    ),
}


@pytest.mark.parametrize("what", READERS)
def test_a_message_is_cut(what, home):
    name, content, read = READERS[what]
    (home / name).write_bytes(content)
    with pytest.raises((LoraFusionError, PlanError)) as caught:
        read(home)
    lines = str(caught.value).splitlines()
    assert len(lines) < 4 * MOST_ERRORS
    assert [
        line[:100] for line in lines if len(line) > MOST_SHOWN + LABEL + len(getattr(caught.value, "code", ""))
    ] == []
