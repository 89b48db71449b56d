"""Objectives and kinds against TRL's trainers and PEFT: losses of 20 AdamW steps, first gradients, adapters at the end.

All cases of a base are adapters of one job, so this also shows that they do not disturb each other. Cases of kinds have
rows of tokens, which no template changes, so that they share the base of the others. golden/trl.npz is made by
make_trl_golden.py, which has the versions.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import trl_case as case
from more_cases import nightly
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from lorafusion_jax.cli.main import run
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.examples import examples_directory
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import RunFolder
from lorafusion_jax.training.references import read_references

GOLDEN = Path(__file__).parent / "golden" / "trl.npz"
# torch and jax sum in other orders, through layers and 20 steps of Adam, which divides by the root of a gradient's
# square: where a gradient is nearly 0, its rounding counts.
FIRST_LOSS, LOSSES, GRADIENT, WAY = 1e-5, 1e-3, 1e-4, 1e-3
# The first step of AdamW is g lr / (|g| + eps), here g but for |g| / eps. The programs are those of the 20 steps.
ALONG = {"name": "adamw", "lr": 1e6, "eps": 1e6, "weight_decay": 0.0}
QUICK = {
    "batch": {"capacity_tokens": 512, "tile_tokens": 16},
    "train": {"log_every_s": 0, "plan_seconds": 0.1, "block_layers": 1},
    "data": {"max_length": 60},
}
ALWAYS = (
    "dpo",
    "kto",
    "grpo",
    "reward_margin",
    "dora",
    "vera",
    "tokens",
    "pissa",
    "patterns",
    "bias",
)
NAMES = [name if name in ALWAYS else nightly(name) for name in case.CASES]


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN)


def has_template(name: str) -> bool:
    """Whether the base of a case has a chat template."""
    _, template, objective = case.CASES[name]
    return template or objective["name"] == "sft"


def tokens_of(rows: list[dict]) -> list[dict]:
    """Prompts and completions as TRL gives them to a model without a template."""
    folder = examples_directory() / "base"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(json.loads((folder / "tokenizer_config.json").read_text())["eos_token"])
    samples = []
    for row in rows:
        prompt, answer = (
            tokenizer.encode(row[name], add_special_tokens=False).ids for name in ("prompt", "completion")
        )
        learned = [*answer, end]
        samples.append({"input_ids": prompt + learned, "labels": [-100] * len(prompt) + learned})
    return samples


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, kept_programs):
    """Runs of the cases that are tested: 20 steps of AdamW, and one step along the gradient; with their start."""
    items = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    tested = {item.callspec.params["name"] for item in items}
    folder = tmp_path_factory.mktemp("trl")
    made = {}
    for template in (True, False):
        names = [name for name in case.CASES if has_template(name) == template and name in tested]
        if not names:
            continue
        base = case.write_model(folder / f"base-{template}", examples_directory() / "base", template=template)
        entries = []
        for name in names:
            rows_of, text_template, objective = case.CASES[name]
            rows = rows_of() if text_template == template else tokens_of(rows_of())
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            entries.append(
                {
                    "name": name, "data": {"train": f"{name}.jsonl"}, "objective": objective,
                    "lora": lora_of(name, folder, base),
                    "batch": {"global_samples": 1 if name == "kto" else case.BATCH},
                    "epochs": case.STEPS * (1 if name == "kto" else case.BATCH) // (5 if name == "kto" else case.ROWS),
                }
            )  # fmt: skip
        for kind, optim, steps in (
            ("steps", {"name": "adamw", "lr": case.LR, "weight_decay": 0.0}, case.STEPS),
            ("gradient", ALONG, 1),
        ):
            job = QUICK | {
                "base": {"model": str(base), "dtype": "float32"},
                "adapters": entries,
                "optim": optim | {"schedule": "constant", "warmup": 0, "clip": 0},
            }
            job["train"] = job["train"] | {"max_steps": steps}
            file = folder / f"{kind}-{template}.yaml"
            file.write_text(json.dumps(job))
            assert run(["train", str(file), "--out", str(folder / f"{kind}-{template}")]) == 0
        made[template] = folder
    return made


def lora_of(name: str, folder: Path, base: Path) -> dict:
    """Returns the settings of a case's adapter, and writes the folder from which it starts."""
    if name == "pissa":
        return {"kind": "pissa", "rank": case.RANK, "alpha": case.ALPHA, "targets": list(case.TARGETS), "dropout": 0.0}
    head, kind = case.CASES[name][2]["name"] == "reward", name if name in case.KINDS else "lora"
    start = case.write_adapter(folder / f"start-{name}", base, head=head, kind=kind)
    ours = {"fa": "lora-fa", "dora_layers": "dora"}.get(name, name if name in ("dora", "vera") else "lora")
    return {"init_from": str(start), "kind": ours, "dropout": 0.0}


