"""First step of loading a job file: `adapters: {from: data/*.jsonl, …}` stands for an adapter of each file, or of each
value of a column of the files."""

from __future__ import annotations

import csv
import dataclasses
import glob
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lorafusion_jax.config.read import Source
from lorafusion_jax.config.schema import ADAPTER_KEYS
from lorafusion_jax.errors import ConfigError, first_few
from lorafusion_jax.readable import has_file, has_folder

PACKED = (".gz", ".zst")
TABLES = {".parquet": "parquet", ".arrow": "ipc"}
SHOWN = 5
FIX = "a text, a whole number or a truth value in every row; jq -c 'select(.COLUMN != null)' FILE leaves the others out"
STEM = "{stem}"  # in a text of the entry: the file's name without suffixes
SUFFIXES = (".gz", ".zst", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
EXAMPLE = "adapters: {from: data/customers/*.jsonl}"
LONGEST_NAME = 100  # as `schema.ADAPTER_NAME`


def expand_files(source: Source) -> Source:
    """Returns the job with a list of adapters, one for each file that `adapters.from` matches, in order of their names.

    With `split_by: COLUMN` there is one for each value of a column of these files, in order of the rows.

    Other keys beside `from` are those of every adapter; `{stem}` in their texts is the name of the adapter's file
    without suffixes, or the value as a name, which is the adapter's name unless `name` says otherwise.

    Args:
        source: a job file; patterns are relative to its folder.

    Raises:
        ConfigError: `config.type`, `config.unknown-key`, a key that does not go with `from`; `config.no-files`, a
            pattern matches nothing; `config.split-by`; `config.duplicate-name`, two files or values have one name.
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
    shared = {key: value for key, value in pattern_entry.items() if key not in ("from", "split_by")}
    column = pattern_entry.get("split_by")
    if column is not None and (not isinstance(column, str) or not column):
        message = "'adapters.split_by' is the name of a column."
        raise ConfigError("config.type", message, where=where, fix="split_by: customer")
    data = shared.get("data", {})
    if wrong := [key for key in shared if key not in ADAPTER_KEYS]:
        message = f"'{wrong[0]}' is no key of 'adapters' beside 'from'."
        raise ConfigError("config.unknown-key", message, where=where, fix=f"one of: {', '.join(sorted(ADAPTER_KEYS))}")
    if column is not None and isinstance(data, dict) and column in (data.get("where") or {}):
        message = f"'adapters.split_by' and 'adapters.data.where' both choose the rows by '{column}'."
        raise ConfigError("config.type", message, where=where, fix="one of them")
    if not isinstance(data, dict) or "train" in data:
        message = "'adapters.from' names the training data; 'data.train' does, too."
        fix = "remove data.train; data.eval may be evals/{stem}.csv"
        raise ConfigError("config.type", message, where=where, fix=fix)
    folder = source.path.parent
    files = _files(patterns, folder, where)
    if column is None:
        _check_files(files, shared.get("name", "{stem}"), where)
        entries = [_entry(shared, data, _stem(file), file) for file in files]
    else:
        values = column_values(files, folder, column)
        _check_names(values, column, where)
        entries = [
            _entry(
                shared,
                {**data, "where": {**(data.get("where") or {}), column: value}},
                safe_name(value),
                files if len(files) > 1 else files[0],
            )
            for value, files in values.items()
        ]
    return dataclasses.replace(source, values=source.values | {"adapters": entries})


def _files(patterns: Sequence[str], folder: Path, where: str) -> list[str]:
    files: dict[str, None] = {}  # a file that two patterns match is one adapter
    for pattern in patterns:
        matches = sorted(glob.glob(pattern, root_dir=folder, recursive=True))
        matches = [match for match in matches if has_file(folder / match)]
        if not matches:
            message = f"'adapters.from: {pattern}' matches no file in {folder.absolute()}."
            inner = f"adapters: {{from: {pattern.rstrip('/')}/*}}, for the files of this folder"
            fix = inner if has_folder(folder / pattern) else EXAMPLE
            raise ConfigError("config.no-files", message, where=where, fix=fix)
        files |= dict.fromkeys(matches)
    return list(files)


def safe_name(text: str) -> str:
    """Returns a name of an adapter for a text: other signs than letters, digits and ._@+- become hyphens.

    >>> safe_name("Acme & Söhne (EU)"), safe_name("../x"), safe_name("日本")
    ('Acme-S-hne-EU', 'x', '')
    """
    return re.sub(r"[^A-Za-z0-9._@+-]+", "-", text).strip("-._@+")[:LONGEST_NAME]


def _check_files(files: Iterable[str], name: object, where: str) -> None:
    """Raises an error for two files that give adapters of one name."""
    file_of: dict[str, str] = {}
    for file in files:
        adapter = str(name).replace("{stem}", _stem(file))
        if (other := file_of.setdefault(adapter.casefold(), file)) != file:
            message = f"two adapters are called '{adapter}': those of {other} and {file}."
            fix = "rename one of the files, or a pattern that matches one of them, such as *.jsonl"
            fix = fix if "{stem}" in str(name) else f"name: {name}-{{stem}}"
            raise ConfigError("config.duplicate-name", message, where=where, fix=fix)


def _check_names(values: Iterable[str], column: str, where: str) -> None:
    """Raises an error for values that make no name, or one name together."""
    value_of: dict[str, str] = {}
    for value in values:
        name = safe_name(value)
        if not name:
            message = f"the value '{value}' of '{column}' has no letter or digit that the name of an adapter may have."
            fix = "a column of names with letters from a to z and digits"
            raise ConfigError("config.name", message, where=where, fix=fix)
        if name.casefold() in value_of:
            message = f"the values '{value_of[name.casefold()]}' and '{value}' of '{column}' are one name: '{name}'."
            why = "names are folders, of letters from a to z, digits and ._@+-, whatever their case"
            fix = "a column whose values differ in these, such as a number"
            raise ConfigError("config.duplicate-name", message, where=where, why=why, fix=fix)
        value_of[name.casefold()] = value


def _stem(file: str) -> str:
    stem = Path(file).name
    while (suffix := Path(stem).suffix) in SUFFIXES:
        stem = stem.removesuffix(suffix)
    return stem


def _entry(shared: dict[str, Any], data: dict[str, Any], stem: str, train: str | list[str]) -> dict[str, Any]:
    entry = _with_stem({"name": STEM, **shared, "data": data}, stem)
    chosen = {"where": data["where"]} if "where" in data else {}  # values of rows, in which {stem} has no meaning
    return entry | {"data": {**entry["data"], **chosen, "train": train}}


def _with_stem(value: Any, stem: str) -> Any:
    if isinstance(value, dict):
        return {key: _with_stem(inner, stem) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_stem(inner, stem) for inner in value]
    return value.replace(STEM, stem) if isinstance(value, str) else value


def as_text(value: object) -> str | None:
    """Returns a value by which rows are chosen as a text; None for values that are neither texts nor whole numbers.

    >>> [as_text(value) for value in ("Acme", 7, True, 7.5, None, "")]
    ['Acme', '7', 'true', None, None, None]
    """
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) or (isinstance(value, str) and value) else None


def column_values(files: Sequence[str], folder: Path, column: str) -> dict[str, list[str]]:
    """Returns the values of a column, in order of rows, with the files that have rows of each.

    Raises:
        ConfigError: `config.split-by`, a file cannot be read, or some rows have no value.
    """
    files_of: dict[str, dict[str, None]] = {}
    for file in files:
        bad_rows: list[str] = []
        columns: set[str] = set()
        try:
            for where, row in _rows(folder / file, column):
                text = as_text(row.get(column))
                columns |= row.keys() if text is None else set()
                bad_rows += [] if text is not None else [where]
                if text is not None:
                    files_of.setdefault(text, {})[file] = None
        except (OSError, ValueError, csv.Error) as problem:
            message = f"'adapters.split_by' cannot read {file}."
            raise ConfigError("config.split-by", message, where=str(folder / file), why=str(problem)) from None
        if bad_rows:
            word = bad_rows[0].partition(" ")[0]
            numbers = first_few([where.partition(" ")[2] for where in bad_rows], SHOWN)
            raise ConfigError(
                "config.split-by",
                f"{len(bad_rows)} rows of {file} have no '{column}', by which 'adapters.split_by' tells them apart.",
                where=f"{folder / file}, {word}{'s' if len(bad_rows) > 1 else ''} {numbers}",
                why=f"their columns are {', '.join(sorted(columns))}" if columns else "they have no columns",
                fix=FIX.replace("COLUMN", column).replace("FILE", file),
            )
    return {text: list(files) for text, files in files_of.items()}


def _rows(path: Path, column: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a file with their places. Lines that are no rows are left to whoever reads the data."""
    import pyarrow as pa

    suffix = Path(path.stem if path.suffix.lower() in PACKED else path.name).suffix.lower()
    if suffix in TABLES:
        from pyarrow import dataset

        table = dataset.dataset(path, format=TABLES[suffix])
        if column not in table.schema.names:
            yield "row 0", dict.fromkeys(table.schema.names)
            return
        for number, value in enumerate(table.to_table(columns=[column]).column(0).to_pylist()):
            yield f"row {number}", {column: value}
        return
    with pa.input_stream(path, compression="detect") as packed:
        text = io.TextIOWrapper(io.BufferedReader(packed), encoding="utf-8-sig", newline="")  # pyright: ignore[reportArgumentType]
        if suffix in (".csv", ".tsv"):
            lines = text.read()
            header = lines.partition("\n")[0]
            delimiter = next((sign for sign in ",\t;|" if len(next(csv.reader([header], delimiter=sign), [])) > 1), ",")
            for number, cells in enumerate(csv.DictReader(io.StringIO(lines, newline=""), delimiter=delimiter)):
                yield f"row {number}", cells
        elif suffix == ".json":
            for number, value in enumerate(json.load(text)):
                yield f"row {number}", value
        else:
            for number, line in enumerate(text, 1):
                try:
                    value = json.loads(line) if line.strip() else None
                except ValueError:
                    continue
                if isinstance(value, dict):
                    yield f"line {number}", value
