"""`adapters: {from: FILE, split_by: COLUMN}`: the values of a column of data files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lorafusion_jax.errors import ConfigError, first_few

PACKED = (".gz", ".zst")
TABLES = {".parquet": "parquet", ".arrow": "ipc"}
SHOWN = 5
FIX = "a text, a whole number or a truth value in every row; jq -c 'select(.COLUMN != null)' FILE leaves the others out"


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
