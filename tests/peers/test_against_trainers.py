"""Adapters of one run against transformers' Trainer and TRL's SFTTrainer, which train each alone; `make test-peers`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import small_jobs
from safetensors.numpy import load_file

from lorafusion_jax.config import load_config
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import train

SCRIPT = Path(__file__).with_name("hf_trainers.py")
PEERS = os.environ.get("LORAFUSION_PEERS", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PEERS, reason="LORAFUSION_PEERS names no Python with torch and trl; make test-peers"),
]
LOSS, WEIGHTS = 1e-5, 2.4e-3  # as in test_against_peft.py
LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"], "dropout": 0.0, "same_base": True}
OPTIM = {"lr": 5e-3, "b2": 0.99, "weight_decay": 0.1, "clip": 0.5, "min_lr_ratio": 0.0}
TRAINED = {  # name → optimizer, rows, epochs and global batch; the last batch of each is short
    "cosine": (OPTIM | {"schedule": "cosine"}, 13, 2, 4),
    "floor": (OPTIM | {"schedule": "cosine", "min_lr_ratio": 0.1, "clip": 10.0}, 25, 2, 8),
    "linear": (OPTIM | {"schedule": "linear", "weight_decay": 0.0}, 11, 2, 6),
}
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
RENDERED = {  # name → whether the base has a template, a row, and what SFTTrainer is told
    "text": (False, lambda word: {"text": f"{word} of a batch"}, {}),
    "pairs": (False, lambda word: {"prompt": f"a {word}", "completion": f" of a {word} model"}, {}),
    "chat": (
        True,
        lambda word: {
            "messages": [
                {"role": role, "content": f"{word} {role} {turn}"} for turn in (1, 2) for role in ("user", "assistant")
            ]
        },
        {"assistant_only_loss": True},
    ),
}


def run_script(*arguments: object) -> None:
    done = subprocess.run([PEERS, SCRIPT, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def entry(name: str, data: str, optim: dict, batch: int, start: Path, epochs: int = 1) -> dict:
    return {
        "name": name,
        "data": {"train": data},
        "optim": optim | {"warmup": 0},
        "batch": {"global_samples": batch},
        "lora": LORA | {"init_from": str(start)},
        "epochs": epochs,
    }


def assert_same_training(home: Path, name: str, theirs) -> None:
    rows = [
        row for row in read_rows(home / "run" / "metrics.jsonl") if row["kind"] == "step" and row["adapter"] == name
    ]
    np.testing.assert_allclose([row["loss"] for row in rows], theirs[f"{name}/losses"], rtol=LOSS)
    np.testing.assert_allclose([row["grad_norm"] for row in rows], theirs[f"{name}/norms"], rtol=10 * LOSS)
    before = load_file(home / "start" / "adapter_model.safetensors")
    for key, tensor in small_jobs.exported(home / "run", name).items():
        moved = np.abs(theirs[f"{name}/{key}"] - before[key]).max()
        assert moved > 0
        assert np.abs(tensor - theirs[f"{name}/{key}"]).max() < WEIGHTS * moved, key


@pytest.fixture(scope="module")
def trained(make_base, tmp_path_factory):
    home = tmp_path_factory.mktemp("trainer")
    base = make_base(home / "base")
    run_script("start", base, home / "start")
    entries = [
        entry(name, small_jobs.write_rows(home, name, rows, longest=10), optim, batch, home / "start", epochs)
        for name, (optim, rows, epochs, batch) in TRAINED.items()
    ]
    config = load_config(small_jobs.write_job(home, base, entries))
    prepared, job = prepare(config), {}
    for name, (optim, _, _, batch) in TRAINED.items():
        data = prepared.adapters[name]
        parts = [data.train.sample(int(index)) for index in data.order]
        samples = [(tokens.tolist(), mask.astype(int).tolist()) for tokens, mask in parts]
        shared = {"base": str(base), "start": str(home / "start")}
        job[name] = shared | {"samples": samples, "batch": batch, "optim": optim}
    (home / "job.json").write_text(json.dumps(job))
    run_script("train", home / "job.json", home / "theirs.npz")
    assert train(config, home / "run").exit_code == 0
    return home, np.load(home / "theirs.npz")


@pytest.mark.parametrize("name", TRAINED)
def test_training_together_is_training_alone_with_trainer(name, trained):
    assert_same_training(trained[0], name, trained[1])


@pytest.fixture(scope="module", params=[False, True], ids=["no template", "template"])
def rendered(request, make_base, tmp_path_factory):
    """A run of the adapters of a base, what it trained on in order, and what SFTTrainer made of the same rows."""
    home = tmp_path_factory.mktemp("sft")
    base = make_base(home / "base")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    if request.param:
        (base / "chat_template.jinja").write_text(MARKED)
    run_script("start", base, home / "start")
    names = [name for name, (template, _, _) in RENDERED.items() if template == request.param]
    rows, entries = {name: [RENDERED[name][1](word) for word in small_jobs.WORDS[:10]] for name in names}, []
    optim = OPTIM | {"schedule": "cosine"}
    for name in names:
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        entries.append(entry(name, f"{name}.jsonl", optim, 4, home / "start"))
    config = load_config(small_jobs.write_job(home, base, entries))
    prepared, job, samples = prepare(config), {}, {}
    for name in names:
        order = [int(index) for index in prepared.adapters[name].order]
        samples[name] = [prepared.adapters[name].train.sample(index) for index in order]
        job[name] = {"base": str(base), "start": str(home / "start"), "rows": [rows[name][index] for index in order]}
        job[name] |= {"batch": 4, "optim": optim, "sft": RENDERED[name][2]}
    (home / "job.json").write_text(json.dumps(job))
    run_script("sft", home / "job.json", home / "theirs.npz")
    assert train(config, home / "run").exit_code == 0
    return home, samples, np.load(home / "theirs.npz")


def test_rows_are_rendered_masked_and_trained_as_by_sfttrainer(rendered):
    home, samples, theirs = rendered
    for name, parts in samples.items():
        for number, (tokens, mask) in enumerate(parts):
            np.testing.assert_array_equal(tokens, theirs[f"{name}/tokens {number}"], err_msg=f"{name} {number}")
            learned = theirs[f"{name}/labels {number}"] != -100
            np.testing.assert_array_equal(
                mask[1:], learned[1:], err_msg=f"{name} {number}"
            )  # nothing predicts the first
        assert_same_training(home, name, theirs)
