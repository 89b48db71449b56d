"""Objectives and kinds where they seldom meet: each trains, and its first gradient is that of the adapter alone."""

from __future__ import annotations

import json
import random

import pytest
import small_jobs

from lorafusion_jax.cli.main import run
from lorafusion_jax.families.experts import Experts, Router
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.rope import Rope

pytestmark = pytest.mark.nightly
ROWS = {"reward": "dpo", "distill": "sft", "dft": "sft"}  # whose rows an objective takes, if not its own
TEACHER = {"name": "distill", "reference": "b", "beta": 0.5}
KTO, CIT = {"name": "kto", "group": 2}, {"name": "cit", "group": 2}
TOKENS = {"trainable_tokens": [61, 40]}
TENSOR, STAGES = {"mesh": {"tensor": 2}}, {"mesh": {"stages": 2}}
# name → objective and LoRA settings of adapters a and b, and sections of the job
CASES = {
    "kto and reward on devices of a layer": ((KTO, {}), ({"name": "reward"}, {}), TENSOR),
    "grpo and cit on devices of a layer": (({"name": "grpo", "beta": 0.05}, {}), (CIT, {}), TENSOR),
    "tokens with dpo and kto": (({"name": "dpo"}, TOKENS), (KTO, TOKENS | {"kind": "dora"}), {}),
    "tokens with reward and cit on stages": (({"name": "reward"}, TOKENS), (CIT, TOKENS), STAGES),
    "distill from dora on fp8": ((TEACHER, {}), ({"name": "sft"}, {"kind": "dora"}), {"stored": "fp8"}),
    "pissa and vera on nf4": (({"name": "dpo"}, {"kind": "pissa"}), (KTO, {"kind": "vera"}), {"stored": "nf4"}),
    "biases and tokens on fp8": (
        ({"name": "reward"}, {"lora_bias": True}),
        ({"name": "dpo"}, TOKENS),
        {"stored": "fp8"},
    ),
    "pissa and dora from their start": (
        ({"name": "dpo", "reference": "start"}, {"kind": "pissa"}),
        (KTO | {"reference": "start"}, {"kind": "dora"}),
        {"mesh": {"fsdp": 2}},
    ),
}
BALANCED = {
    "dora and dpo": (({"name": "sft"}, {"kind": "dora"}), ({"name": "dpo"}, TOKENS), {}),
    "kto and reward on stages": ((KTO, {}), ({"name": "reward"}, {}), STAGES),
}


def write_data(folder) -> None:
    draw = random.Random(3)

    def text() -> str:
        return " " + " ".join(draw.choices(small_jobs.WORDS, k=draw.randint(1, 8)))

    rows = {
        "sft": lambda _: {"prompt": text(), "completion": text()},
        "dpo": lambda _: {"prompt": text(), "chosen": text(), "rejected": text() + " no"},
        "kto": lambda number: {"prompt": text(), "completion": text(), "label": number % 3 > 0},
        "grpo": lambda _: {"prompt": text(), "completion": text(), "advantage": draw.gauss(0, 1)},
        "cit": lambda _: {"prompt": text(), "paraphrase": text() + " yes", "completion": text()},
    }
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(number)) + "\n" for number in range(8)))


def train_and_verify(folder, base, case, **train) -> None:
    write_data(folder)
    *adapters, sections = case
    entries = [
        {
            "name": name,
            "data": {"train": f"{ROWS.get(objective['name'], objective['name'])}.jsonl"},
            "objective": objective,
            "lora": {"rank": 2, "targets": ["q_proj"], "dropout": 0.0} | lora,
            "batch": {"global_samples": 2},
            "optim": {"lr": 0.01, "schedule": "constant", "warmup": 0},
        }
        for name, (objective, lora) in zip("ab", adapters, strict=True)
    ]
    stored = sections.get("stored", "none")
    sections = {key: value for key, value in sections.items() if key != "stored"}
    sections |= {"batch": {"capacity_tokens": 256, "tile_tokens": 16}, "train": {"max_steps": 2} | train}
    job = small_jobs.store_base_as(stored, small_jobs.write_job(folder, base, entries, **sections))
    assert run(["train", str(job), "--out", str(folder / "run")]) == 0
    for name in "ab":
        assert run(["verify", str(folder / "run"), name, "--steps", "1"]) == 0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_adapters_that_seldom_meet_train_as_alone(case, tmp_path, tiny_base, kept_programs):
    train_and_verify(tmp_path, tiny_base, case)


@pytest.mark.parametrize("case", BALANCED.values(), ids=BALANCED)
def test_they_do_so_beside_a_loss_of_routers(case, tmp_path, make_base, kept_programs):
    experts = Experts(width=32, inner=12, count=4, active=2, router=Router(normalise=False))
    layers = (LayerType(rope=Rope()), LayerType(rope=Rope()))
    base = make_base(tmp_path / "base", family="qwen3_moe", qk_norm=True, experts=experts, pattern=layers)
    train_and_verify(tmp_path, base, case, router_aux=0.1)
