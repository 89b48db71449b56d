"""Files of other programs: converted, or answered with what each key is here."""

from __future__ import annotations

import dataclasses
import re

import pytest
import yaml

from lorafusion_jax.config.convert import convert
from lorafusion_jax.config.data_sources import as_written
from lorafusion_jax.config.json_schema import reference
from lorafusion_jax.config.load import examine_config, load_config
from lorafusion_jax.config.other_defaults import PROGRAMS, target_of
from lorafusion_jax.config.other_programs import COUNTERPARTS
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.objective.table import OBJECTIVES

AXOLOTL = """
base_model: org/llama
load_in_4bit: true
datasets:
  - {path: rows.jsonl, type: alpaca, ds_type: json}
  - {path: org/more, type: alpaca}
val_set_size: 0.1
sequence_len: 2048
sample_packing: true
adapter: qlora
lora_r: 8
lora_alpha: 12
lora_target_modules: [self_attn.q_proj, mlp.down_proj]
peft_use_rslora: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: linear
learning_rate: 2e-4
warmup_ratio: 0.1
save_steps: 50
saves_per_epoch: 1
weight_decay: 0.01
wandb_project: tuning
special_tokens: {pad_token: "<pad>"}
"""
LLAMA_FACTORY = """
model_name_or_path: org/qwen
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 64
lora_target: all
pref_beta: 0.2
pref_loss: orpo
dataset: pairs_demo
template: qwen
cutoff_len: 1024
output_dir: saves/x
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
lr_scheduler_type: polynomial
bf16: true
report_to: [tensorboard, swanlab]
"""


def converted(text):
    return convert(yaml.safe_load(text), "my run/1")


def test_an_axolotl_file_becomes_a_job_file_that_loads(tmp_path):
    result = converted(AXOLOTL)
    path = tmp_path / "jobs.yaml"
    path.write_text(result.text("Converted."))
    config = load_config(path)
    adapter = config.adapters[0]
    assert (config.base.model, config.base.quantize, adapter.name) == ("org/llama", "nf4", "my-run-1")
    assert (as_written(adapter.data.train), adapter.data.max_length) == (["rows.jsonl", "hf:org/more"], 2048)
    assert (adapter.lora.rank, adapter.lora.alpha, adapter.lora.rslora) == (8, 12, True)
    assert adapter.lora.targets == ["q_proj", "down_proj"]
    optim = adapter.optim
    assert (optim.name, optim.lr, optim.schedule, optim.warmup, optim.weight_decay) == (
        "adamw",
        2e-4,
        "linear",
        0.1,
        0.01,
    )
    assert (adapter.global_samples, adapter.epochs, config.save.every_steps, config.report.wandb) == (
        8,
        3,
        50,
        "tuning",
    )


def test_every_key_is_carried_over_or_has_a_note():
    for text in (AXOLOTL, LLAMA_FACTORY):
        result = converted(text)
        noted = " ".join(key for key, _ in result.notes)
        for key in ("saves_per_epoch", "special_tokens") if text is AXOLOTL else ("dataset", "output_dir"):
            assert key in noted
        written = result.text("Converted.")
        assert all(f"#   {key}: {note}" in written for key, note in result.notes)
    notes = dict(converted(AXOLOTL).notes)
    assert "datasets" not in notes
    assert "paged_adamw_8bit is adamw" in notes["optimizer"]
    unknown = converted("base_model: a\ndatasets: [{path: b}]\nnever_heard_of: 1")
    assert ("never_heard_of", "no counterpart is known") in unknown.notes


def test_what_an_entry_of_a_set_says_beside_its_source_has_a_note():
    entries = (
        "[{path: org/set, type: alpaca, name: en}, {path: rows.jsonl, ds_type: json, type: chat_template, "
        "field_messages: dialog, message_property_mappings: {role: who}, shards: 4}]"
    )
    notes = converted(f"base_model: a\ndatasets: {entries}").notes
    of_entries = [(key.removeprefix("datasets."), note) for key, note in notes if key.startswith("datasets.")]
    assert [key for key, _ in of_entries] == [
        *("type", "name", "type", "field_messages", "message_property_mappings", "shards")
    ]
    texts = [note for _, note in of_entries]
    assert "data.chat_template: alpaca" in texts[0]
    assert "a configuration of a set" in texts[1]
    assert all("data.columns" in text for text in texts[2:5])
    assert texts[5] == "no counterpart is known"


