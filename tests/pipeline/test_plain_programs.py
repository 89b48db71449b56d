"""Kinds, objectives and families that a job does not use leave no trace in what it compiles."""

import json

import jax
import pytest
from plain_programs import NAMES, RECORDED, record, summary

STORED = json.loads(RECORDED.read_text())


def test_a_plain_lora_job_compiles_the_recorded_programs(tmp_path, tiny_base):
    if jax.__version__ not in STORED:
        pytest.skip(f"programs are recorded of jax {', '.join(STORED)}; each version writes its own text")
    programs = {name: summary(text) for name, text in record(tmp_path, tiny_base).items()}
    assert set(programs) == NAMES
    assert programs == STORED[jax.__version__], "if plain jobs are to change: python tests/pipeline/plain_programs.py"