def end(runs, name: str, kind: str) -> dict[str, np.ndarray]:
    folder = runs[has_template(name)] / f"{kind}-{has_template(name)}"
    return load_file(folder / "adapters" / name / "latest" / "adapter_model.safetensors")


def start(runs, name: str) -> dict[str, np.ndarray]:
    return load_file(runs[has_template(name)] / f"start-{name}" / "adapter_model.safetensors")


def plain(key: str) -> str:
    return key.replace("base_model.model.model.layers.", "")


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_and_the_adapter_are_those_of_trl(name, runs, golden):
    folder = runs[has_template(name)] / f"steps-{has_template(name)}"
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "step" and row["adapter"] == name]
    losses, wanted = np.array([row["loss"] for row in rows]), golden[f"{name}/losses"]
    np.testing.assert_allclose(losses[0], wanted[0], rtol=FIRST_LOSS)
    np.testing.assert_allclose(losses, wanted, rtol=LOSSES)
    if name == "pissa":
        return
    before, after = start(runs, name), end(runs, name, "steps")
    trained = [key for key in after if f"{name}/end/{plain(key)}" in golden]
    assert len(trained) >= len(after) / 2
    assert all(np.array_equal(after[key], before[key]) for key in after if key not in trained)
    apart = sum(np.sum((after[key] - golden[f"{name}/end/{plain(key)}"]) ** 2.0) for key in trained)
    moved = sum(np.sum((golden[f"{name}/end/{plain(key)}"] - before[key]) ** 2.0) for key in trained)
    assert apart**0.5 <= WAY * moved**0.5


@pytest.mark.parametrize("name", ["pissa"])
def test_pissa_moves_as_peft(name, runs, golden):
    """The folder has twice the rank: the difference of the products of A and B at the end and at the start."""
    after = end(runs, name, "steps")
    for key in [key for key in after if "lora_A" in key]:
        wanted = golden[f"{name}/moved/{plain(key).removesuffix('.lora_A.weight')}"]
        product = after[key.replace("lora_A", "lora_B")].astype(np.float64) @ after[key]
        assert after[key].shape[0] == 2 * case.RANK
        assert np.linalg.norm(product - wanted) <= WAY * np.linalg.norm(wanted), key


@pytest.mark.parametrize("name", [name for name in NAMES if name != "pissa"])
def test_the_first_gradient_is_that_of_trl(name, runs, golden):
    before, after = start(runs, name), end(runs, name, "gradient")
    for key in after:
        if f"{name}/gradient/{plain(key)}" not in golden:
            continue
        wanted = golden[f"{name}/gradient/{plain(key)}"]
        rounding = np.finfo(np.float32).eps * np.linalg.norm(before[key])  # of start - gradient
        apart = np.linalg.norm(before[key].astype(np.float64) - after[key] - wanted)
        assert apart <= GRADIENT * np.linalg.norm(wanted) + rounding, key


@pytest.mark.parametrize("name", ["dpo"])
def test_stored_references_are_read_again_or_named(name, runs, tmp_path):
    """As at a resume, and by `verify`."""
    template = has_template(name)
    run_folder = shutil.copytree(runs[template] / f"steps-{template}", tmp_path / "run", symlinks=True)
    record = json.loads((run_folder / "run.json").read_text())
    config = RunFolder(run_folder).read_config()

    def read():
        return read_references(run_folder, record, config, prepare(config), [name]).adapters[name].train.reference

    file = run_folder / "references" / f"{name}.safetensors"
    np.testing.assert_array_equal(read(), load_file(file)["train"])
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(LoraFusionError, match=r"reference\.damaged\] dpo"):
        read()
    file.unlink()
    with pytest.raises(LoraFusionError, match=r"reference\.missing\] dpo"):
        read()
