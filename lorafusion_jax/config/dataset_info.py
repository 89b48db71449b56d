"""Data sets that LLaMA-Factory knows by name: the entries of its `dataset_info.json` as settings of `data`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NoReturn

from lorafusion_jax.errors import ConfigError, LoraFusionError, did_you_mean, first_few, raise_all
from lorafusion_jax.families.hf_config import shortened
from lorafusion_jax.readable import SETTINGS, read_text

FILE, FOLDER = "dataset_info.json", "data"  # LLaMA-Factory's dataset_dir is data unless a file says otherwise
ROWS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}  # its columns where an entry names none
SHAREGPT = {"messages": "conversations"}
TAGS = {"role_tag": ("from", "role"), "content_tag": ("value", "content")}  # keys of a message that are read here
ROLE_TAGS = {  # tag of an entry → names of the role in messages that are read here
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant", "model", "chatgpt"),
    "observation_tag": ("observation", "tool", "function"),
    "function_tag": ("function_call", "tool_call", "assistant"),  # OpenAI's answers may hold calls
    "system_tag": ("system", "developer"),
}
MEDIA = ("images", "videos", "audios")
PAIRS, LABELS = "pairs", "labels"  # what an objective other than sft reads
NEEDS = {PAIRS: ("chosen", "rejected"), LABELS: ("kto_tag",)}
PREFERENCE_ROLES = {
    "prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "response": "completion", "kto_tag": "label",
    "system": "system",
}  # fmt: skip
MORE_COLUMNS = "columns named system, tools, input or history are read, too; lorafusion data preview shows what is"
JOINED = "an empty line stands between instruction and input, in LLaMA-Factory a line end"
SAMPLED = "all rows are trained, not num_samples of them; a weight in data.train takes a share in each epoch"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSet:
    """An entry as our settings say it.

    Attributes:
        source: for data.train.
        format: data.format; auto for the rows of preferences.
        columns: data.columns, without those that have the name of their role.
        notes: what differs.
    """

    name: str
    source: str
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """A `dataset_info.json`.

    Attributes:
        folder: where it lies, and its files.
        entries: by name.
    """

    folder: Path
    entries: Mapping[str, Any]

    @property
    def path(self) -> Path:
        return self.folder / FILE

    def named_set(self, name: str, reads: str) -> NamedSet:
        """Translates one entry.

        Args:
            reads: "pairs" or "labels" where the objective reads such rows; otherwise empty.

        Raises:
            ConfigError: `config.not-convertible`, there is no such entry, or our settings cannot say what it says.
        """
        entry = self.entries.get(name)
        if entry is None:
            fix = did_you_mean(name, self.entries) or "one of " + first_few(list(self.entries), 8)
            raise ConfigError("config.not-convertible", f"{self.path} has no data set '{name}'.", fix=fix)
        columns = self._columns(name, entry)
        if media := [key for key in MEDIA if key in columns]:
            self.refuse(name, f"has the column {media[0]}", "a data set of texts: nothing else is trained here")
        if bool(entry.get("ranking")) != (reads == PAIRS):
            kind = "holds pairs (ranking)" if entry.get("ranking") else "holds no pairs (no ranking)"
            self.refuse(name, f"{kind}, and the stage is for other rows", "stage: dpo or rm for pairs, sft for answers")
        if missing := [key for key in NEEDS.get(reads, ()) if key not in columns]:
            self.refuse(name, f"names no column {missing[0]}", f"columns: {{{missing[0]}: COLUMN}}")
        if entry.get("formatting", "alpaca") == "alpaca":
            format, roles = self._alpaca(name, columns, reads)
        else:
            self._check_tags(name, entry.get("tags") or {})
            format, roles = self._messages(name, columns, reads)
        renamed = {role: column for role, column in roles.items() if role != column}
        notes = (*((JOINED,) if "input" in roles else ()), *((SAMPLED,) if entry.get("num_samples") else ()))
        source = self._source(name, entry)
        return NamedSet(name=name, source=source, format=format, columns=renamed, notes=notes)

    def settings(self, names_of: Mapping[str, Sequence[str]], reads: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Translates the data sets that a file names.

        Args:
            names_of: key of a job file → names; a name that no entry has may be a file of rows.

        Returns:
            Settings of a job file, and notes by their keys.

        Raises:
            ConfigError, ErrorList: `config.not-convertible`, see `named_set`; their columns have different names.
        """
        sets: dict[str, NamedSet] = {}
        errors: list[LoraFusionError] = []
        for name in dict.fromkeys(name for names in names_of.values() for name in names):
            try:
                is_file = name not in self.entries and PurePath(name).suffix in ROWS
                sets[name] = NamedSet(name=name, source=name) if is_file else self.named_set(name, reads)
            except ConfigError as error:
                errors.append(error)
        raise_all(errors)
        format, columns = self._common_rows(list(sets.values()))
        settings: dict[str, Any] = {} if format == "auto" else {"data.format": format}
        notes = {}
        for key, names in names_of.items():
            sources = list(dict.fromkeys(sets[name].source for name in names))
            settings[key] = sources[0] if len(sources) == 1 else sources
            differing = dict.fromkeys(note for name in names for note in sets[name].notes)
            notes[key] = "; ".join((f"read from {self.path}: {MORE_COLUMNS}", *differing))
        return settings | ({"data.columns": dict(columns)} if columns else {}), notes

    def refuse(self, name: str, problem: str, fix: str) -> NoReturn:
        where = str(self.path)
        raise ConfigError("config.not-convertible", f"the data set '{name}' {problem}.", where=where, fix=fix)

    def _columns(self, name: str, entry: object) -> Mapping[str, str]:
        tables = [entry.get(key) or {} for key in ("columns", "tags")] if isinstance(entry, dict) else [None]
        if not all(isinstance(t, dict) and all(isinstance(v, str | None) for v in t.values()) for t in tables):
            self.refuse(
                name, "is no table with texts in columns and tags", "{file_name: FILE, columns: {prompt: COLUMN}}"
            )
        assert isinstance(entry, dict)
        by_format = {"alpaca": ALPACA, "sharegpt": SHAREGPT, "openai": SHAREGPT}
        formatting = str(entry.get("formatting", "alpaca"))
        if formatting not in by_format:
            self.refuse(name, f"has the formatting {shortened(formatting)}", "formatting: alpaca, sharegpt or openai")
        return {key: column for key, column in (entry.get("columns") or by_format[formatting]).items() if column}

    def _source(self, name: str, entry: Mapping[str, Any]) -> str:
        split = entry.get("split") or "train"
        if hub := entry.get("hf_hub_url"):
            for key in ("subset", "folder"):
                if entry.get(key):
                    self.refuse(name, f"names a {key} of {hub}", "write its rows into a file, and name it as file_name")
            return f"hf:{hub}" if split == "train" else f"hf:{hub}:{split}"
        for key in ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"):
            if entry.get(key):
                self.refuse(name, f"comes from {key}", "write its rows into a file, and name it as file_name")
        if not isinstance(file := entry.get("file_name"), str):
            self.refuse(name, "names no file", "file_name: FILE")
        if split != "train":
            self.refuse(name, f"takes the split {split} of a file", "write these rows into a file of their own")
        return str(self.folder / file)

    def _alpaca(self, name: str, columns: Mapping[str, str], reads: str) -> tuple[str, dict[str, str]]:
        if reads:
            for key in ("query", "history", "tools"):
                if key in columns:
                    fix = f"join '{columns[key]}' with the prompt in the file, and take {key} out of columns"
                    self.refuse(name, f"has the column {key}, which {reads} have not", fix)
            return "auto", _preference_roles(columns)
        if "prompt" not in columns:
            self.refuse(name, "names no column prompt", "columns: {prompt: COLUMN, response: COLUMN}")
        if "response" not in columns:
            return "text", {"text": columns["prompt"]}
        more = {key: columns[key] for key in ("system", "tools") if key in columns}
        is_named_so = (columns["prompt"], columns["response"]) == (ALPACA["prompt"], ALPACA["response"])
        if is_named_so or {"query", "history"} & columns.keys():
            key_of = {"instruction": "prompt", "input": "query", "output": "response", "history": "history"}
            return "instruction", {role: columns[key] for role, key in key_of.items() if key in columns} | more
        return "prompt", {"prompt": columns["prompt"], "completion": columns["response"]} | more

    def _messages(self, name: str, columns: Mapping[str, str], reads: str) -> tuple[str, dict[str, str]]:
        if "messages" not in columns:
            self.refuse(name, "names no column messages", "columns: {messages: COLUMN}")
        column = columns["messages"]
        if reads:
            if "tools" in columns:
                self.refuse(name, f"has the column tools, which {reads} have not", "take tools out of columns")
            roles = _preference_roles(dict(columns) | {"prompt": column})
            return "auto", {role: name for role, name in roles.items() if name not in ("messages", "conversations")}
        format = "messages" if column == "messages" else "conversations"
        return format, {format: column} | {key: columns[key] for key in ("system", "tools") if key in columns}

    def _check_tags(self, name: str, tags: Mapping[str, str | None]) -> None:
        for tag, text in tags.items():
            readable = (TAGS | ROLE_TAGS).get(tag)
            if text is None or readable is None or (text if tag in TAGS else text.lower()) in readable:
                continue
            self.refuse(name, f"has the {tag} '{text}'", f"rename it in its messages: {' or '.join(readable[:2])}")

    def _common_rows(self, sets: Sequence[NamedSet]) -> tuple[str, Mapping[str, str]]:
        """Returns data.format and data.columns of several data sets: these settings are for all sources."""
        first = sets[0]
        for other in sets:
            if other.columns != first.columns or (other.format != first.format and first.columns):
                self.refuse(
                    other.name,
                    f"has other columns than '{first.name}', and data.columns is for all sources",
                    "rename the columns in one of the files, or train one adapter for each data set",
                )
        return first.format if all(other.format == first.format for other in sets) else "auto", first.columns


def _preference_roles(columns: Mapping[str, str]) -> dict[str, str]:
    return {role: columns[key] for key, role in PREFERENCE_ROLES.items() if key in columns}


def read_dataset_info(dataset_dir: object, beside: Path) -> DatasetInfo | None:
    """Reads the description of data sets of a file of LLaMA-Factory; None if there is none.

    Args:
        dataset_dir: as the file says it: a folder of the current one, where LLaMA-Factory looks, or beside the file.
        beside: folder of the file.

    Raises:
        ConfigError: `config.not-convertible`, it cannot be read.
    """
    folder = Path(str(dataset_dir or FOLDER))
    for candidate in (folder, beside / folder, *(() if dataset_dir else (beside,))):
        try:
            entries = json.loads(read_text(candidate / FILE, SETTINGS))
            if not isinstance(entries, dict):
                raise ValueError("it is not an object")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, RecursionError) as problem:
            message, fix = f"{candidate / FILE} cannot be read.", "mend it, or name another folder as dataset_dir"
            raise ConfigError("config.not-convertible", message, why=str(problem), fix=fix) from None
        return DatasetInfo(folder=candidate, entries=entries)
    return None
