"""Settings of adapters that sample their own rows: what is refused, and how."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lorafusion_jax.config import load_config
from lorafusion_jax.data.model_fit import model_problems
from lorafusion_jax.data.rollouts import PromptRow, RolloutData, argument_problems, load_prompts
from lorafusion_jax.data.tokenizer import load_tokenizer
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.examples import examples_directory
from lorafusion_jax.families.model import ModelConfig

ROLLOUT = {"prompts": "prompts.jsonl", "reward": "exact", "group": 4, "max_tokens": 8}
SCORES = """
from math import fsum

def short(completions): ...
def judged(prompts, completions, solution, scale=1.0): ...
def named(completions, *, level, **columns): ...
def single(prompt): ...
async def awaited(completions): ...
wrapped = short
def speaks(row, answers, cut=80): ...
def speaks_all(*turn): ...
def speaks_once(row): ...
def speaks_by_name(row, answers, *, cut): ...
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "score.py").write_text(SCORES)
    (tmp_path / "broken.py").write_text("def short(:\n")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))

    def load(rollout=None, **adapter):
        entry = {"name": "rl", "objective": "grpo", "rollout": ROLLOUT | (rollout or {})} | adapter
        job = {"base": {"model": "base"}, "data": {"max_length": 64}, "batch": {"capacity_tokens": 128}}
        (tmp_path / "job.yaml").write_text(json.dumps(job | {"adapters": [entry]}))
        return load_config(tmp_path / "job.yaml").adapters[0]

    return load


def test_a_job_names_its_objective_by_a_text_and_its_prompts_once(load):
    adapter = load()
    assert (adapter.objective.name, adapter.lora.dropout, adapter.optim.lr) == ("grpo", 0.0, 1e-5)
    assert adapter.data.train == adapter.rollout.prompts
    assert load(data={"train": "prompts.jsonl"}).data.train == adapter.data.train
    rewards = load({"reward": ["exact", "score.py:short", {"match": "^a", "weight": 2}]}).rollout.reward
    assert [str(reward) for reward in rewards] == ["exact answer", "function score.py:short", "match ^a"]
    assert load({"reward": "score.py:fsum"})  # imported there


@pytest.mark.parametrize(
    ("rollout", "adapter", "says"),
    [
        ({}, {"objective": "sft"}, "does not train on rewarded answers"),
        ({}, {"data": {"train": "other.jsonl"}}, "the same rows as rollout.prompts"),
        ({"reward": None}, {}, "but no reward"),
        ({"reward": []}, {}, "but no reward"),
        ({"reward": {"match": "("}}, {}, "a regular expression"),
        ({"reward": {"url": "ftp://x"}}, {}, "http://"),
        ({"reward": {"exact": "answer", "match": "a"}}, {}, "with one of"),
        ({"reward": {"exact": "answer", "weight": 0}}, {}, "a weight that is not 0"),
        ({"reward": {"exact": "answer", "weight": True}}, {}, "a number"),
        ({"reward": {"adapter": "gone"}}, {}, "no adapter 'gone' in the job"),
        ({"reward": {"adapter": "rl"}}, {}, "its objective is grpo"),
        ({"reward": {"adapter": "plain"}}, {}, "the folder has no score"),
        ({"reward": "score.py"}, {}, "FILE.py:function"),
        ({"reward": "score.py:shrot"}, {}, "short"),
        ({"reward": "gone.py:short"}, {}, "there is no file"),
        ({"reward": "broken.py:short"}, {}, "cannot be read"),
        ({"reward": "score.py:awaited"}, {}, "is async"),
        ({"turns": 2, "tool_tokens": 8, "tool": "score.py:speaks_once"}, {}, "called as speaks_once(row, answers)"),
        ({"turns": 2, "tool_tokens": 8, "tool": "score.py:speaks_by_name"}, {}, "cannot be called as"),
        ({"group": 5}, {}, "does not divide"),
        ({"group": 1}, {}, "has no others"),
        ({"max_tokens": 64}, {}, "no room for a prompt"),
        ({"turns": 2, "tool_tokens": 60, "tool": "score.py:speaks"}, {}, "or rollout.tool_tokens"),
        ({"turns": 2}, {}, "need a tool"),
        ({"tool": "score.py:short"}, {}, "need a tool"),
        ({"temperature": 0}, {}, "more than 0"),
        ({"lag": True}, {}, "whole number"),
        ({"advantages": "leave-one-out"}, {}, "leave_one_out"),
        ({}, {"data": {"eval": 0.1}}, "file of their own"),
        ({}, {"eval": {"score": "score.py:short"}}, "held-out prompts"),
        ({"groups": 4}, {}, "group"),
    ],
)
def test_what_cannot_be_is_named(load, rollout, adapter, says):
    with pytest.raises(LoraFusionError) as raised:
        load(rollout, **adapter)
    assert says in str(raised.value)


def test_a_score_may_end_an_adapter(load):
    scored = {"data": {"eval": "prompts.jsonl"}, "early_stop": {"metric": "eval_score"}}
    assert load(eval={"score": "score.py:short"}, **scored).early_stop.metric == "eval_score"
    with pytest.raises(LoraFusionError, match="eval_score"):
        load(**scored)