def test_held_out_sets_of_llama_factory_are_names_as_well():
    result = converted("model_name_or_path: a\nstage: sft\ndataset: own\neval_dataset: own_test\ncutoff_len: 64")
    assert result.job["adapters"][0]["data"] == {"train": "own", "eval": "own_test"}
    assert "dataset_info.json" in dict(result.notes)["eval_dataset"]


def test_a_preference_file_keeps_its_objective():
    result = converted(LLAMA_FACTORY)
    assert result.job["objective"] == {"name": "orpo", "beta": 0.2}
    assert result.job["lora"] == {"rank": 64, "targets": "all-linear", "alpha": 128, "dropout": 0.0}
    assert result.job["report"] == {"tensorboard": True}
    notes = dict(result.notes)
    assert "polynomial" in notes["lr_scheduler_type"]
    assert "swanlab" in notes["report_to"]
    assert result.job["data"]["chat_template"] == "qwen"
    assert "did you mean 'chatml'?" in dict(converted(LLAMA_FACTORY.replace(": qwen", ": chat_ml")).notes)["template"]
    assert "dataset_info.json" in notes["dataset"]


def test_trls_mixed_losses_are_those_of_dpo(tmp_path):
    result = converted(
        "model_name_or_path: org/qwen\ndataset_name: rows.jsonl\nrpo_alpha: 0.3\n"
        "loss_type: [sigmoid, bco_pair]\nloss_weights: [0.8, 0.2]"
    )
    path = tmp_path / "jobs.yaml"
    path.write_text(result.text("Converted."))
    options = load_config(path).adapters[0].objective.chosen.options
    assert (options.loss, options.loss_weights, options.sft) == (("sigmoid", "bco_pair"), (0.8, 0.2), 0.3)
    assert not {"rpo_alpha", "loss_type", "loss_weights"} & dict(result.notes).keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "model_name_or_path: m\ndataset_name: rows.jsonl\nuse_peft: true\ngradient_accumulation_steps: 4",
            {"lora": (16, 32, 0.05, ["q_proj", "v_proj"]), "optim": ("linear", 0, 2e-5, 0.999, 1e-8),
             "data": (1024, "cut"), "rest": (32, 3, 42)},
            id="TRL",
        ),
        pytest.param(
            "model_name_or_path: m\nstage: kto\nlora_rank: 24\ndataset: rows.jsonl\nnum_train_epochs: 2.0",
            {"lora": (24, 48, 0.0, "all-linear"), "optim": ("linear", 0, 5e-5, 0.999, 1e-8),
             "data": (2048, "cut"), "rest": (8, 2, 42)},
            id="LLaMA-Factory",
        ),
        pytest.param(
            "base_model: m\ndatasets: [{path: rows.jsonl}]\nlora_r: 8\nlora_alpha: 12\nwarmup_steps: 7\nmax_steps: -1\n"
            "learning_rate: 1e-3\nlora_target_linear: true\nexcess_length_strategy: raise",
            {"lora": (8, 12, 0.0, "all-linear"), "optim": ("cosine", 7, 1e-3, 0.999, 1e-8),
             "data": (512, "error"), "rest": (1, 1, 42)},
            id="axolotl",
        ),
    ],
)  # fmt: skip
def test_what_a_file_leaves_out_is_trained_as_its_program_does(tmp_path, text, expected):
    path = tmp_path / "jobs.yaml"
    path.write_text(converted(text).text("Converted."))
    adapter = load_config(path).adapters[0]
    lora, optim, data = adapter.lora, adapter.optim, adapter.data
    assert {
        "lora": (lora.rank, lora.alpha, lora.dropout, lora.targets),
        "optim": (optim.schedule, optim.warmup, optim.lr, optim.b2, optim.eps),
        "data": (data.max_length, data.on_long),
        "rest": (adapter.global_samples, adapter.epochs, adapter.seed),
    } == expected


def test_trls_loss_on_messages_is_named(tmp_path):
    text = "model_name_or_path: m\ndataset_name: rows.jsonl\nuse_peft: true\n"
    for more in ("", "assistant_only_loss: false"):
        result = converted(text + more)
        assert "loss" not in result.job.get("data", {})
        assert "data.loss is all" in dict(result.notes)["assistant_only_loss"]
    assert converted(text + "completion_only_loss: false").job["data"]["loss"] == "all"
    assert "assistant_only_loss" not in dict(converted(text + "assistant_only_loss: true").notes)


def test_a_file_of_no_known_program_says_so():
    result = converted("model_name_or_path: m\ntrain_file: rows.jsonl\nlearning_rate: 1e-4")
    assert "not clear" in result.text("Converted.").splitlines()[1]
    assert result.job["optim"] == {"lr": 1e-4}


