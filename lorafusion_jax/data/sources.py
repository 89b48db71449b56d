"""Reads files and hub data sets into rows: dictionaries with their line numbers."""

from __future__ import annotations

import csv
import difflib
import hashlib
import importlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lorafusion_jax.errors import DataError, LoraFusionError, first_few, raise_all

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
SHOWN_NAME = 100  # characters
SHOWN = 5  # rows that a message names before it counts the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSource:
    """A source that is read and hashed but not parsed, which is enough for a cache lookup.

    Attributes:
        name: the source as the job file spells it.
        kind: jsonl, json, csv, parquet or hub.
        content: bytes of the file, or rows of a hub data set.
        digest: SHA-256 of the content.
    """

    name: str
    kind: str
    content: bytes | list[dict]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one source.

    Attributes:
        values: one dictionary per row.
        lines: line of each row, from 1 (JSONL only).
        problems: lines that are not rows. The parser of the good rows raises them together with its own errors.
    """

    source: str
    values: list[dict]
    lines: tuple[int, ...] | None = None
    problems: tuple[LoraFusionError, ...] = ()

    def place(self, row: int) -> str:
        """Names the place of a row: `line 17` in JSONL, `row 16` elsewhere."""
        return f"line {self.lines[row]}" if self.lines is not None else f"row {row}"

    def places(self, rows: Sequence[int]) -> str:
        """Names the first rows and counts the rest: `data.jsonl, lines 3, 5, 9, 12, 20 and 2 more`."""
        word = "line" if self.lines is not None else "row"
        numbers = [self.lines[row] if self.lines is not None else row for row in rows]
        return f"{self.source}, {word}{'s' if len(rows) > 1 else ''} {first_few(numbers, SHOWN)}"


def open_source(source: str, base_dir: Path) -> RawSource:
    """Finds a source and reads its bytes (for a hub data set, its rows).

    Args:
        source: path of a .jsonl, .json, .csv or .parquet file, or `hf:org/set[:split]`.
        base_dir: folder for relative paths.

    Raises:
        DataError: data.missing-file, data.unknown-kind, data.empty-file, data.unreadable, data.hub-*.
    """
    if source.startswith("hf:"):
        return _open_hub(source)
    path = base_dir / source
    kind = KINDS.get(path.suffix.lower())
    try:
        found = path.is_file()
    except (OSError, ValueError):  # not a valid file name
        raise DataError("data.missing-file", f"there is no data file {source[:SHOWN_NAME]}….") from None
    if not found:
        raise DataError("data.missing-file", f"there is no data file {source}.", where=str(path), fix=_neighbour(path))
    if kind is None:
        raise DataError(
            "data.unknown-kind",
            f"{source} has no known data file suffix.",
            where=str(path),
            fix="one of " + " ".join(KINDS) + ", or hf:org/set[:split]",
        )
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise DataError("data.unreadable", f"{source} cannot be read.", where=str(path), why=str(problem)) from None
    if not content.strip():
        raise DataError("data.empty-file", f"{source} is empty.", where=str(path), fix="a file with at least one row")
    return RawSource(name=source, kind=kind, content=content, digest=hashlib.sha256(content).hexdigest())


def parse_rows(raw: RawSource) -> Rows:
    """Parses a source. Lines of JSONL that are not rows become `problems`.

    Raises:
        DataError: data.bad-json (names the lines), data.not-utf8, data.bad-row, data.bad-table, data.empty-file.
    """
    if isinstance(raw.content, list):
        rows = Rows(source=raw.name, values=raw.content)
    elif raw.kind == "parquet":
        rows = _parse_parquet(raw.name, raw.content)
    else:
        text = _decode(raw.name, raw.content)
        rows = {"jsonl": _parse_jsonl, "json": _parse_json, "csv": _parse_csv}[raw.kind](raw.name, text)
    if not rows.values:
        raise_all(rows.problems)
        raise DataError(
            "data.empty-file", f"{raw.name} holds no rows.", where=raw.name, fix="a file with at least one row"
        )
    return rows


def read_rows(source: str, base_dir: Path = Path(".")) -> Rows:
    """Reads a source and raises its problems; see `open_source` and `parse_rows`."""
    rows = parse_rows(open_source(source, base_dir))
    raise_all(rows.problems)
    return rows


def _neighbour(path: Path) -> str:
    if not path.parent.is_dir():
        return f"the folder {path.parent} is missing too"
    names = sorted(other.name for other in path.parent.iterdir() if other.suffix.lower() in KINDS)
    near = difflib.get_close_matches(
        path.stem, [Path(name).stem for name in names], n=1
    )  # suffixes would make all names similar
    if near:
        return f"did you mean {next(name for name in names if Path(name).stem == near[0])}?"
    return f"{path.parent} has {first_few(names, SHOWN)}" if names else f"{path.parent} holds no data files"


def _decode(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = content.count(b"\n", 0, problem.start) + 1
        raise DataError(
            "data.not-utf8",
            f"{name} is not UTF-8 text.",
            where=f"{name}, line {line}",
            why=f"byte 0x{content[problem.start]:02x} at offset {problem.start} cannot be decoded",
            fix=f"iconv -f latin1 -t utf-8 {name} (or whatever the encoding is)",
        ) from None


def _parse_jsonl(name: str, text: str) -> Rows:
    values, lines, broken, odd = [], [], [], []
    for number, line in enumerate(text.split("\n"), 1):  # str.splitlines would also cut inside JSON strings
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as problem:
            broken.append((number, _json_problem(problem)))
            continue
        if isinstance(value, dict):
            values.append(value)
            lines.append(number)
        else:
            odd.append((number, f"a row must be an object, this is {type_name(value)}"))
    problems = [
        _bad_lines(code, what, name, found)
        for code, what, found in (
            ("data.bad-json", f"{name} is not JSON in {{}}.", broken),
            ("data.bad-row", f"{name} has no row in {{}}.", odd),
        )
        if found
    ]
    return Rows(source=name, values=values, lines=tuple(lines), problems=tuple(problems))


def _bad_lines(code: str, what: str, name: str, problems: list[tuple[int, str]]) -> DataError:
    word = "line" if len(problems) == 1 else "lines"
    numbers = first_few([number for number, _ in problems], SHOWN)
    return DataError(
        code,
        what.format("1 line" if len(problems) == 1 else f"{len(problems)} lines"),
        where=f"{name}, {word} {numbers}",
        why="; ".join(f"line {number}: {why}" for number, why in problems[:SHOWN]),
        fix="one JSON object per line",
    )


def _json_problem(problem: Exception) -> str:
    if isinstance(problem, json.JSONDecodeError):
        return f"{problem.msg} (column {problem.colno})"
    return "nested too deeply" if isinstance(problem, RecursionError) else str(problem)


def _parse_json(name: str, text: str) -> Rows:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        line = getattr(problem, "lineno", 1)
        raise DataError(
            "data.bad-json",
            f"{name} is not JSON.",
            where=f"{name}, line {line}",
            why=_json_problem(problem),
            fix="one object per line belongs into a .jsonl file",
        ) from None
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list):
        raise DataError(
            "data.bad-row",
            f"{name} is not a list of rows.",
            where=name,
            why=f"it holds {type_name(value)}",
            fix='[{...}, {...}] or {"data": [{...}, {...}]}',
        )
    odd = [row for row, item in enumerate(value) if not isinstance(item, dict)]
    if odd:
        raise DataError(
            "data.bad-row",
            f"{len(odd)} rows of {name} are not objects.",
            where=Rows(source=name, values=[]).places(odd),
            why=f"row {odd[0]} is {type_name(value[odd[0]])}",
        )
    return Rows(source=name, values=value)


def _parse_csv(name: str, text: str) -> Rows:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    header = next(csv.reader(io.StringIO(text)), [])
    if len(set(header)) != len(header):
        raise DataError("data.bad-table", f"{name} names a column twice.", where=f"{name}, line 1")
    data = text.encode()
    try:  # pyarrow rather than csv.DictReader: no process-wide limit on field size, and 20 times as fast
        table = arrow_csv.read_csv(
            io.BytesIO(data),
            read_options=arrow_csv.ReadOptions(use_threads=False, block_size=max(len(data), 1 << 20)),
            parse_options=arrow_csv.ParseOptions(newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False
            ),
        )
    except pa.ArrowInvalid as problem:
        raise DataError(
            "data.bad-table",
            f"{name} is not a CSV table.",
            where=name,
            why=str(problem).splitlines()[0],
            fix='the same number of cells in every row; "quotes" around cells with commas or line ends',
        ) from None
    return Rows(source=name, values=table.to_pylist())


def _parse_parquet(name: str, content: bytes) -> Rows:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(pa.BufferReader(content))
    except (pa.ArrowInvalid, OSError) as problem:
        raise DataError(
            "data.bad-table", f"{name} is not a Parquet file.", where=name, why=str(problem).splitlines()[0]
        ) from None
    return Rows(source=name, values=[_without_nulls(row) for row in table.to_pylist()])


def _without_nulls(row: dict) -> dict:
    """Removes null keys from nested objects: tables give every object the keys of all objects."""
    return {key: _pruned(value) if isinstance(value, list | dict) else value for key, value in row.items()}


def _pruned(value):
    if isinstance(value, dict):
        return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
    return [_pruned(inner) for inner in value] if isinstance(value, list) else value


def _open_hub(source: str) -> RawSource:
    name, _, split = source.removeprefix("hf:").partition(":")
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise DataError(
            "data.hub-extra", f"{source} needs the hf extra.", fix='pip install "lorafusion-jax[hf]"'
        ) from None
    try:
        rows = [_without_nulls(row) for row in datasets.load_dataset(name, split=split or "train")]
    except Exception as problem:  # the hub client raises many types; each means that there are no rows
        raise DataError(
            "data.hub",
            f"the data set {name} could not be read.",
            where=source,
            why=f"{type(problem).__name__}: {problem}",
            fix="hf:org/set:split, with a split that it has",
        ) from None
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()
    return RawSource(name=source, kind="hub", content=rows, digest=digest)


def type_name(value: object) -> str:
    """Returns the name of a JSON value's type for messages."""
    names = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", bool: "true/false"}
    return names.get(type(value), "nothing" if value is None else type(value).__name__)
