"""Reads prompts from rows of JSON: a prompt or messages, and settings of the row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from lorafusion_jax.data.row_files import parse_csv
from lorafusion_jax.data.rows import messages_or_text, typed_row
from lorafusion_jax.errors import DataError, LoraFusionError, raise_all
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.generation.text import PromptRow
from lorafusion_jax.objective.protocol import CellType

NUMBERS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
TYPES: Mapping[str, CellType] = dict.fromkeys(NUMBERS, "number")
OF_RESULTS = ("logprobs", "prompt_logprobs", "prompt_last", "prompt_targets")  # not of what is drawn
SETTINGS = tuple(field.name for field in fields(Sampling) if field.name not in OF_RESULTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """A row of a prompt file.

    Attributes:
        rows: one for each adapter.
        others: columns without a meaning here, which go with the answer.
    """

    rows: tuple[PromptRow, ...]
    others: dict[str, Any]


def read_rows(lines: Iterable[str], adapters: Sequence[str], sampling: Sampling, *, name: str) -> list[FileRow]:
    """Reads rows such as {"prompt": "…", "adapter": "law", "temperature": 0.7}.

    Args:
        adapters: of rows without the column "adapter".
        sampling: settings that a row may replace.
        name: of the file, for messages.

    Raises:
        DataError, ErrorList: `generate.row`: rows that are no objects, or hold neither a prompt nor messages.
    """
    file_rows, errors = [], []
    rows = parse_csv(name, "".join(lines)).values if name.lower().endswith(".csv") else lines
    for number, row in enumerate(rows, 1):
        if not isinstance(row, str) or row.strip():
            try:
                file_rows.append(_read_row(row, adapters, sampling, f"{name}, row {number}"))
            except LoraFusionError as problem:
                errors.append(problem)
    raise_all(errors[:20])
    if not file_rows:
        raise DataError("generate.row", f"{name} holds no prompts.", fix='rows such as {"prompt": "…"}')
    return file_rows


def _read_row(line: str | dict, adapters: Sequence[str], sampling: Sampling, where: str) -> FileRow:
    if not isinstance(line, str):
        try:
            line = json.dumps(typed_row({key: text for key, text in line.items() if text}, TYPES))
        except ValueError as problem:
            raise DataError("generate.row", f"{where}: {problem}.") from None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise DataError("generate.row", f"{where} is not JSON.", why=str(problem)) from None
    if not isinstance(row, Mapping):
        raise DataError("generate.row", f"{where} is not an object.", fix='{"prompt": "…"}')
    prompt = row.get("prompt", row.get("messages"))
    prompt = messages_or_text(prompt) if isinstance(prompt, str) else prompt
    if ("prompt" in row) == ("messages" in row) or not _is_prompt(prompt):
        message = f"{where} needs either 'prompt', a text or messages, or 'messages'."
        raise DataError("generate.row", message, why=f"it has {', '.join(map(repr, row)) or 'no column'}")
    adapter = row.get("adapter")
    if not (adapter is None or isinstance(adapter, str)):
        raise DataError("generate.row", f"{where}: 'adapter' is not a text.", fix='"adapter": "NAME"')
    options = {key: row[key] for key in SETTINGS if key in row}
    try:
        settings = replace(sampling, **options)
    except (LoraFusionError, TypeError) as problem:
        raise DataError("generate.row", f"{where}: {getattr(problem, 'what', problem)}") from None
    names = adapters if adapter is None else [adapter]
    return FileRow(
        rows=tuple(PromptRow(prompt=prompt, adapter=name, sampling=settings, where=where) for name in names),
        others={key: value for key, value in row.items() if key not in (*SETTINGS, "prompt", "messages", "adapter")},
    )


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    return isinstance(prompt, list) and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in prompt)