def test_a_file_without_base_or_data_is_refused():
    with pytest.raises(ConfigError, match=r"config\.not-convertible.*no base model"):
        converted("datasets: [{path: rows.jsonl}]")
    with pytest.raises(ConfigError, match="no data"):
        converted("base_model: org/llama")
    with pytest.raises(ConfigError, match="a job file of lorafusion already"):
        converted("{base: {model: m}, adapters: [{name: law, data: {train: rows.jsonl}}]}")


@pytest.mark.parametrize(
    ("line", "key", "says"),
    [
        ("finetuning_type: full\nstage: sft", "finetuning_type", "'full' is not trained here"),
        ("peft_type: IA3", "peft_type", "'IA3' is not trained here; lora.kind is lora"),
        (
            "adapter: lora\npeft_use_dora: true\npeft_init_lora_weights: pissa",
            "peft_init_lora_weights",
            "dora and pissa are not trained together; lora.kind is pissa",
        ),
        ("init_lora_weights: lora_ga", "init_lora_weights", "'lora_ga' is not offered"),
        ("adapter: lora\nbias: all", "bias", "lora.lora_bias"),
        ("use_dora: true\nsequence_len: 64", "adapter", "axolotl trains the whole model"),
        ("sequence_len: 64", "adapter", "axolotl trains the whole model"),
        ("use_peft: false", "use_peft", "False is not trained here"),
        ("finetuning_type: lora\nstage: ppo", "stage", "set objective: ppo"),
        ("finetuning_type: lora\nstage: rm", "stage", "set objective: reward"),
        ("finetuning_type: lora\nstage: pt", "stage", "trains answers, with sft"),
    ],
)
def test_training_of_another_kind_is_named(line, key, says):
    """The job file that comes out trains something else."""
    assert says in dict(converted(f"base_model: m\ndatasets: [{{path: rows.jsonl}}]\n{line}").notes)[key]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("peft_type: VERA\nr: 64", "vera"),
        ("adapter: dora", "dora"),
        ("use_dora: true\npeft_type: LORA", "dora"),
        ("finetuning_type: lora\npissa_init: true", "pissa"),
        ("peft_init_lora_weights: pissa_niter_16\nadapter: lora", "pissa"),
        ("init_lora_weights: true\nadapter: qlora\npissa_init: false", "lora"),
    ],
)
def test_a_kind_of_another_program_is_ours_without_a_note(tmp_path, line, kind):
    result = converted(f"base_model: m\ndatasets: [{{path: rows.jsonl}}]\n{line}")
    (tmp_path / "jobs.yaml").write_text(result.text("Converted."))
    assert load_config(tmp_path / "jobs.yaml").adapters[0].lora.kind == kind
    assert not {key for key, _ in result.notes} & {"adapter", *(part.split(":")[0] for part in line.split("\n"))}


def test_counterparts_are_keys_of_the_job_file():
    known = yaml.safe_load(reference())
    options = {field.name for entry in OBJECTIVES.values() for field in dataclasses.fields(entry.options)}
    later = {"optim.lr_ratio", *(f"objective.{name}" for name in options)}  # groups of leaves; options of objectives
    for name, word in COUNTERPARTS.items():
        assert word.key is not None or word.note, name
        if word.key is None or word.key in later or word.key == "--out":
            continue
        section, _, key = word.key.partition(".")
        assert section in known, name
        assert not key or key in (known[section] if section != "data" else {*known[section], "train"}), name


def test_a_foreign_key_is_answered_with_its_name_here(tmp_path):
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "base: {model: m}\nlora_r: 8\nsample_packing: true\n"
        "adapters: [{name: a, lora_alpha: 4, data: {train: x.jsonl}, objective: {name: dpo, rpo_alpha: 0.3}}]\n"
    )
    _, errors = examine_config(path)
    fixes = {error.what.split("'")[1]: error.fix for error in errors}
    assert fixes["adapters[0].objective"] == "rpo_alpha is objective.sft here"
    assert fixes["lora_r"] == "lora_r is lora.rank here"
    assert fixes["adapters[0].lora_alpha"] == "lora_alpha is lora.alpha here"
    assert fixes["sample_packing"].startswith("leave it out: samples are always packed")


def test_a_file_of_another_program_gets_one_error(tmp_path):
    path = tmp_path / "axolotl.yml"
    path.write_text(AXOLOTL)
    config, errors = examine_config(path)
    assert config is None
    assert [error.code for error in errors] == ["config.other-program"]
    assert errors[0].fix == f"lorafusion init --from {path} > jobs.yaml"


def test_a_share_and_an_early_stop_become_ours():
    text = AXOLOTL + "early_stopping_patience: 3\neval_steps: 20\nmetric_for_best_model: eval_loss\n"
    job = converted(text).job
    assert job["adapters"][0]["data"]["eval"] == 0.1
    assert job["early_stop"] == {"patience": 3}
    assert "early_stop" not in converted(AXOLOTL + "early_stopping_patience: 3\n").job  # nothing is evaluated


def test_long_samples_let_the_planner_choose(tmp_path):
    result = converted(AXOLOTL.replace("sequence_len: 2048", "sequence_len: 32768"))
    (tmp_path / "jobs.yaml").write_text(result.text("Converted."))
    assert load_config(tmp_path / "jobs.yaml").auto == ("batch.capacity_tokens",)


def test_projections_of_other_models_are_named():
    result = converted(AXOLOTL.replace("mlp.down_proj", "Wqkv"))
    assert result.job["lora"]["targets"] == ["q_proj"]
    assert dict(result.notes)["lora_target_modules"] == "no model that is trained here has Wqkv"


# Defaults of public argument classes: LLaMA-Factory's hparams at 00577a85, axolotl's schemas at 002a637c and 00564c8f.
FACTORY_FILE = "model_name_or_path: m\ndataset: rows.jsonl\nstage: sft\nfinetuning_type: lora\n"
FACTORY = {
    "lora_rank": 8, "lora_dropout": 0.0, "lora_target": "all", "loraplus_lr_ratio": None, "use_rslora": False,
    "use_dora": False, "additional_target": None, "pure_bf16": False, "ref_model": None,
}  # fmt: skip
FACTORY_PAIRS = {
    "pref_beta": 0.1, "pref_ftx": 0.0, "pref_loss": "sigmoid", "dpo_label_smoothing": 0.0,
    "ref_model_quantization_bit": None,
}  # fmt: skip
AXOLOTL_FILE = (
    "base_model: m\ndatasets: [{path: rows.jsonl}]\nadapter: lora\nlearning_rate: 1e-4\nlora_r: 4\nlora_alpha: 4\n"
)
AXOLOTL_DEFAULTS = {
    "gradient_accumulation_steps": 1, "micro_batch_size": 1, "train_on_inputs": False, "weight_decay": 0.0,
    "optimizer": "adamw_torch_fused", "lr_scheduler": "cosine", "num_epochs": 1.0, "load_in_8bit": False,
    "load_in_4bit": False, "lora_model_dir": None, "lora_dropout": 0.0, "peft_use_dora": None, "peft_use_rslora": None,
    "peft_layers_to_transform": None, "peft_trainable_token_indices": None, "loraplus_lr_ratio": None,
    "lora_target_linear": None, "cosine_min_lr_ratio": None,
}  # fmt: skip
DEFAULTS = [
    *((FACTORY_FILE, key, value) for key, value in FACTORY.items()),
    *((FACTORY_FILE.replace("sft", "dpo"), key, value) for key, value in FACTORY_PAIRS.items()),
    *((AXOLOTL_FILE, key, value) for key, value in AXOLOTL_DEFAULTS.items()),
]


@pytest.mark.parametrize(("text", "key", "value"), DEFAULTS, ids=[key for _, key, _ in DEFAULTS])
def test_a_default_that_is_written_out_changes_nothing(tmp_path, text, key, value):
    assert target_of(key) is not None or key in COUNTERPARTS
    jobs = []
    for number, file in enumerate((text, text + yaml.safe_dump({key: value}))):
        (tmp_path / f"{number}.yaml").write_text(converted(file).text("Converted."))
        config = load_config(tmp_path / f"{number}.yaml")
        (adapter,) = config.adapters
        rest = config.model_dump(exclude={"adapters"}), adapter.model_dump(exclude={"objective"})
        jobs.append((*rest, adapter.objective.chosen))
    assert jobs[0] == jobs[1]


def test_notes_name_keys_of_the_job_file():
    known = yaml.safe_load(reference())
    notes = [word.note for word in COUNTERPARTS.values()] + [
        note for program in PROGRAMS for note in program.notes.values()
    ]
    sections = [name for name, section in known.items() if isinstance(section, dict)]
    keys = re.findall(rf"\b({'|'.join(sections)})\.(\w+)", "\n".join(notes))
    assert len(keys) > 8
    assert [f"{section}.{key}" for section, key in keys if key not in {*known[section], "train"}] == []
