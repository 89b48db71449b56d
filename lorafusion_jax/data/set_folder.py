"""Folders as a hub or a program lays them out: files that describe a set, and what the files of rows belong to."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from lorafusion_jax.errors import DataError
from lorafusion_jax.readable import MB, read_text

DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # of a set, no rows
CACHED = re.compile(r"cache-.*\.arrow$")  # what datasets computed from the rows
# A split is a word of the name of a file or a folder, as datasets looks for it.
SPLIT = re.compile(r"(?<![a-z])(train(?:ing)?|test(?:ing)?|validation|valid|val|dev|eval(?:uation)?)(?![a-z])")
SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}")  # of one split of the hub
CARD, CARD_BYTES = "README.md", 1 * MB
MOST_LISTED = 4  # files of a fix


def rows_of(source: str, path: Path, files: Sequence[Path]) -> list[Path]:
    """Leaves out files that describe a set, and checks that the others are one set: nothing is trained on by mistake.

    Args:
        source: what the user wrote.
        files: with rows, by their names.

    Raises:
        DataError: data.splits, they are several splits, configurations or snapshots.
    """
    files = [file for file in files if file.name not in DESCRIPTIONS and not CACHED.match(file.name)]
    for group, set_of in (("snapshots", _snapshot), ("configurations", _configurations(path)), ("splits", _split)):
        members: dict[str, list[Path]] = {}
        for file in files:
            if (name := set_of(file.relative_to(path))) is not None:
                members.setdefault(name, []).append(file)
        if len(members) > 1:
            chosen = next((name for name in sorted(members) if name.startswith("train")), min(members))
            raise DataError(
                "data.splits",
                f"the folder {source} holds several {group}: {', '.join(sorted(members))}.",
                where=str(path),
                why="all of its files would be read as one set",
                fix=f"{_name_of(source.rstrip('/'), path, members[chosen])}   names the files of one",
            )
    return files


def _snapshot(file: Path) -> str | None:
    """The commit, in a folder of the hub's cache: …/snapshots/COMMIT/…"""
    folders = file.parts[:-1]
    return folders[1] if len(folders) > 1 and folders[0] == "snapshots" else None


def _split(file: Path) -> str | None:
    """The split that a file belongs to by its name, or that of a folder around it."""
    for part in (file.name, *reversed(file.parts[:-1])):
        if match := SPLIT.search(part.lower()):
            shard = SHARD.match(part.lower())
            return shard[1] if shard else match[1].replace("training", "train")
    return None


def _configurations(path: Path) -> Callable[[Path], str | None]:
    """Which configuration of the set a file belongs to, by its card; see `rows_of`."""
    patterns = list(_patterns_of_card(path))

    def configuration(file: Path) -> str | None:
        names = (name for name, pattern in patterns if fnmatch.fnmatchcase(file.as_posix(), pattern))
        return next(names, None)

    return configuration


def _patterns_of_card(path: Path) -> Iterator[tuple[str, str]]:
    try:
        _, *parts = re.split(r"^---\s*$", read_text(path / CARD, CARD_BYTES), maxsplit=2, flags=re.MULTILINE)
        card = yaml.safe_load(parts[0]) if len(parts) == 2 else None
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return  # it is for people
    for entry in _dicts(card.get("configs") if isinstance(card, dict) else None):
        files = entry.get("data_files")
        by_split = [item.get("path") for item in _dicts(files)] or [files]
        for paths in by_split:
            for pattern in [paths] if isinstance(paths, str) else paths if isinstance(paths, list) else []:
                yield str(entry.get("config_name")), str(pattern).replace("**/", "*")


def _dicts(values: Any) -> list[dict]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _name_of(source: str, path: Path, files: Sequence[Path]) -> str:
    """The glob of some files of a folder, or their names where none has them alone."""
    example = files[0].relative_to(path)
    for pattern in _globs(example):
        if {path / name for name in glob.glob(pattern, root_dir=path, recursive=True)} == {*files}:
            return f"{source}/{pattern}"
    names = [f"{source}/{file.relative_to(path).as_posix()}" for file in files[:MOST_LISTED]]
    return names[0] if len(files) == 1 else f"[{', '.join(names)}{', …' if len(files) > MOST_LISTED else ''}]"


def _globs(example: Path) -> Iterator[str]:
    """Globs that may name the files of a set, by one of them; the closest first."""
    name, folder = example.name, "".join(f"{part}/" for part in example.parts[:-1])
    match = SHARD.match(name) or SPLIT.search(name.lower())
    suffix = "".join(example.suffixes[-1:]) if match else name[name.find(".") :]
    if match:
        start, end = match.span(1)
        separator = name[end] if name[end] in "-_" else ""
        yield f"{folder}{name[:end]}{separator}*{suffix}" if name[end] != "." else f"{folder}{name}"
        yield f"{folder}*{name[start:end]}*"
        yield f"**/*{name[start:end]}*"
    for depth in range(len(example.parts) - 1, 0, -1):
        inside = "/".join(example.parts[:depth])
        yield from (f"{inside}/{names}" for names in (f"*{suffix}", f"**/*{suffix}", "**/*"))
