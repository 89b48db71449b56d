"""Spoilt files of every kind that the program reads: an error that names the file, never a traceback or a hang."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from fuzzing import cases, clear_errors, of_json, spoilt, spoilt_bytes, written
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import parquet
from safetensors.numpy import save
from tokenizers import Tokenizer, models, pre_tokenizers

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.api.status import run_numbers
from lorafusion_jax.checkpoint.base_weights import weight_problems
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.requests import Request
from lorafusion_jax.checkpoint.saved_states import find_checkpoint
from lorafusion_jax.checkpoint.verify_folder import verify_folder
from lorafusion_jax.checkpoint.warm_start_base import check_start_bases, unproven_bases
from lorafusion_jax.config.convert import convert
from lorafusion_jax.config.load import load_config
from lorafusion_jax.config.read import read_source
from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data import load_samples, load_tokenizer
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.models.checkpoint import list_tensors
from lorafusion_jax.peft.folder import peft_tensors, read_adapter
from lorafusion_jax.peft.settings import lora_settings
from lorafusion_jax.peft.write_config import config_of
from lorafusion_jax.planning.prediction import read_costs
from lorafusion_jax.report.measured import read_timeline
from scheduling import (
    AdapterJob,
    CostModel,
    PassCost,
    Plan,
    PlanError,
    Span,
    StageCost,
    Timeline,
    make_plan,
    serialize,
    verify_plan,
)

pytestmark = pytest.mark.wrong_types

JOB = {
    "base": {"model": "base", "dtype": "bfloat16"},
    "data": {"max_length": 64, "on_long": "cut"},
    "batch": {"capacity_tokens": 128, "tile_tokens": 16, "global_samples": 2},
    "mesh": {"stages": 2, "data": 1, "layers": [1, 1]},
    "train": {"max_steps": 3, "plan_seconds": 0.1, "log_every_s": 0},
    "save": {"every_steps": 2, "keep": 2},
    "lora": {"rank": 4, "alpha": 8, "dropout": 0.1, "targets": ["q_proj"]},
    "optim": {"name": "adamw", "lr": [1e-3, 2e-3], "schedule": "cosine", "warmup": 0.1},
    "adapters": [
        {"name": "law", "data": {"train": "law.jsonl", "columns": {"prompt": "q"}}, "epochs": 2, "seed": 1},
        {"name": "med", "data": {"train": "med.jsonl"}, "lora": {"init_from": "start"}, "objective": {"name": "sft"}},
    ],
}
ROWS = [
    {"prompt": "two and two", "completion": " four"},
    {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "four", "weight": 1}]},
    {"conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "four"}], "system": "brief"},
    {"instruction": "add", "input": "two", "output": "four", "history": [["a", "b"]]},
    {"text": "two and two"},
    {
        "messages": [
            {"role": "user", "content": "two"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "four"},
        ],
        "tools": [{"name": "f"}],
    },
]
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    | {"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [{"id": 2, "content": "<end>", "special": True, "single_word": False, "lstrip": False}
    | {"rstrip": False, "normalized": False}],
    "normalizer": {"type": "Replace", "pattern": {"Regex": "x+"}, "content": "x"},
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "<s>": 1, "<end>": 2, "two": 3}, "unk_token": "<unk>"},
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
TOKENIZER_CONFIG = {
    "eos_token": "<end>",
    "bos_token": {"content": "<s>"},
    "add_bos_token": True,
    "chat_template": TEMPLATE,
}
SPEC = AdapterSpec(name="law", rank=2, alpha=4, targets=("q_proj", "v_proj"))
PEFT = config_of(SPEC, "org/base") | {"rank_pattern": {"q_proj": 2}, "layers_to_transform": [0, 1]}
TENSORS = peft_tensors(
    {
        f"layers.{layer}.self_attn.{name}": (np.ones((8, 2), np.float32), np.ones((2, 4), np.float32))
        for layer in range(2)
        for name in SPEC.targets
    }
)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A base model, an adapter and rows, each in a folder of its own."""
    home = tmp_path_factory.mktemp("fuzz")
    for name in ("base", "start"):
        (home / name).mkdir()
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "<end>": 2, "two": 3, "four": 4}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(home / "base" / "tokenizer.json"))
    write(home, "base/config.json", written(SHAPE))
    write(home, "base/tokenizer_config.json", written(TOKENIZER_CONFIG))
    write(home, "base/model.safetensors", save({"model.norm.weight": np.ones(8, np.float32)}))
    write(
        home, "base/model.safetensors.index.json", written({"weight_map": {"model.norm.weight": "model.safetensors"}})
    )
    write(home, "start/adapter_config.json", written(PEFT))
    write(home, "start/adapter_model.safetensors", save(TENSORS))
    return home


def write(home: Path, name: str, content: bytes) -> Path:
    (home / name).write_bytes(content)
    return home / name


