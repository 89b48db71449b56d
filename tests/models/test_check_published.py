"""`lorafusion check` of published models, of whose weights nothing is there: served, or refused by a key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from published import REFUSED, SERVED

from lorafusion_jax.cli.main import run

TOKENIZER = Path(__file__).parents[2] / "examples" / "base"


@pytest.fixture
def check(tmp_path, capsys):
    """check(config.json) → exit code and errors of a job on this base."""
    base, rows, jobs = tmp_path / "base", tmp_path / "rows.jsonl", tmp_path / "jobs.yaml"
    base.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).write_bytes((TOKENIZER / name).read_bytes())
    rows.write_text('{"text": "a b c d"}\n' * 4)
    law = {"name": "law", "data": {"train": str(rows)}, "lora": {"rank": 2}, "batch": {"global_samples": 2}}
    settings = {"batch": {"capacity_tokens": 256}, "data": {"max_length": 128}}
    jobs.write_text(yaml.safe_dump({"base": {"model": str(base)}, "adapters": [law], **settings}))

    def outcome(config):
        (base / "config.json").write_text(json.dumps(config))
        code = run(["check", str(jobs)])
        return code, " ".join(capsys.readouterr().err.split())

    return outcome


def test_published_models_are_served(check):
    problems = {name: problem for name, config in SERVED.items() for code, problem in [check(config)] if code}
    assert problems == {}
    assert len(SERVED) + len(REFUSED) >= 60


def test_others_are_refused_by_the_key_that_is_not_served(check):
    for name, (config, key) in REFUSED.items():
        code, problem = check(config)
        assert code == 2, name
        assert "error[model.unsupported]" in problem, name
        assert key in problem, name
