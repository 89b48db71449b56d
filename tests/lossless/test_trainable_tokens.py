"""Trainable tokens: each adapter trains its own rows of the embedding, and of the head, as if it were alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
import small_jobs
from more_cases import nightly
from safetensors.numpy import load_file
from small_jobs import exported, largest_difference

from lorafusion_jax.cli.main import run
from lorafusion_jax.config import load_config
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.planning.memory.problem import memory_problem
from lorafusion_jax.planning.memory.stored import adapter_bytes, trainable_parameters
from lorafusion_jax.training import train
from lorafusion_jax.training.verify import verify_exports

EMBED = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
HEAD = "base_model.model.lm_head.token_adapter.trainable_tokens_delta"
# Sets that overlap, in another order than the table's; the last has none.
TOKENS = {"law": [61, "<|end|>", 40], "med": [40, 99], "tax": None}
LORA = {"law": {}, "med": {"kind": "dora", "rank": 3}, "tax": {}}


def entries(rows: dict[str, str], tokens: dict, held_out: bool, **changes) -> list[dict]:
    return [
        {
            "name": name,
            "data": {"train": rows[name]} | ({"eval": rows[name]} if held_out else {}),
            "batch": {"global_samples": 4},
            "lora": {"rank": 2, "dropout": 0.0, "targets": ["q_proj"], **LORA[name], "trainable_tokens": tokens[name]},
            "optim": {"lr": 0.02, "schedule": "constant", "clip": 0.5} | changes.get(name, {}),
            "seed": seed,
        }
        for seed, name in enumerate(tokens)
    ]


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_base):
    """job(names, base, tokens, sections, held_out, **optim of an adapter) → job file."""
    folder = tmp_path_factory.mktemp("job")
    rows = {name: small_jobs.write_rows(folder, name, 9, longest=12) for name in TOKENS}

    def make(names=tuple(TOKENS), base=tiny_base, tokens=TOKENS, sections=None, held_out=True, **changes):
        chosen = [entry for entry in entries(rows, tokens, held_out, **changes) if entry["name"] in names]
        return small_jobs.write_job(folder, base, chosen, **(sections or {}))

    return make


@pytest.fixture(scope="module")
def joint(job, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "joint"
    assert run(["train", str(job()), "--out", str(out)]) == 0
    return out


def config_of(run_folder, name: str) -> dict:
    return json.loads((run_folder / "adapters" / name / "latest" / "adapter_config.json").read_text())


def test_folders_hold_the_rows_in_the_order_of_their_ids(joint, tiny_base):
    assert [config_of(joint, name).get("trainable_token_indices") for name in TOKENS] == [[61, 0, 40], [40, 99], None]
    assert {name: exported(joint, name)[EMBED].shape for name in ("law", "med")} == {"law": (3, 32), "med": (2, 32)}
    assert EMBED not in exported(joint, "tax")
    base = load_file(tiny_base / "model.safetensors")["model.embed_tokens.weight"].astype(np.float32)
    moved = np.abs(exported(joint, "law")[EMBED] - base[[61, 0, 40]]).max(1)
    assert (moved > 1e-3).all()  # a tied row has a gradient from every softmax, met or not
    for check in verify_exports(joint).values():
        assert check.same


@pytest.mark.parametrize(
    ("names", "sections"),
    [
        (("law",), {"mesh": {"stages": 2, "data": 2}}),  # every stage compiles the steps of every adapter
        nightly(("law",), {}),
        nightly(tuple(TOKENS), {"mesh": {"stages": 2, "data": 2}}),
    ],
    ids=str,
)
def test_joint_equals_alone(joint, job, tmp_path, names, sections):
    """A folder has one row for both uses; losses tell whether the stages that have one each hold the same."""
    file = job(names, sections=sections, held_out=False)
    assert run(["train", str(file), "--out", str(tmp_path / "alone")]) == 0
    for name in names:
        assert largest_difference(exported(joint, name), exported(tmp_path / "alone", name)) < 1e-5
        np.testing.assert_allclose(losses(joint, name), losses(tmp_path / "alone", name), rtol=1e-5)


def test_what_one_does_changes_no_bit_of_the_others(joint, job, tmp_path, capsys):
    """An adapter whose rows overflow fails alone, though another trains one of its tokens, too."""
    sick = job(law={"lr": 1e30, "clip": 0})
    assert run(["train", str(sick), "--out", str(tmp_path / "sick")]) == 3
    assert "law  FAILED" in capsys.readouterr().out
    for name in ("med", "tax"):
        ours, theirs = exported(tmp_path / "sick", name), exported(joint, name)
        for key in theirs:
            np.testing.assert_array_equal(ours[key], theirs[key])


@pytest.mark.parametrize("stages", [1, nightly(2)])
def test_resumed_run_equals_uninterrupted_run(joint, job, tmp_path, stages):
    def power_cut(event) -> None:
        if event.kind == "step" and event.adapter == "law" and event.step == 2:
            raise RuntimeError("power cut")

    file = job(sections={"mesh": {"stages": stages}, "save": {"every_steps": 1}})
    whole = joint
    if stages > 1:
        whole = tmp_path / "whole"
        assert run(["train", str(file), "--out", str(whole)]) == 0
    with pytest.raises(RuntimeError, match="power cut"):
        train(load_config(file), tmp_path / "cut", listeners=[power_cut])
    assert run(["resume", str(tmp_path / "cut")]) == 0
    for name in TOKENS:
        ours, theirs = exported(tmp_path / "cut", name), exported(whole, name)
        for key in theirs:
            np.testing.assert_array_equal(ours[key], theirs[key])


def losses(run_folder, name: str) -> list[float]:
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "step" and row["adapter"] == name]


def eval_losses(run_folder) -> list[float]:
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [row["eval_loss"] for row in rows if row["kind"] == "eval" and row["adapter"] == "law"]


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        ({"family": "gemma", "tie_embeddings": True, "embedding_scale": 32**0.5}, [2, 40]),  # scaled embeddings
        ({"tie_embeddings": False}, {"embed_tokens": [40, 61], "lm_head": [61, 3, 40]}),
    ],
    ids=["scaled", "untied"],
)
def test_a_merged_model_and_a_continued_folder_have_the_rows(shape, tokens, job, make_base, tmp_path):
    base, short = make_base(tmp_path / "base", **shape), {"train": {"max_steps": 2}}
    file = job(("law",), base, {"law": tokens}, short)
    assert run(["train", str(file), "--out", str(tmp_path / "run")]) == 0
    trained, held_out = exported(tmp_path / "run", "law"), eval_losses(tmp_path / "run")
    assert (HEAD in trained) == isinstance(tokens, dict)
    assert config_of(tmp_path / "run", "law")["trainable_token_indices"] == tokens
    assert run(["export", str(tmp_path / "run"), "law", "--to", str(tmp_path / "merged"), "--merge"]) == 0
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    ids = tokens["embed_tokens"] if isinstance(tokens, dict) else tokens
    np.testing.assert_array_equal(merged["model.embed_tokens.weight"][ids], trained[EMBED])
    if isinstance(tokens, dict):
        np.testing.assert_array_equal(merged["lm_head.weight"][tokens["lm_head"]], trained[HEAD])
    again = job(("law",), tmp_path / "merged", {"law": tokens}, short)  # equal shapes: the programs of the first run
    assert run(["train", str(again), "--out", str(tmp_path / "of-merged")]) == 0
    assert eval_losses(tmp_path / "of-merged")[0] == pytest.approx(held_out[-1], rel=1e-5)
    settings = json.loads(file.read_text())
    settings["base"]["model"] = str(base)
    settings["adapters"][0]["lora"] = {"init_from": str(tmp_path / "run/adapters/law/latest"), "dropout": 0.0}
    file.write_text(json.dumps(settings))
    assert run(["train", str(file), "--out", str(tmp_path / "more")]) == 0
    assert config_of(tmp_path / "more", "law")["trainable_token_indices"] == tokens
    assert eval_losses(tmp_path / "more")[0] == pytest.approx(held_out[-1], rel=1e-6)
    settings["adapters"][0]["lora"]["trainable_tokens"] = [5]
    file.write_text(json.dumps(settings))
    assert run(["check", str(file)]) == 2


def test_a_plan_counts_the_rows_at_both_ends(job, tiny_base):
    model = ModelConfig.from_hf(tiny_base)
    counts = {}
    for stages in (1, 2):
        for tokens in (TOKENS, dict.fromkeys(TOKENS)):
            config = load_config(job(tokens=tokens, sections={"mesh": {"stages": stages}}))
            problem = memory_problem(config, model)
            bytes_of = [sum(adapter_bytes(problem, stage)) for stage in range(stages)]
            counts[stages, tokens is TOKENS] = np.array(bytes_of), trainable_parameters(problem)
    rows = 4 * 5 * model.hidden_size
    for stages, wanted in ((1, [2 * rows]), (2, [rows, rows])):
        (with_rows, trained), (without, others) = counts[stages, True], counts[stages, False]
        assert (with_rows - without).tolist() == wanted
        assert trained - others == 5 * model.hidden_size  # a tied row is one row


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ("[]", "at least one token; leave trainable_tokens out to train none"),
        ("{}", "a list of different ids or tokens"),
        ("7", "a list of different ids or tokens"),
        ("[7, 7]", "a list of different ids or tokens"),
        ("[-1]", "a list of different ids or tokens"),
        ("[true]", "a list of different ids or tokens"),
        ("[1.5]", "a list of different ids or tokens"),
        ("['']", "a list of different ids or tokens"),
        ("{norm: [1]}", "a list of different ids or tokens"),
        ("[3072]", "trainable_tokens has 3072, and the base has the tokens 0 to 3071"),
        ("['<|nd|>']", "'<|nd|>', which is no token of the base's tokenizer; did you mean '<|end|>'?"),
        ("['<|end|>', 0]", "trainable_tokens has '<|end|>' twice, as a text and as an id"),
        ("{lm_head: [4]}", "trainable_tokens names rows of lm_head, and the base's head is its embedding"),
        ("[1] adapters.law.lora.kind=vera", "adapters of kind vera have no trainable_tokens, in PEFT either"),
        (
            "[1] adapters.law.objective={name: distill, reference: med}",
            "compares distributions over the base's",
        ),
        ("null adapters.law.optim.lr_ratio={tokens: 2}", "the group 'tokens', which adapters of kind lora do not have"),
        ("[1] adapters.law.lora.modules_to_save=[embed_tokens]", "lora.trainable_tokens trains rows of the embedding"),
    ],
)
def test_wrong_tokens_are_named(tokens, says, job, capsys):
    value, *more = tokens.split(" adapters.")
    settings = [f"adapters.law.lora.trainable_tokens={value}", *(f"adapters.{setting}" for setting in more)]
    assert run(["check", str(job(("law", "med"))), *settings]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