@given(content=of_json(JOB))
@example(content=written(JOB | {"lora": [None]}))
@example(content=written(JOB | {"optim": [None]}))
@cases
def test_job_files(home, content):
    with clear_errors("jobs.yaml", "adapters", "config."):
        load_config(write(home, "jobs.yaml", content))


@given(rows=st.lists(st.sampled_from(ROWS).flatmap(spoilt), min_size=1, max_size=3), whole=st.sampled_from(ROWS))
@cases
def test_rows_of_data(home, rows, whole):
    content = b"\n".join(written(row) for row in [whole, *rows])
    read_data(home, "data.jsonl", content)


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("data.jsonl", b"\n".join(written(row) for row in ROWS[:1] * 3)),
        ("data.json", written(ROWS[:1] * 2)),
        ("data.csv", b'prompt,completion\ntwo,four\n"a\nb",four\n'),
    ],
)
@given(data=st.data())
@cases
def test_files_of_data(home, name, good, data):
    read_data(home, name, data.draw(spoilt_bytes(good)))


def parquet_file():
    table = io.BytesIO()
    parquet.write_table(pa.table({"prompt": ["two"] * 3, "completion": ["four"] * 3}), table)
    return table.getvalue()


@given(content=spoilt_bytes(parquet_file()))
@cases
def test_parquet_files(home, content):
    """Whatever pyarrow makes of broken bytes comes as an error of ours."""
    read_data(home, "data.parquet", content)


def read_data(home, name, content):
    write(home, name, content)
    tokenizer = load_tokenizer(home / "base")
    with clear_errors(name):
        load_samples(
            name,
            settings=DataSettings(train=name, max_length=8),
            tokenizer=tokenizer,
            adapter="law",
            base_dir=home,
            cache_dir=home / "cache",
        )


@given(
    content=st.one_of(
        st.tuples(st.just("config.json"), of_json(SHAPE)),
        st.tuples(st.just("tokenizer_config.json"), of_json(TOKENIZER_CONFIG)),
        st.tuples(st.just("tokenizer.json"), of_json(TOKENIZER)),
        st.tuples(st.just("chat_template.jinja"), spoilt_bytes(TEMPLATE.encode())),
        st.tuples(st.just("model.safetensors.index.json"), of_json({"weight_map": {"a": "model.safetensors"}})),
        st.tuples(st.just("model.safetensors"), spoilt_bytes(save({"a": np.ones(8, np.float32)}))),
    )
)
@cases
def test_model_folders(home, content):
    name, bytes_of_file = content
    base = home / "model"
    shutil.rmtree(base, ignore_errors=True)
    shutil.copytree(home / "base", base)
    write(base, name, bytes_of_file)
    for read in (ModelConfig.from_hf, load_tokenizer, list_tensors):
        with clear_errors(name, str(base)):
            read(base)
    for problem in weight_problems(base):
        assert name in str(problem)
    with clear_errors("data.jsonl", name):
        tokenizer = load_tokenizer(base)
        write(home, "data.jsonl", written(ROWS[1]))
        load_samples(
            "data.jsonl",
            settings=DataSettings(train="data.jsonl"),
            tokenizer=tokenizer,
            adapter="law",
            base_dir=home,
            cache_dir=home / "cache",
        )


@given(
    content=st.one_of(
        st.tuples(st.just("adapter_config.json"), of_json(PEFT)),
        st.tuples(st.just("adapter_config.json"), of_json(PEFT)),
        st.tuples(st.just("adapter_model.safetensors"), spoilt_bytes(save(TENSORS))),
        st.tuples(st.just("run.json"), of_json({"base_files": {"whole": {"config.json": "00"}}})),
    )
)
@example(content=("adapter_config.json", written(PEFT | {"lora_alpha": 1e-320})))
@cases
def test_peft_folders(home, content):
    name, bytes_of_file = content
    folder = home / "adapter"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(home / "start", folder)
    write(folder, name, bytes_of_file)
    with clear_errors(name, str(folder)):
        read_adapter(folder)
    assert isinstance(lora_settings(folder), dict)
    with clear_errors("init_from"):
        config = load_config(write(home, "warm.yaml", written(JOB | {"adapters": WARM, "optim": {}})))
        check_start_bases(config)
        unproven_bases(config)


WARM = [{"name": "law", "data": {"train": "x"}, "lora": {"init_from": "adapter", "rank": 4, "targets": ["q_proj"]}}]
JOBS = [AdapterJob(name=name, sample_tokens=[3, 5, 2, 7], global_batch=2, epochs=1) for name in ("law", "med")]
PLAN = make_plan(JOBS, capacity_tokens=16, num_stages=2, tile_tokens=4, seed=0, search_evaluations=1)


