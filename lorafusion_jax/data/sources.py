"""Reads files, hub data sets and installed sources into rows: dictionaries with their line numbers."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import importlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lorafusion_jax.config.data_sources import GROUP, SOURCES, Source, is_file, named_source
from lorafusion_jax.data.hub_blocks import read_table, table_blocks
from lorafusion_jax.data.row_blocks import (
    BLOCK_BYTES,
    LARGE,
    begins_packed,
    open_unpacked,
    packing_of,
    read_and_hash,
    unpacked_parquet_bytes,
)
from lorafusion_jax.data.row_files import (
    decode,
    parse_arrow,
    parse_csv,
    parse_json,
    parse_jsonl,
    parse_parquet,
    plain_rows,
    without_nulls,
)
from lorafusion_jax.data.rows import SHOWN, RawSource, Rows
from lorafusion_jax.data.set_folder import rows_of
from lorafusion_jax.errors import DataError, did_you_mean_path, first_few, install_line, raise_all
from lorafusion_jax.files import PART, make_folder, user_cache
from lorafusion_jax.plugins import find, known_names, origin
from lorafusion_jax.readable import has_file, has_folder, to_utf8, utf_16

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
OTHER_KINDS = {  # suffix → how to make rows of such files
    ".txt": "jq -cR '{text: .}' FILE > rows.jsonl   makes a row of each line",
    ".md": "jq -cRs '{text: .}' FILE > rows.jsonl   makes one row of the file",
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as .csv, in UTF-8"),
    **dict.fromkeys((".yaml", ".yml"), "the rows as a .json list or a .jsonl file"),
}
BINARY = ("parquet", "arrow")
PROBLEMS = (OSError, EOFError, zlib.error)
LARGEST_WHOLE = 8 * BLOCK_BYTES  # of unpacked rows that are parsed at once
SHOWN_NAME = 100  # characters
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def open_source(source: str, base_dir: Path) -> RawSource:
    """Finds a source and hashes its content. Small files are read; blocks of large ones are read when they are parsed.

    Args:
        source: path of a .jsonl, .json, .csv, .parquet or .arrow file, also with .gz or .zst after it,
            `hf:org/set[:split]`, or `NAME:argument` of an installed source.
        base_dir: folder for relative paths.

    Raises:
        DataError: data.missing-file, data.unknown-kind, data.empty-file, data.unreadable, data.hub-*, data.source.
    """
    if source.startswith("hf:"):
        return _open_hub(source)
    if (source_parts := named_source(source)) is not None:
        return _open_named(source, *source_parts)
    path = find_file(source, base_dir)
    kind = kind_of(path)
    if kind is None:
        fix = "one of " + " ".join(KINDS) + ", with or without .gz or .zst, or hf:org/set[:split]"
        raise DataError(
            "data.unknown-kind",
            f"{source} has no known data file suffix.",
            where=str(path),
            fix=OTHER_KINDS.get(path.suffix.lower(), fix).replace("FILE", source),
        )
    unsplit = kind in BINARY and packing_of(path)  # it begins at its end
    try:
        with open_unpacked(path, text=kind not in BINARY) as file:
            content, digest = read_and_hash(file, None if unsplit else BLOCK_BYTES)
    except PROBLEMS as problem:
        raise _unreadable(source, path, problem) from None
    if content is not None and content.startswith(LFS_POINTER):
        why = "it is a pointer of Git LFS: the content was not downloaded"
        raise DataError("data.unreadable", f"{source} holds no rows.", where=str(path), why=why, fix="git lfs pull")
    if content is not None and kind == "parquet" and not unsplit and content.strip():
        content = None if unpacked_parquet_bytes(source, path, LARGEST_WHOLE) > LARGEST_WHOLE else content
    if kind == "arrow" and not unsplit and content:
        content = None  # its batches may be packed, too
    if content is not None and not content.strip():
        raise DataError("data.empty-file", f"{source} is empty.", where=str(path), fix="a file with at least one row")
    return RawSource(name=shown_source(source, path), kind=kind, content=content, digest=digest, path=path)


def shown_source(source: str, path: Path) -> str:
    """The name of a source in messages. Given rows have that of their content, not of the cache that holds them."""
    return f"given rows {path.stem[:8]}" if path.parent == user_cache("rows") else source


def expand_source(source: str, base_dir: Path) -> list[str]:
    """Returns the files of a folder or a glob, by name; a file or a data set of the hub is the only one.

    Raises:
        DataError: data.missing-file, no file of rows is there; data.unreadable, it may not be looked at; data.splits, a
            folder holds several sets of files.
    """
    path = base_dir / source
    if not is_file(source) or _has_file(source, path):
        return [source]  # reading it says that it is missing
    if has_folder(path):
        files, message = path.rglob("*"), f"the folder {source} has no data file"
    elif any(sign in source for sign in "*?["):
        names = glob.glob(source, root_dir=base_dir, recursive=True)  # the folder of the job is no pattern
        files, message = (base_dir / name for name in names), f"no data file matches {source}"
    else:
        return [source]  # reading it says that it is missing
    hidden = [part for part in path.parts if part.startswith(".")]
    paths = sorted(
        (file for file in files if file.is_file() and kind_of(file) is not None and _visible(file, hidden)),
        key=lambda file: file.as_posix(),
    )
    if has_folder(path):
        paths = rows_of(source, path, paths)
    if not paths:
        raise DataError("data.missing-file", f"{message}.", where=str(path), fix="files with " + " ".join(KINDS))
    return [str(file if Path(source).is_absolute() else file.relative_to(base_dir)) for file in paths]


def _visible(file: Path, hidden: list[str]) -> bool:
    return all(part in hidden or not part.startswith(".") for part in file.parts)


def kind_of(path: Path) -> str | None:
    """Returns the kind of rows in a file by its suffix; None for other files."""
    return KINDS.get(Path(path.stem if packing_of(path) else path.name).suffix.lower())


def _unreadable(source: str, path: Path, problem: Exception) -> DataError:
    why, fix = str(problem).partition("\n")[0], ""
    if (encoding := _encoding(path)) is not None:
        why, fix = f"it is text in {encoding.upper()}", to_utf8(source, encoding)
    elif not begins_packed(path):
        fix = f"mv {source} {Path(source).with_suffix('')}: it is not packed"
    elif packing_of(path) and not isinstance(problem, PermissionError):
        fix = "copy or download it again, or pack it anew: a part of it is missing, damaged or far too large"
    return DataError("data.unreadable", f"{source} cannot be read.", where=str(path), why=why, fix=fix)


def _has_file(source: str, path: Path) -> bool:
    try:
        return has_file(path)
    except PermissionError as problem:
        raise _unreadable(source, path, problem) from None


def _encoding(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return utf_16(file.read(4))
    except OSError:
        return None


def find_file(source: str, base_dir: Path) -> Path:
    """Finds the file of a source that is not a hub data set.

    Raises:
        DataError: data.missing-file, data.unreadable.
    """
    path = base_dir / source
    if not _has_file(source, path):
        raise DataError(
            "data.missing-file", f"there is no data file {source}.", where=str(path), fix=_similar_file(path, source)
        )
    return path


def parse_rows(raw: RawSource) -> Rows:
    """Parses a source that is read as a whole. Lines of JSONL that are not rows become `problems`.

    Raises:
        DataError: data.bad-json (names the lines), data.not-utf8, data.bad-row, data.bad-table, data.empty-file.
    """
    (rows,) = row_blocks(raw, one_block=True)
    return rows


def row_blocks(raw: RawSource, *, one_block: bool = False) -> Iterator[Rows]:
    """Yields the rows of a source in blocks of bounded size; see `parse_rows`.

    Args:
        one_block: one block, for samples of several rows.
    """
    expected = raw.digest if raw.kind == "source" else None  # images of a hub have other texts each time
    if raw.content is None and one_block and raw.table is not None:
        blocks = table_blocks(raw.name, raw.table, expected)
        raw = dataclasses.replace(raw, content=[row for block in blocks for row in block.values])
    if raw.content is None and one_block:
        assert raw.path is not None
        with open_unpacked(raw.path, text=raw.kind not in BINARY) as file:
            raw = dataclasses.replace(raw, content=file.read())
    if raw.content is not None:
        yield _with_rows(_parse(raw), raw)
        return
    if raw.table is not None:
        yield from table_blocks(raw.name, raw.table, expected)
        return
    assert raw.path is not None
    try:
        count = 0
        for rows in LARGE[raw.kind](raw.name, raw.path):
            count += len(rows.values)
            yield rows
    except PROBLEMS as problem:
        raise _unreadable(raw.name, raw.path, problem) from None
    if not count:
        raise _no_rows(raw)


def _parse(raw: RawSource) -> Rows:
    if isinstance(raw.content, list):
        return Rows(source=raw.name, values=raw.content)
    assert raw.content is not None
    if raw.kind == "parquet":
        return parse_parquet(raw.name, raw.content)
    if raw.kind == "arrow":
        return parse_arrow(raw.name, raw.content)
    text = decode(raw.name, raw.content)
    return {"jsonl": parse_jsonl, "json": parse_json, "csv": parse_csv}[raw.kind](raw.name, text)


def _with_rows(rows: Rows, raw: RawSource) -> Rows:
    if not rows.values:
        raise_all(rows.problems)
        raise _no_rows(raw)
    return rows


def _no_rows(raw: RawSource) -> DataError:
    return DataError(
        "data.empty-file", f"{raw.name} holds no rows.", where=raw.name, fix="a file with at least one row"
    )


def read_rows(source: str, base_dir: Path = Path(".")) -> Rows:
    """Reads a source and raises its problems; see `open_source` and `parse_rows`."""
    rows = parse_rows(open_source(source, base_dir))
    raise_all(rows.problems)
    return rows


def _similar_file(path: Path, typed: str) -> str:
    if path.parent == user_cache("rows"):
        return "load the job from Python again with the same rows, which writes them there"
    name, colon, _ = path.name.partition(":")
    if colon and name.isidentifier():
        installed = known_names(GROUP, SOURCES)
        return f"install the package with the source {name}; " + (
            f"installed are {', '.join(installed)}" if installed else "no sources are installed"
        )
    if not has_folder(path.parent):
        return f"the folder {path.parent} is missing too"
    names = sorted(other.name for other in path.parent.iterdir() if other.suffix.lower() in KINDS)
    if near := did_you_mean_path(Path(typed), names, are_files=True):
        return near
    return f"{path.parent} has {first_few(names, SHOWN)}" if names else f"{path.parent} holds no data files"


def _open_hub(source: str) -> RawSource:
    name, _, split = source.removeprefix("hf:").partition(":")
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise DataError("data.hub-extra", f"{source} needs the hf extra.", fix=install_line("hf")) from None
    try:
        dataset = datasets.load_dataset(name, split=split or "train")  # its files are mapped, not read
        table = _Table(lambda: map(without_nulls, dataset))
        content, digest = read_table(table)
    except Exception as problem:  # the hub client raises many types; each means that there are no rows
        raise DataError(
            "data.hub",
            f"the data set {name} could not be read.",
            where=source,
            why=f"{type(problem).__name__}: {problem}",
            fix="hf:org/set:split, with a split that it has",
        ) from None
    return RawSource(name=source, kind="hub", content=content, digest=digest, table=table if content is None else None)


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    """Rows that can be iterated again and again."""

    rows: Callable[[], Iterator[dict]]

    def __iter__(self) -> Iterator[dict]:
        return self.rows()


def _open_named(source: str, name: str, argument: str) -> RawSource:
    read = find(GROUP, SOURCES, name, Source).rows
    table = _Table(lambda: plain_rows(source, _given(source, name, lambda: read(argument))))
    content, digest = read_table(table)
    return RawSource(
        name=source, kind="source", content=content, digest=digest, table=table if content is None else None
    )


def store_rows(rows: Iterable[object]) -> Path:
    """Writes rows of Python objects to a file of the user's cache. Its name is their digest.

    Raises:
        DataError: data.bad-row, data.empty-file.
    """
    folder, digest = user_cache("rows"), hashlib.sha256()
    make_folder(folder)
    handle, part = tempfile.mkstemp(dir=folder, suffix=PART)
    try:
        with os.fdopen(handle, "wb") as file:
            for row in plain_rows("the rows", rows):
                line = json.dumps(row, sort_keys=True).encode() + b"\n"
                digest.update(line)
                file.write(line)
            if not file.tell():
                raise DataError(
                    "data.empty-file", "there are no rows.", fix="at least one row; a generator gives its rows once"
                )
        path = folder / f"{digest.hexdigest()[:32]}.jsonl"
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)
    return path


def _given(source: str, name: str, rows: Callable[[], Iterable[object]]) -> Iterator[object]:
    """Yields what a source of another package gives.

    Raises:
        DataError: data.source, its code raised.
    """
    count = 0
    try:
        for row in rows():
            yield row
            count += 1
    except Exception as problem:  # code of another package may raise anything
        raise DataError(
            "data.source",
            f"the source {name} raised {type(problem).__name__}.",
            where=f"{source}, row {count}: {origin(GROUP, name)}",
            why=str(problem).partition("\n")[0],
            fix="another argument, or repair or update the package that the source comes from",
        ) from problem
