"""First step of loading a job file: `adapters: {from: data/*.jsonl, …}` stands for an adapter of each file."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lorafusion_jax.config.read import Source
from lorafusion_jax.config.schema import ADAPTER_KEYS
from lorafusion_jax.errors import ConfigError

STEM = "{stem}"  # in a text of the entry: the file's name without suffixes
SUFFIXES = (".gz", ".zst", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
EXAMPLE = "adapters: {from: data/customers/*.jsonl}"


def expand_files(source: Source) -> Source:
    """Returns the job with a list of adapters, one for each file that `adapters.from` matches, in order of their names.

    Other keys beside `from` are those of every adapter; `{stem}` in their texts is the name of the adapter's file
    without suffixes, which is the adapter's name unless `name` says otherwise.

    Args:
        source: a job file; patterns are relative to its folder.

    Raises:
        ConfigError: `config.type`, `config.unknown-key`, a key that does not go with `from`; `config.no-files`, a
            pattern matches nothing.
    """
    pattern_entry = source.values.get("adapters")
    if not isinstance(pattern_entry, dict):
        return source
    where = source.where(("adapters",))
    patterns = pattern_entry.get("from")
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, list) or not patterns or not all(isinstance(text, str) and text for text in patterns):
        raise ConfigError(
            "config.type", "'adapters' is a list, or a table with 'from': files by a pattern.", where=where, fix=EXAMPLE
        )
    shared = {key: value for key, value in pattern_entry.items() if key != "from"}
    data = shared.get("data", {})
    if wrong := [key for key in shared if key not in ADAPTER_KEYS]:
        message = f"'{wrong[0]}' is no key of 'adapters' beside 'from'."
        raise ConfigError("config.unknown-key", message, where=where, fix=f"one of: {', '.join(sorted(ADAPTER_KEYS))}")
    if not isinstance(data, dict) or "train" in data:
        message = "'adapters.from' names the training data; 'data.train' does, too."
        fix = "remove data.train; data.eval may be evals/{stem}.csv"
        raise ConfigError("config.type", message, where=where, fix=fix)
    entries = [_entry(shared, data, file) for file in _files(patterns, source.path.parent, where)]
    return dataclasses.replace(source, values=source.values | {"adapters": entries})


def _files(patterns: Sequence[str], folder: Path, where: str) -> list[str]:
    files: dict[str, None] = {}  # a file that two patterns match is one adapter
    for pattern in patterns:
        matches = sorted(glob.glob(pattern, root_dir=folder, recursive=True))
        matches = [match for match in matches if (folder / match).is_file()]
        if not matches:
            message = f"'adapters.from: {pattern}' matches no file in {folder.absolute()}."
            raise ConfigError("config.no-files", message, where=where, fix=EXAMPLE)
        files |= dict.fromkeys(matches)
    return list(files)


def _entry(shared: dict[str, Any], data: dict[str, Any], file: str) -> dict[str, Any]:
    stem = Path(file).name
    while (suffix := Path(stem).suffix) in SUFFIXES:
        stem = stem.removesuffix(suffix)
    entry = _with_stem({"name": STEM, **shared, "data": data}, stem)
    return entry | {"data": {**entry["data"], "train": file}}


def _with_stem(value: Any, stem: str) -> Any:
    if isinstance(value, dict):
        return {key: _with_stem(inner, stem) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_stem(inner, stem) for inner in value]
    return value.replace(STEM, stem) if isinstance(value, str) else value