@pytest.mark.parametrize("tool", ["speaks", "speaks_all", "wrapped"])
def test_a_tool_may_have_further_arguments_with_defaults(load, tool):
    assert load({"turns": 2, "tool_tokens": 8, "tool": f"score.py:{tool}"}).rollout.tool == f"score.py:{tool}"


@pytest.mark.parametrize(
    ("function", "columns", "argument"),
    [
        ("judged", {"solution"}, None),
        ("judged", {"answer"}, "solution"),
        ("named", {"answer"}, "level"),
        ("named", {"level"}, None),
        ("single", {"prompt"}, "prompt"),  # they are called prompts
        ("short", set(), None),
        ("wrapped", set(), None),  # what is assigned may take anything
    ],
)
def test_arguments_of_a_function_are_columns_of_the_rows(load, tmp_path, function, columns, argument):
    adapter = load({"reward": ["exact", f"score.py:{function}"]})
    row = dict.fromkeys({"prompt", "answer", *columns}, "text")
    rollout = RolloutData(prompts=[PromptRow(prompt="text", tokens=[1], row=row)])
    problems = [str(problem) for problem in argument_problems(adapter, tmp_path, rollout)]
    assert bool(problems) == (argument is not None)
    assert all(f"the argument '{argument}'" in problem for problem in problems)


def test_a_score_of_other_objectives_gets_prompts_answers_and_completions(load):
    rows = {"data": {"train": "rows.jsonl", "eval": "rows.jsonl"}, "objective": "sft"}
    none = {"prompts": None, "reward": None, "group": 8, "max_tokens": 128}
    with pytest.raises(LoraFusionError, match="the argument 'solution'"):
        load(none, eval={"score": "score.py:judged"}, **rows)
    assert load(none, eval={"score": "score.py:short"}, **rows).eval.score


def test_prompts_without_room_for_an_answer_are_named_or_left_out(load, tmp_path):
    base = examples_directory() / "base"
    tokenizer, rows = load_tokenizer(base), [{"prompt": "say " * count, "answer": "a"} for count in (2, 90, 3)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(LoraFusionError, match=r"1 prompts leave no room.*data\.max_length=64") as raised:
        load_prompts("prompts.jsonl", load(data={"on_long": "error"}), tokenizer, tmp_path)
    assert "prompts.jsonl, line 2" in str(raised.value)
    samples, prompts = load_prompts("prompts.jsonl", load(data={"on_long": "drop"}), tokenizer, tmp_path)
    assert (samples.rows.tolist(), samples.report.too_long, len(prompts)) == ([0, 2], (1,), 2)
    assert any("[data.too-long] 1 prompts" in note for note in samples.report.notes)
    model = ModelConfig.from_hf(base)
    arguments = {"tokenizer": tokenizer, "adapter": "rl", "directory": base}
    assert not model_problems(samples, model, **arguments)
    small = replace(model, max_positions=8)
    (problem,) = model_problems(samples, small, reserved=40, **arguments)  # the answer counts
    assert problem.code == "model.positions"
    assert "with 40 tokens of answers" in problem.what
    assert "rollout.max_tokens" in problem.fix


def test_prompts_may_be_messages_in_a_text(load, tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": prompt, "answer": "a"} for prompt in (messages, json.dumps(messages), json.dumps(messages[0]))]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, prompts = load_prompts("prompts.jsonl", load(), load_tokenizer(examples_directory() / "base"), tmp_path)
    assert [row.prompt for row in prompts] == [messages] * 3


def test_keys_of_messages_that_the_template_does_not_write_are_noted(load, tmp_path):
    ask = {"role": "user", "content": "What is 1 + 1?"}
    rows = [{"prompt": [ask], "answer": "2"}, {"prompt": [ask | {"mood": "calm"}], "answer": "2"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(examples_directory() / "base")
    samples, prompts = load_prompts("prompts.jsonl", load(), tokenizer, tmp_path)
    assert prompts[0].tokens == prompts[1].tokens
    (note,) = samples.report.notes
    assert note.startswith("[data.unused-key] the chat template does not use 'mood'")
    (tmp_path / "prompts.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert not load_prompts("prompts.jsonl", load(), tokenizer, tmp_path)[0].report.notes


def test_the_example_is_valid_and_short():
    path = Path(__file__).parents[2] / "examples" / "rl" / "rl.yaml"
    assert len(path.read_text().splitlines()) <= 60
    assert {adapter.rollout.is_on for adapter in load_config(path).adapters} == {True}


def test_recipes_are_short_and_each_has_a_curve():
    folder = Path(__file__).parents[2] / "examples" / "recipes"
    recipes = {path.stem: path.read_text() for path in folder.glob("*.py")}
    assert set(recipes) == {"arithmetic", "distillation", "preferences", "tools"}
    assert max(len(text.splitlines()) for text in recipes.values()) <= 60
    assert all(f"python examples/recipes/{name}.py" in text for name, text in recipes.items())
