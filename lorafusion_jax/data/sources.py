"""Reads files and hub data sets into rows: dictionaries with their line numbers."""

from __future__ import annotations

import difflib
import gzip
import hashlib
import importlib
import json
import zlib
from pathlib import Path
from typing import IO

from lorafusion_jax.data.row_files import decode, parse_csv, parse_json, parse_jsonl, parse_parquet, without_nulls
from lorafusion_jax.data.rows import SHOWN, RawSource, Rows
from lorafusion_jax.errors import DataError, first_few, raise_all
from lorafusion_jax.readable import DATA, open_regular, open_text

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
PACKED = ".gz"  # after one of these
MOST_UNPACKED = 16 << 30
SHOWN_NAME = 100  # characters


def open_source(source: str, base_dir: Path) -> RawSource:
    """Finds a source and reads its bytes (for a hub data set, its rows).

    Args:
        source: path of a .jsonl, .json, .csv or .parquet file, also with .gz after it, or `hf:org/set[:split]`.
        base_dir: folder for relative paths.

    Raises:
        DataError: data.missing-file, data.unknown-kind, data.empty-file, data.unreadable, data.hub-*.
    """
    if source.startswith("hf:"):
        return _open_hub(source)
    path = find_file(source, base_dir)
    packed = path.suffix.lower() == PACKED
    kind = KINDS.get(Path(path.stem if packed else path.name).suffix.lower())
    if kind is None:
        raise DataError(
            "data.unknown-kind",
            f"{source} has no known data file suffix.",
            where=str(path),
            fix="one of " + " ".join(KINDS) + ", with or without .gz, or hf:org/set[:split]",
        )
    try:
        with open_regular(path, DATA) if packed or kind == "parquet" else open_text(path, DATA) as file:
            content = _unpack(file) if packed else file.read()
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError("data.unreadable", f"{source} cannot be read.", where=str(path), why=str(problem)) from None
    if not content.strip():
        raise DataError("data.empty-file", f"{source} is empty.", where=str(path), fix="a file with at least one row")
    return RawSource(name=source, kind=kind, content=content, digest=hashlib.sha256(content).hexdigest())


def find_file(source: str, base_dir: Path) -> Path:
    """Finds the file of a source that is not a hub data set.

    Raises:
        DataError: data.missing-file.
    """
    path = base_dir / source
    try:
        exists = path.is_file()
    except (OSError, ValueError):  # not a valid file name
        raise DataError("data.missing-file", f"there is no data file {source[:SHOWN_NAME]}….") from None
    if not exists:
        raise DataError(
            "data.missing-file", f"there is no data file {source}.", where=str(path), fix=_similar_file(path)
        )
    return path


def parse_rows(raw: RawSource) -> Rows:
    """Parses a source. Lines of JSONL that are not rows become `problems`.

    Raises:
        DataError: data.bad-json (names the lines), data.not-utf8, data.bad-row, data.bad-table, data.empty-file.
    """
    if isinstance(raw.content, list):
        rows = Rows(source=raw.name, values=raw.content)
    elif raw.kind == "parquet":
        rows = parse_parquet(raw.name, raw.content)
    else:
        text = decode(raw.name, raw.content)
        rows = {"jsonl": parse_jsonl, "json": parse_json, "csv": parse_csv}[raw.kind](raw.name, text)
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


def _unpack(file: IO[bytes]) -> bytes:
    """Reads a gzip file of at most `MOST_UNPACKED` bytes: a few kilobytes may unpack to more than the memory."""
    with gzip.GzipFile(fileobj=file) as unpacked:
        content = unpacked.read(MOST_UNPACKED + 1)
    if len(content) > MOST_UNPACKED:
        raise OSError(f"it unpacks to more than {MOST_UNPACKED >> 30} GiB")
    return content


def _similar_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"the folder {path.parent} is missing too"
    names = sorted(other.name for other in path.parent.iterdir() if other.suffix.lower() in KINDS)
    near = difflib.get_close_matches(
        path.stem, [Path(name).stem for name in names], n=1
    )  # suffixes would make all names similar
    if near:
        return f"did you mean {next(name for name in names if Path(name).stem == near[0])}?"
    return f"{path.parent} has {first_few(names, SHOWN)}" if names else f"{path.parent} holds no data files"


def _open_hub(source: str) -> RawSource:
    name, _, split = source.removeprefix("hf:").partition(":")
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise DataError(
            "data.hub-extra", f"{source} needs the hf extra.", fix='pip install "lorafusion-jax[hf]"'
        ) from None
    try:
        rows = [without_nulls(row) for row in datasets.load_dataset(name, split=split or "train")]
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
