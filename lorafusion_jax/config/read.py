"""Reads job files (YAML or TOML) into dictionaries, with the line of each key."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import yaml

from lorafusion_jax.errors import ConfigError, LoraFusionError, did_you_mean_path, first_few, quoted
from lorafusion_jax.readable import check_regular, has_file, read_text, to_utf8

Keys = tuple[str | int, ...]

LARGEST_FILE = 1 << 20  # bytes; a job of a thousand adapters needs a tenth of it
MOST_VALUES = 100_000  # with aliases counted at every use
DEEPEST = 20
SHOWN_KEY = 60  # characters
DEEP_KEY = re.compile(rf"""(?<!["'\w-])(?:["'\w-]++\s*+\.\s*+){{{DEEPEST}}}""")
ROW_FILES = {"jsonl", "csv", "tsv", "parquet", "arrow"}  # no job file ends so
PACKED = {"gz", "zst"}
JOB_FILES = (".yaml", ".yml", ".toml", ".json")
MOST_FILES = 6  # that an error offers
TOO_LARGE_FIX = "several job files, one for each run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A parsed job file: its values, the line of every key, duplicate keys, and overrides."""

    path: Path
    values: dict
    lines: dict[Keys, int] = field(default_factory=dict)
    problems: tuple[LoraFusionError, ...] = ()
    overrides: tuple[tuple[Keys, str], ...] = ()

    def typed(self, keys: Keys) -> str:
        """The override that set this key; empty if its value is from the file."""
        for override, text in reversed(self.overrides):
            in_section = override[: len(keys)] == keys and keys[0] not in self.values  # section of overrides only
            if keys[: len(override)] == override or in_section:
                return text
        return ""

    def value(self, keys: Keys) -> Any:
        """What the file has at these keys; None if it has nothing there."""
        value: Any = self.values
        for key in keys:
            try:
                value = value[key]
            except (LookupError, TypeError):
                return None
        return value

    def where(self, keys: Keys) -> str:
        if text := self.typed(keys):
            return f"{text} on the command line"
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{self.path}, line {self.lines[keys]}" if keys else str(self.path)


def read_source(path: Path) -> Source:
    """Reads one job file.

    Raises:
        ConfigError: the file is missing, is not YAML or TOML, or has no keys.
    """
    try:
        check_regular(path)
        _refuse_data_file(path)
        if path.stat().st_size > LARGEST_FILE:
            raise ConfigError("config.too-large", f"{path} is larger than {LARGEST_FILE} bytes.", fix=TOO_LARGE_FIX)
        text = read_text(path, LARGEST_FILE)
    except FileNotFoundError:
        fix = did_you_mean_path(path, _job_files(path.parent), are_files=True)
        fix = fix or "lorafusion new, or lorafusion init > jobs.yaml"
        raise ConfigError("config.missing", f"there is no job file {path}.", fix=fix) from None
    except IsADirectoryError:
        raise _folder_error(path) from None
    except (OSError, UnicodeDecodeError) as problem:
        encoding = "latin1" if isinstance(problem, UnicodeDecodeError) else getattr(problem, "encoding", None)
        fix = f"{to_utf8(str(path), encoding)}, or save it as UTF-8" if encoding else ""
        raise ConfigError("config.unreadable", f"{path} cannot be read as text.", why=str(problem), fix=fix) from None
    return _read_toml(path, text) if path.suffix == ".toml" else _read_yaml(path, text)


def _folder_error(path: Path) -> ConfigError:
    if has_file(path / "plan.json"):  # its config.yaml has the paths of another folder
        message, fix = (
            f"{path} is the folder of a run, not a job file.",
            f"its job file, or lorafusion resume {quoted(path)}",
        )
        return ConfigError("config.folder", message, fix=fix)
    files = [str(path / name) for name in _job_files(path)]
    fix = f"one of {first_few(files, MOST_FILES)}" if files else "lorafusion new, or lorafusion init > jobs.yaml"
    return ConfigError("config.folder", f"{path} is a folder, not a job file.", fix=fix)


def is_job_file(path: Path) -> bool:
    """Whether a file may be a job file. Models and runs have JSON files as well, but none with adapters."""
    if path.suffix != ".json":
        return path.suffix in JOB_FILES and has_file(path)
    with suppress(OSError, ValueError, RecursionError):
        values = json.loads(read_text(path, LARGEST_FILE))
        return isinstance(values, dict) and "adapters" in values
    return False


def _job_files(folder: Path) -> list[str]:
    with suppress(OSError, ValueError):
        return sorted(file.name for file in folder.iterdir() if is_job_file(file))
    return []


def source_of(values: Mapping[str, Any]) -> Source:
    """A job given as a dictionary: read as if it stood in a file of the current folder.

    Raises:
        ConfigError: `config.type`, it holds something that a job file cannot say; and those of `read_source`.
    """
    path = Path("job")
    try:
        text = yaml.safe_dump(_plain(values), sort_keys=False)
    except (yaml.YAMLError, RecursionError) as problem:
        raise ConfigError(
            "config.type",
            "the job holds a value that no job file can hold.",
            why=str(problem),
            fix="texts, numbers, true or false, lists and dictionaries",
        ) from None
    return dataclasses.replace(_read_yaml(path, text), lines={})


def _plain(value: Any) -> Any:
    """Paths, tuples and NumPy's numbers as YAML writes them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value


def parse_value(text: str):
    """Parses the value of an override as YAML: `20` is a number, `[1, 2]` a list, `abc` a text.

    Raises:
        ConfigError: `config.syntax`, the value is not YAML or too deeply nested.
    """
    return _parse_yaml(text, "the value")[1]


def _read_toml(path: Path, text: str) -> Source:
    if (deep := DEEP_KEY.search(text)) is not None:  # tomllib's memory grows with the square of the depth
        why = f"'{deep[0][:SHOWN_KEY]}…' is nested more than {DEEPEST} deep"
        raise ConfigError("config.syntax", f"{path} cannot be read.", why=why)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        fix = "texts stand in quotes, a section begins with [name], an adapter with [[adapters]]"
        raise ConfigError("config.syntax", f"{path} is not TOML.", why=str(problem), fix=fix) from None
    except (ValueError, RecursionError) as problem:
        raise ConfigError("config.syntax", f"{path} cannot be read.", why=_cause(problem)) from None
    return Source(path=path, values=values)


def _read_yaml(path: Path, text: str) -> Source:
    node, values = _parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(
            "config.empty",
            f"{path} holds no keys.",
            why="it is a list, such as a file of rows" if isinstance(values, list) else "",
            fix="lorafusion new, or lorafusion init > jobs.yaml",
        )
    lines: dict[Keys, int] = {}
    problems: list[LoraFusionError] = []
    _walk(node, (), lines, problems, path)
    return Source(path=path, values=values, lines=lines, problems=tuple(problems))


def _parse_yaml(text: str, where: str) -> tuple[yaml.Node | None, Any]:
    """Returns the nodes of a YAML text, checked before values are built from them, and the values."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _count(node, (), {})
        return node, None if node is None else loader.construct_document(node)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        raise ConfigError(
            "config.syntax",
            "the job file is not YAML.",
            where=f"{where}, line {mark.line + 1}" if mark else where,
            why=getattr(problem, "problem", None) or "the text cannot be parsed",
            fix=_syntax_fix(problem),
        ) from None
    except (LookupError, AttributeError, ValueError, RecursionError, OverflowError) as problem:
        # invalid dates, thousands of digits, and values that do not suit their tag, such as `!!bool abc`
        raise ConfigError("config.syntax", "the job file cannot be read.", where=where, why=_cause(problem)) from None


def _syntax_fix(problem: yaml.YAMLError) -> str:
    """What usually makes the parser say this."""
    why, context = str(getattr(problem, "problem", "")), str(getattr(problem, "context", ""))
    if "'\\t'" in why:
        return "indent with spaces, not with tabs"
    if "mapping values" in why:
        return "put a text that holds ': ' in quotes; keys of one section begin in the same column"
    if "cannot start any token" in why:
        return "put a text that begins with this character in quotes"
    if "quoted scalar" in context:
        return "close the quotes that were opened in or above this line"
    if "flow" in context:
        return "close each { and [ that was opened in or above this line, and put commas between values"
    return "begin the keys of one section in the same column; lorafusion init prints a job file to compare with"


def _refuse_data_file(path: Path) -> None:
    words = path.name.lower().split(".")[1:]
    if words and (words[-2] if words[-1] in PACKED and len(words) > 1 else words[-1]) in ROW_FILES:
        raise ConfigError(
            "config.data-file",
            f"{path} is a data file, not a job file.",
            why="a job file is YAML or TOML, and names the data",
            fix=f"lorafusion new --base FOLDER --data {quoted(path)} -o jobs.yaml",
        )


def _cause(problem: Exception) -> str:
    if isinstance(problem, RecursionError):
        return "it is nested too deeply"
    return str(problem) if isinstance(problem, ValueError) else f"a value does not suit its tag ({problem})"


def _count(node: yaml.Node | None, above: tuple[yaml.Node, ...], count_by_node: dict[int, int]) -> int:
    """Counts the values below a node, with aliases counted at every use; visits each node once."""
    if not isinstance(node, yaml.CollectionNode):
        if isinstance(node, yaml.ScalarNode) and has_half_character(node.value):
            raise ValueError(f"line {node.start_mark.line + 1} has half a character (a lone surrogate)")
        return 1
    if id(node) in count_by_node:
        return count_by_node[id(node)]
    line = f"line {node.start_mark.line + 1}"
    if any(node is ancestor for ancestor in above):
        raise ValueError(f"the value of {line} contains itself")
    if len(above) >= DEEPEST:
        raise ValueError(f"{line} is nested more than {DEEPEST} deep")
    inner = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    count_by_node[id(node)] = total = 1 + sum(_count(part, (*above, node), count_by_node) for part in inner)
    if total > MOST_VALUES:
        raise ValueError(f"the aliases below {line} stand for more than {MOST_VALUES} values")
    return total


def has_half_character(text: str) -> bool:
    """Whether a text holds half of a surrogate pair: JSON can write one, and nothing can encode it.

    >>> has_half_character("\\U0001f600"), has_half_character("\\ud83d")
    (False, True)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _walk(node, keys: Keys, lines: dict, problems: list, path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            location = (*keys, key.value)
            line = key.start_mark.line + 1
            if location in lines:  # YAML would silently use the last one
                problems.append(
                    ConfigError(
                        "config.twice",
                        f"'{dotted(location)}' is given twice.",
                        where=f"{path}, lines {lines[location]} and {line}",
                        fix="keep one of them",
                    )
                )
            lines[location] = line
            _walk(value, location, lines, problems, path)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*keys, index)] = value.start_mark.line + 1
            _walk(value, (*keys, index), lines, problems, path)


def dotted(keys: Keys) -> str:
    """Formats ("adapters", 1, "optim", "lr") as `adapters[1].optim.lr`."""
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text
