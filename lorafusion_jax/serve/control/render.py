"""Renders rows with the prompt templates of mLoRA's clients. Runs in a child process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from lorafusion_jax.data.template.compiled import render

MOST_ROWS = 1_000_000


def render_rows(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the first rows, or writes all of them as JSONL.

    Args:
        request: `file` of rows, `prompt` with the key `template`, `type` of the prompt, `most` rows, and the file
            `to` write.
    """
    try:
        template = yaml.safe_load(Path(request["prompt"]).read_text(encoding="utf-8"))["template"]
        text = Path(request["file"]).read_text(encoding="utf-8")
        rows = yaml.safe_load(text) if request["file"].endswith(".yaml") else json.loads(text)
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as problem:
        return _refuse(f"the file cannot be read: {type(problem).__name__}")
    if not isinstance(rows, list) or not isinstance(template, str) or len(rows) > MOST_ROWS:
        return _refuse("the data must be a list of rows, and the prompt a mapping with the text `template`")
    texts = []
    try:
        for row in rows[: request["most"]]:
            texts += [_render_row(template, row, request["type"])]
    except ValueError as problem:
        return _refuse(f"row {len(texts)}: {str(problem).splitlines()[0]}")
    if request["to"] is None:
        return {"problems": [], "rows": texts}
    with Path(request["to"]).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in texts)
    return {"problems": [], "rows": []}


def _render_row(template: str, row: Any, kind: str) -> dict[str, str]:
    """A text, or a prompt with two answers: what both texts begin with, and their rests."""
    if kind == "instruction":
        return {"text": render(template, {"data_point": row})}
    chosen, rejected = (render(template, {"data_point": row, "is_chosen": is_chosen}) for is_chosen in (True, False))
    prompt = os.path.commonprefix([chosen, rejected])
    return {"prompt": prompt, "chosen": chosen[len(prompt) :], "rejected": rejected[len(prompt) :]}


def _refuse(message: str) -> dict[str, Any]:
    return {"problems": [{"code": "mlora.rows", "where": "rows", "what": message}]}