@given(data=st.data())
@cases
def test_plans(data):
    """Both as they are, and with a digest that fits what was spoilt."""
    document = json.loads(PLAN.to_json())
    text = data.draw(of_json(document)).decode(errors="replace")
    with clear_errors("plan"):
        try:
            plan = Plan.from_json(text)
        except PlanError as problem:
            if "digest" not in str(problem):
                raise
            plan = None
        if plan is not None:
            verify_plan(plan, JOBS)
    with clear_errors("plan"):
        spoil_content(text)


def spoil_content(text: str) -> None:
    """Reads the plan with its own digest put right."""
    with mock.patch.object(serialize, "lines_digest", return_value=read_digest(text)):
        plan = Plan.from_json(text)
    verify_plan(plan)


def read_digest(text: str) -> str:
    try:
        return str(json.loads(text).get("digest"))
    except (ValueError, AttributeError, RecursionError):
        return ""


REQUESTS = (
    {"action": "weight", "adapter": "law", "weight": 2.0},
    {"action": "extend", "adapter": "law", "steps": 5},
    {"action": "add", "adapters": [{"name": "tax", "data": {"train": "/tax.jsonl"}, "lora": {"rank": 4}}]},
)


@given(content=st.sampled_from(REQUESTS).flatmap(of_json))
@example(content=b'{"action": "add", "adapters": true}')
@cases
def test_requests(home, content):
    """A run refuses whatever is raised; it needs no error of ours, but time and memory have their limits."""
    with clear_errors(), suppress(OSError, ValueError, RecursionError):
        Request.read(write(home, "1-request.json", content))


AXOLOTL = {"base_model": "org/base", "datasets": [{"path": "law.jsonl", "type": "alpaca"}], "adapter": "lora"} | {
    "lora_r": 8, "lora_target_modules": ["q_proj"], "learning_rate": 2e-4, "micro_batch_size": 2, "wandb_project": "x",
}  # fmt: skip


@given(content=of_json(AXOLOTL))
@cases
def test_files_of_other_programs(home, content):
    with clear_errors("other.yaml", "config."):
        source = read_source(write(home, "other.yaml", content))
        assert convert(source.values, "other").text("a file")


PART = StageCost(forward=PassCost(fixed_s=0.1), backward=PassCost(fixed_s=0.2))
COSTS = CostModel(stages=(PART, PART)).to_json()


@given(content=of_json(json.loads(COSTS)))
@cases
def test_files_of_costs(home, content):
    with clear_errors("plan."):
        read_costs(write(home, "costs.json", content), [1, 1])


SPANS = Timeline(spans=(Span("forward", 0, 0, 0.0, 1.0, ("law",)),), num_stages=1).to_json()


@given(content=of_json(json.loads(SPANS)))
@cases
def test_timelines(home, content):
    write(home, "timeline.json", content)
    with clear_errors("plan."):
        read_timeline(home)


TOML = """[base]\nmodel = "base"\n[optim]\nlr = 1e-3\n[[adapters]]\nname = "law"\ndata = {train = "law.jsonl"}\n"""


@given(content=spoilt_bytes(TOML.encode()))
@cases
def test_toml_job_files(home, content):
    with clear_errors("jobs.toml", "adapters", "config."):
        load_config(write(home, "jobs.toml", content))


FILES = ("run.json", "config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "position", "SHA256SUMS", "metadata")


@pytest.fixture(scope="module")
def run(whole_run, tmp_path_factory) -> Path:
    """One checkpoint and one exported folder are enough."""
    copy = shutil.copytree(whole_run.run, tmp_path_factory.mktemp("run") / "run", symlinks=True)
    newest = str(whole_run.slots[-1])
    for folder in [*(copy / "state").iterdir(), *(copy / "adapters" / "law").glob("step-*")]:
        if folder.name not in (newest, whole_run.adapter().resolve().name):
            shutil.rmtree(folder)
    shutil.rmtree(copy / "adapters" / "med")
    return copy


@given(data=st.data())
@cases
def test_run_folders(run, data):
    """Run files and checkpoints: whoever looks at a spoilt folder says what is wrong with it."""
    choices = sorted(file for name in FILES for file in run.rglob(f"*{name}*") if file.is_file())
    file = data.draw(st.sampled_from(choices))
    good = file.read_bytes()
    try:
        document = json.loads(good)
    except ValueError:
        document = None
    spoilt_content = data.draw(
        spoilt_bytes(good) if document is None else st.one_of(of_json(document), spoilt_bytes(good))
    )
    try:
        file.write_bytes(spoilt_content)
        for look in (verify_folder, run_numbers, lambda path: find_checkpoint(path / "state")):
            with clear_errors(file.name, str(run)):
                look(run)
        for read in (RunFolder(run).read_record, RunFolder(run).read_config, RunFolder(run).read_plan):
            with clear_errors(file.name, str(run)):
                read()
    finally:
        file.write_bytes(good)
