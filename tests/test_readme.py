"""What the README shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.read import read_source

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_runs(number):
    exec(compile(blocks("python")[number], f"README.md, python block {number}", "exec"), {"__name__": "readme"})


def test_job_file_is_valid_and_short(tmp_path):
    (text,) = blocks("yaml")
    assert len(text.splitlines()) <= 12
    assert yaml.safe_load(text)
    (tmp_path / "jobs.yaml").write_text(text)
    config = parse_config(read_source(tmp_path / "jobs.yaml"))
    assert [adapter.name for adapter in config.adapters] == ["law", "chat-lr1e-4", "chat-lr2e-4"]


def test_links_lead_somewhere():
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_named_files_exist():
    names = re.findall(r"`((?:benchmarks|tests|notebooks|examples)/[\w./-]+)`", README)
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []
