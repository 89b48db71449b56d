"""Tokenizers with and without chat template, and a helper that writes and loads a data file."""

from __future__ import annotations

import json

import pytest
from data_helpers import MARKED_TEMPLATE, write_model

from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data import TokenizedSet, load_samples, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def plain_tokenizer(tmp_path_factory):
    """Without chat template."""
    return load_tokenizer(write_model(tmp_path_factory.mktemp("model"), template=None))


@pytest.fixture(scope="session")
def marked_tokenizer(tmp_path_factory):
    """With generation blocks in its template."""
    return load_tokenizer(write_model(tmp_path_factory.mktemp("model"), template=MARKED_TEMPLATE))


@pytest.fixture
def load(tmp_path, tokenizer):
    """load(rows or text, name=…, tokenizer=…, **settings) → TokenizedSet, through a file."""

    def run(content, *, name: str = "law.jsonl", tokenizer=tokenizer, **settings) -> TokenizedSet:
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return load_samples(
            name,
            settings=DataSettings(train=name, **settings),
            tokenizer=tokenizer,
            adapter="law",
            base_dir=tmp_path,
            cache_dir=tmp_path / "cache",
        )

    return run
