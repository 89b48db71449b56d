"""Reads files and hub data sets into rows: dictionaries with their line numbers."""

from __future__ import annotations

import dataclasses
import difflib
import glob
import importlib
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from lorafusion_jax.data.hub_blocks import read_table, table_blocks
from lorafusion_jax.data.row_blocks import (
    BLOCK_BYTES,
    LARGE,
    open_unpacked,
    packing_of,
    read_and_hash,
    unpacked_parquet_bytes,
)
from lorafusion_jax.data.row_files import decode, parse_csv, parse_json, parse_jsonl, parse_parquet, without_nulls
from lorafusion_jax.data.rows import SHOWN, RawSource, Rows
from lorafusion_jax.errors import DataError, first_few, raise_all

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
PROBLEMS = (OSError, EOFError, zlib.error)
LARGEST_WHOLE = 8 * BLOCK_BYTES  # of unpacked rows that are parsed at once
SHOWN_NAME = 100  # characters
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # of a set, no rows
SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?=[-_.]|$)")  # begins the name of a file or a folder
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def open_source(source: str, base_dir: Path) -> RawSource:
    """Finds a source and hashes its content. Small files are read; blocks of large ones are read when they are parsed.

    Args:
        source: path of a .jsonl, .json, .csv or .parquet file, also with .gz or .zst after it, or `hf:org/set[:split]`.
        base_dir: folder for relative paths.

    Raises:
        DataError: data.missing-file, data.unknown-kind, data.empty-file, data.unreadable, data.hub-*.
    """
    if source.startswith("hf:"):
        return _open_hub(source)
    path = find_file(source, base_dir)
    kind = kind_of(path)
    if kind is None:
        raise DataError(
            "data.unknown-kind",
            f"{source} has no known data file suffix.",
            where=str(path),
            fix="one of " + " ".join(KINDS) + ", with or without .gz or .zst, or hf:org/set[:split]",
        )
    unsplit = kind == "parquet" and packing_of(path)  # it begins at its end
    try:
        with open_unpacked(path, text=kind != "parquet") as file:
            content, digest = read_and_hash(file, None if unsplit else BLOCK_BYTES)
    except PROBLEMS as problem:
        raise _unreadable(source, path, problem) from None
    if content is not None and content.startswith(LFS_POINTER):
        why = "it is a pointer of Git LFS: the content was not downloaded"
        raise DataError("data.unreadable", f"{source} holds no rows.", where=str(path), why=why, fix="git lfs pull")
    if content is not None and kind == "parquet" and not unsplit and content.strip():
        content = None if unpacked_parquet_bytes(source, path, LARGEST_WHOLE) > LARGEST_WHOLE else content
    if content is not None and not content.strip():
        raise DataError("data.empty-file", f"{source} is empty.", where=str(path), fix="a file with at least one row")
    return RawSource(name=source, kind=kind, content=content, digest=digest, path=path)


def expand_source(source: str, base_dir: Path) -> list[str]:
    """Returns the files of a folder or a glob, by name; a file or a data set of the hub is the only one.

    Raises:
        DataError: data.missing-file, no file of rows is there; data.splits, a folder holds several splits of a set.
    """
    path = base_dir / source
    if source.startswith("hf:") or not _is_file_name(path) or path.is_file():
        return [source]  # reading it says that it is missing
    if path.is_dir():
        files, message = path.rglob("*"), f"the folder {source} has no data file"
    elif any(sign in source for sign in "*?["):
        names = glob.glob(source, root_dir=base_dir, recursive=True)  # the folder of the job is no pattern
        files, message = (base_dir / name for name in names), f"no data file matches {source}"
    else:
        return [source]  # reading it says that it is missing
    hidden = [part for part in path.parts if part.startswith(".")]
    chosen = sorted(
        (file for file in files if file.is_file() and kind_of(file) is not None and _visible(file, hidden)),
        key=lambda file: file.as_posix(),
    )
    if path.is_dir():
        chosen = [file for file in chosen if file.name not in DESCRIPTIONS]
        _check_splits(source, path, chosen)
    if not chosen and path.is_dir() and any(path.rglob("*.arrow")):
        raise DataError(
            "data.missing-file",
            f"{message}.",
            where=str(path),
            why="it holds .arrow files, as save_to_disk of datasets writes them",
            fix=f"datasets.load_from_disk({str(path)!r}).to_parquet('train.parquet'), for each split",
        )
    if not chosen:
        raise DataError("data.missing-file", f"{message}.", where=str(path), fix="files with " + " ".join(KINDS))
    return [str(file if Path(source).is_absolute() else file.relative_to(base_dir)) for file in chosen]


def _check_splits(source: str, path: Path, files: Sequence[Path]) -> None:
    """Checks that a folder has one split: what is held out is never trained on by mistake.

    Raises:
        DataError: data.splits.
    """
    split_of = {file: _split(file.relative_to(path)) for file in files}
    splits = sorted({split for split in split_of.values() if split is not None})
    if len(splits) < 2:
        return
    chosen = "train" if "train" in splits else splits[0]
    example = next(file for file in files if split_of[file] == chosen).relative_to(path)
    suffix = "".join(example.suffixes[-2:]) if packing_of(example) else example.suffix
    after = example.name[len(chosen)] if SPLIT.match(example.name) else ""
    name = f"{chosen}{after}*{suffix}" if after in ("-", "_") else f"{chosen}{suffix}"
    folders = [chosen if SPLIT.match(part) else part for part in example.parts[:-1]]
    glob_of = "/".join([source.rstrip("/"), *folders, name if after else f"*{suffix}"])
    raise DataError(
        "data.splits",
        f"the folder {source} holds several splits: {', '.join(splits)}.",
        where=str(path),
        why="all of its files would be read as one set",
        fix=f"{glob_of}   names the files of one",
    )


def _split(file: Path) -> str | None:
    """Returns the split that a file belongs to by its name, or that of a folder around it."""
    parts = (file.name, *reversed(file.parts[:-1]))
    return next((match.group(1) for part in parts if (match := SPLIT.match(part))), None)


def _is_file_name(path: Path) -> bool:
    try:
        path.is_file()
    except (OSError, ValueError):  # too long, or with a zero
        return False
    return True


def _visible(file: Path, hidden: list[str]) -> bool:
    return all(part in hidden or not part.startswith(".") for part in file.parts)


def kind_of(path: Path) -> str | None:
    """Returns the kind of rows in a file by its suffix; None for other files."""
    return KINDS.get(Path(path.stem if packing_of(path) else path.name).suffix.lower())


def _unreadable(source: str, path: Path, problem: Exception) -> DataError:
    why = str(problem).partition("\n")[0]
    return DataError("data.unreadable", f"{source} cannot be read.", where=str(path), why=why)


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
    if raw.content is None and one_block and raw.table is not None:
        raw = dataclasses.replace(raw, content=[without_nulls(row) for row in raw.table])
    if raw.content is None and one_block:
        assert raw.path is not None
        with open_unpacked(raw.path, text=raw.kind != "parquet") as file:
            raw = dataclasses.replace(raw, content=file.read())
    if raw.content is not None:
        yield _with_rows(_parse(raw), raw)
        return
    if raw.table is not None:
        yield from table_blocks(raw.name, raw.table)
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
        table = datasets.load_dataset(name, split=split or "train")  # its files are mapped, not read
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
