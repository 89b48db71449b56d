"""The schema for editors knows what the loader knows."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from lorafusion_jax.cli.init import TEXT
from lorafusion_jax.config.json_schema import job_schema, reference

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = job_schema()
JOBS = {
    "a template": TEXT,
    "every key": reference(),
    "the demo": (ROOT / "examples" / "demo.yaml").read_text(encoding="utf-8"),
    "a sweep with options": """
base: {model: b}
lora: {rank: [4, 8], targets: [q_proj, v_proj]}
optim: {lr: [1e-4, 2e-4]}
adapters:
- {name: pairs, data: {train: pairs.jsonl}, objective: {name: dpo, beta: 0.2, loss: [sigmoid, ipo]}, seed: [0, 1]}
""",
}
WRONG = {
    "a key of another program": "base: {model: b}\nlora: {lora_r: 4}\nadapters: [{name: a, data: {train: t}}]",
    "a section of the run in an adapter": "base: {model: b}\nadapters: [{name: a, mesh: {stages: 2}}]",
    "a list where one value is": "base: {model: b}\nmesh: {stages: [1, 2]}\nadapters: [{name: a, data: {train: t}}]",
    "no adapters": "base: {model: b}\nadapters: []",
    "a text for a number": "base: {model: b}\nlora: {rank: many}\nadapters: [{name: a, data: {train: t}}]",
}


class Core(yaml.SafeLoader):
    """YAML as editors read it: 1e-4 is a number."""


Core.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def problems(text: str) -> list[str]:
    values = yaml.load(text, Loader=Core)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    return [error.message for error in validator.iter_errors(values)]


def test_it_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", JOBS)
def test_it_takes_what_users_write(name):
    assert problems(JOBS[name]) == []


@pytest.mark.parametrize("name", WRONG)
def test_it_marks_what_the_loader_refuses(name):
    assert problems(WRONG[name])


def test_the_command_prints_it(lorafusion):
    outcome = lorafusion("init", "--schema")
    assert (outcome.code, json.loads(outcome.out)) == (0, SCHEMA)
    assert lorafusion("init", "--schema", "--all").errors == ["config.options"]
