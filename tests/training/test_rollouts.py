"""Adapters that sample their own rows: beside others, alone, after a kill, and with rewards that fail."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from small_jobs import exported, largest_difference, write_job, write_rows

import lorafusion_jax as lf
from benchmarks.saved_model import load_decoder
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.verify_folder import verify_folder
from lorafusion_jax.cli.main import run as run_command
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.log_file import read_rows, without_crc
from lorafusion_jax.objective.choose import choose
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.report.events import SlotDone
from lorafusion_jax.training.compare_alone import compare_alone
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.revisions import extended

REWARDS = """
def letters(prompts, completions, bonus):
    return [(sum(c.islower() for c in text) + more) / (len(text) + 1) for text, more in zip(completions, bonus)]

def echo(row, turns):
    return f"{row['prompt']} {len(turns)}" if turns[-1] else None

def constant(completions, answer):
    assert all(answer) and len(answer) == len(completions) == 2
    return [0.25, 0.75]

def broken_later(completions, bonus):
    if LAST in bonus:
        raise ValueError("no judge today")
    return [float(len(text)) for text in completions]
"""
KILLED_AT = 9  # after the save at slot 6, in the middle of a batch of ppo
ROLLOUT = {"prompts": "prompts.jsonl", "group": 4, "max_tokens": 6}
ADAPTERS = [
    {"name": "sft", "data": {"train": "law.jsonl"}, "batch": {"global_samples": 4}, "lora": {"rank": 4}, "epochs": 2},
    {
        "name": "ppo",
        "objective": {"name": "ppo", "beta": 0.05},
        "rollout": ROLLOUT | {"reward": "rewards.py:letters"},
        "data": {"eval": "prompts.jsonl"},
        "eval": {"score": "rewards.py:letters", "max_tokens": 6},
        "batch": {"global_samples": 12},
        "lora": {"rank": 4},
        "optim": {"lr": 0.01},
        "epochs": 2,
    },
    {
        "name": "rloo",
        "objective": {"name": "rloo", "beta": 0.1},
        "rollout": ROLLOUT
        | {"reward": "rewards.py:letters", "lag": 1, "turns": 2, "tool": "rewards.py:echo", "tool_tokens": 24},
        "data": {"max_length": 64},
        "batch": {"global_samples": 12},
        "lora": {"rank": 4},
        "optim": {"lr": 0.01},
        "epochs": 2,
    },
]
BROKEN = {
    "name": "broken",
    "objective": "grpo",
    "rollout": ROLLOUT | {"reward": "rewards.py:broken_later"},
    "data": {},
    "eval": {},
}
ADAPTERS.append(ADAPTERS[1] | BROKEN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts")
    write_rows(folder, "law", 8, longest=10)
    rows = [{"prompt": f"say {word}", "bonus": number} for number, word in enumerate(("one", "two", "three", "four"))]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    last = np.random.default_rng((0, 0)).permutation(len(rows))[-1]  # the only prompt that the first step lacks
    (folder / "rewards.py").write_text(f"LAST = {last}\n{REWARDS}")
    return folder


@pytest.fixture(scope="module")
def kept_generation(kept_programs):
    """Runs also share the programs of generation, and one size serves all batches: tracing takes most of a run."""
    from lorafusion_jax.generation import engine, generator
    from lorafusion_jax.generation.programs import GenerationPrograms

    kept = {}

    def programs(stage):
        if stage.programs not in kept:
            kept[stage.programs] = GenerationPrograms(stage)
        return kept[stage.programs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "GenerationPrograms", programs)
        for module in (engine, generator):
            patch.setattr(module, "FEWEST_ROWS", 16)
        patch.setattr(generator, "FEWEST_BLOCKS", 64)
        yield


@pytest.fixture(scope="module")
def train(folder, tiny_base, kept_generation):
    """train(name, adapters) → the run."""

    def train(name: str, adapters: list[dict], eval_every_steps: int | None = None, **arguments) -> lf.Run:
        sections = {"batch": {"capacity_tokens": 128, "tile_tokens": 16}, "data": {"max_length": 32}}
        sections |= {"train": {"eval_every_steps": eval_every_steps}, "lora": {"targets": ["down_proj"]}}
        job = write_job(folder, tiny_base, adapters, save={"every_steps": 2}, **sections)
        return lf.train(lf.load_job(job), folder / name, **{"progress": False, **arguments})

    train.folder = folder
    return train


@pytest.fixture(scope="module")
def together(train):
    return train("together", ADAPTERS)


def steps_of(run: lf.Run, name: str) -> list[dict]:
    rows = [row for row in read_rows(run.folder / "metrics.jsonl") if row["kind"] == "step" and row["adapter"] == name]
    return [{key: value for key, value in row.items() if key not in ("time", "crc", "slot")} for row in rows]


def test_adapters_train_on_what_they_sample_beside_others(together):
    plan = RunFolder(together.folder).read_plan()
    shared = [{ref.adapter for ref in slot.samples} for slot in plan.slots]
    assert {"sft", "ppo"} <= set[str]().union(*(names for names in shared if len(names) > 1)), shared
    for name in ("ppo", "rloo"):
        steps = steps_of(together, name)
        assert len(steps) == 3
        assert all(0 <= row["reward"] <= 2 for row in steps)
    on_policy = steps_of(together, "ppo")
    assert all(row["lag"] == 0 for row in on_policy)
    assert max(abs(row["ratio"] - 1) for row in on_policy) < 1e-5  # the sampler's log p is the trainer's
    assert on_policy[0]["kl"] == 0  # the adapter is its reference, and rounding of the sampler is no reward
    assert on_policy[1]["kl"] != 0
    lags = [row["lag"] for row in steps_of(together, "rloo")]
    assert set(lags) <= {0, 1}
    assert any(row["kl"] != 0 for row in steps_of(together, "rloo"))


def test_a_tool_speaks_between_the_answers(together):
    folder = sorted((together.folder / "rollouts").glob("*.json"))[0]
    (rloo,) = [batch for batch in json.loads(without_crc(folder.read_text())) if batch["adapter"] == "rloo"]
    for answer in rloo["answers"]:
        assert len(answer["texts"]) == 2
        said = [token for token, learned in zip(answer["tokens"], answer["learned"], strict=True) if not learned]
        assert said
        assert all(p <= 0 for p in answer["logprobs"])
        assert {p for p, learned in zip(answer["logprobs"], answer["learned"], strict=True) if not learned} == {0.0}


def test_held_out_prompts_are_rewarded_and_scored(together):
    rows = [row for row in read_rows(together.folder / "metrics.jsonl") if row["kind"] == "eval"]
    assert [row["step"] for row in rows] == [0, 3]
    for row in rows:
        assert row["adapter"] == "ppo"
        assert row["eval_loss"] == -row["eval_reward"]
        assert row["eval_score"] == row["eval_reward"]  # the same function of the same answers


def test_together_is_as_alone(together, train):
    alone = train("alone", ADAPTERS[1:2])
    assert largest_difference(exported(alone.folder, "ppo"), exported(together.folder, "ppo")) <= 1e-5
    config = json.loads((alone.folder / "adapters" / "ppo" / "latest" / "adapter_config.json").read_text())
    assert config["modules_to_save"] is None  # the value head stays in the run
    assert steps_of(alone, "ppo")[-1]["value"] != 0
    rewards = [[row["reward"] for row in steps_of(run, "ppo")] for run in (alone, together)]
    assert rewards[0] == rewards[1]


def test_an_adapter_whose_reward_fails_stops_alone(together, folder):
    broken = together.adapters["broken"]
    assert broken["status"] == "failed"
    assert broken["step"] == 1
    (event,) = [row for row in read_rows(together.folder / "events.jsonl") if row["kind"] == "adapter-failed"]
    line = 1 + (folder / "rewards.py").read_text().splitlines().index('        raise ValueError("no judge today")')
    assert f"rewards.py:broken_later failed: ValueError: no judge today, line {line} of rewards.py" in event["reason"]
    assert exported(together.folder, "broken")  # its first step
    assert together.adapters["ppo"]["status"] == together.adapters["sft"]["status"] == "done"


def score_of(folder, base, tokens):
    """The score that a PEFT folder gives a text: its weights added to those of the model, without the session."""
    head = choose("reward", {}).head
    spec, arrays = read_adapter(folder, head=head)
    model = load_decoder(base, dtype=np.float32)
    for path, (a, b) in ((path, pair) for path, pair in arrays.items() if path != "head"):
        linear = model
        for part in path.split("."):
            linear = linear[int(part)] if part.isdigit() else getattr(linear, part)
        linear.kernel[...] = linear.kernel[...] + spec.scale_at(path) * (a @ b)
    state = np.asarray(model.hidden(np.array(tokens)))[-1].astype(np.float64)
    return float(state @ arrays["head"][0][:, 0])


def test_a_reward_adapter_judges_answers(train, folder, tiny_base):
    pairs = [{"prompt": "say one", "chosen": " one", "rejected": f" not {number}"} for number in range(2)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (folder / "one.jsonl").write_text(json.dumps({"prompt": "say one"}) + "\n")
    judge = {"name": "judge", "objective": "reward", "data": {"train": "pairs.jsonl"}, "optim": {"lr": 0.01}}
    policy = {"objective": "grpo", "batch": {"global_samples": 4}, "optim": {"lr": 0.01}, "epochs": 4}
    rollout = ROLLOUT | {"prompts": "one.jsonl"}
    of_run = {"name": "live", **policy, "rollout": rollout | {"reward": {"adapter": "judge"}}}
    run = train("judged", [judge | {"batch": {"global_samples": 2}}, of_run])
    slots = [{ref.adapter for ref in slot.samples} for slot in RunFolder(run.folder).read_plan().slots]
    assert "judge" not in slots[-1]  # it has learned before the last answers are drawn
    trained = run.adapter("judge")
    of_folder = {"name": "policy", **policy, "rollout": rollout | {"reward": {"adapter": str(trained), "weight": 2}}}
    scored = ADAPTERS[0] | {
        "data": {"train": "law.jsonl", "eval": "law.jsonl"},
        "eval": {"score": "rewards.py:constant", "samples": 2, "max_tokens": 4},
        "early_stop": {"metric": "eval_score", "patience": 1},
    }
    alone = train("judged-by-folder", [of_folder, scored], eval_every_steps=1)
    scores = [row for row in read_rows(alone.folder / "metrics.jsonl") if row["kind"] == "eval" and row["step"] > 0]
    assert [(row["step"], row["eval_score"]) for row in scores] == [(1, 0.5), (2, 0.5)]  # no better: it ends
    assert (alone.adapters["sft"]["status"], alone.adapters["sft"]["step"]) == ("done", 2)
    (prompt,) = prepare(RunFolder(alone.folder).read_config()).adapters["policy"].rollout.prompts
    for result, weight, batches in ((run, 1, {3}), (alone, 2, {2, 3})):  # the judge of the run has one step
        files = sorted((result.folder / "rollouts").glob("*.json"))
        drawn = {batch["batch"]: batch for file in files for batch in json.loads(without_crc(file.read_text()))}
        assert batches <= set(drawn)  # since the oldest checkpoint
        for number in batches:
            for answer in drawn[number]["answers"]:
                score = score_of(trained, tiny_base, [*prompt.tokens, *answer["tokens"]])
                assert answer["reward"] == pytest.approx(weight * score, rel=1e-4, abs=1e-6)
            assert len({answer["reward"] for answer in drawn[number]["answers"]}) > 1
    assert steps_of(run, "live")[0]["reward"] != pytest.approx(steps_of(alone, "policy")[0]["reward"] / 2)  # untrained


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def killed(train):
    """The folder of a run that ended in the middle of a batch, without a save at its end."""

    def kill(event):
        if isinstance(event, SlotDone) and event.slot >= KILLED_AT:
            raise Killed

    with pytest.raises(Killed):
        train("killed", ADAPTERS, progress=kill)
    return train.folder / "killed"


def test_a_killed_run_goes_on_bitwise(together, killed, tmp_path, folder):
    rewards = folder / "rewards.py"
    before = rewards.read_text()
    rewards.write_text(f"{before}# another file, the same functions")
    try:
        resumed = lf.resume(shutil.copytree(killed, tmp_path / "run", symlinks=True), progress=False)
    finally:
        rewards.write_text(before)
    unchecked = [row["text"] for row in read_rows(resumed.folder / "events.jsonl") if row["kind"] == "unchecked"]
    assert [text.partition(":")[0] for text in unchecked] == ["rewards.py changed since the run started"]
    for name in ("sft", "ppo", "rloo"):
        whole, again = exported(together.folder, name), exported(resumed.folder, name)
        assert all((whole[key] == again[key]).all() for key in whole)
        assert steps_of(together, name) == steps_of(resumed, name)


def test_answers_that_are_gone_are_not_drawn_again_in_the_middle_of_a_batch(killed, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "run", symlinks=True)
    shutil.rmtree(folder / "rollouts")
    with pytest.raises(lf.LoraFusionError, match=r"rollout\.missing"):
        lf.resume(folder, progress=False)


def test_a_changed_answer_is_not_trained(killed, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "run", symlinks=True)
    assert not any(check.damage for check in verify_folder(folder))
    file = sorted((folder / "rollouts").glob("*.json"))[-1]
    text = file.read_text()
    at = text.index('"tokens": [') + len('"tokens": [')
    file.write_text(f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}")
    for content in (file.read_text(), text[: len(text) // 2], ""):
        file.write_text(content)
        (damaged,) = [check for check in verify_folder(folder) if check.damage]
        assert file.name in damaged.damage[0]
    with pytest.raises(lf.LoraFusionError, match=r"rollout\.damaged"):
        lf.resume(folder, progress=False)


def test_verify_refuses_by_name_and_extensions_keep_the_prompts(together):
    with pytest.raises(lf.LoraFusionError, match=r"verify\.rollout"):
        compare_alone(together.folder, "sft", 1)
    config = RunFolder(together.folder).read_config()
    prepared = prepare(config)
    job = Job(config=config, prepared=prepared, plan=RunFolder(together.folder).read_plan())
    data = extended(job, "ppo", epochs=1, steps=None).prepared.adapters["ppo"]
    assert data.rollout is prepared.adapters["ppo"].rollout
    assert len(data.order) == len(prepared.adapters["ppo"].order) + 16  # an epoch of four prompts, four answers each
    assert (data.order.reshape(-1, 4) == data.order[::4, None]).all()


def test_the_status_shows_the_last_reward(together, capsys):
    """The loss of such an adapter is near 0 at every step."""
    assert run_command(["status", str(together.folder)]) == 0
    shown = capsys.readouterr().out
    for name in ("ppo", "rloo"):
        assert re.search(rf"{name} .* reward {steps_of(together, name)[-1]['reward']:.3f} ", shown)
    assert not re.search(r"sft .* reward", shown)


def test_the_report_shows_answers(together, tmp_path):
    page = together.report().save(tmp_path / "page.html").read_text()
    data = json.loads(page.partition("const data = ")[2].partition(";\n")[0])
    ppo = next(adapter for adapter in data["adapters"] if adapter["name"] == "ppo")
    assert ppo["texts"]
    assert "reward" in json.dumps(ppo)
