"""Reads uploaded files: counts rows and columns, and shows rows as the model sees them. Runs in a child process."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.read import source_of
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.data.preview import render_preview
from lorafusion_jax.data.sources import read_rows
from lorafusion_jax.errors import LoraFusionError
from lorafusion_serve.refusals import describe

MOST_COLUMNS = 100


def count(file: Path) -> dict[str, Any]:
    """Returns rows and columns of a file, or its problems."""
    try:
        rows = read_rows(str(file))
    except LoraFusionError as problem:
        return {"problems": [_without_path(describe(error), file) for error in getattr(problem, "errors", [problem])]}
    columns = sorted({key for row in rows.values[:1000] for key in row})[:MOST_COLUMNS]
    return {"problems": [], "rows": len(rows.values), "columns": columns}


def preview(values: dict[str, Any], row: int) -> dict[str, Any]:
    """Returns a sample as text, with ⟦ ⟧ around what is learned."""
    try:
        config = parse_config(source_of(values))
        prepared = prepare(config)
    except LoraFusionError as problem:
        return {"problems": [describe(error) for error in getattr(problem, "errors", [problem])]}
    samples = prepared.adapters[config.adapters[0].name].train
    if row >= len(samples):
        message = f"the data set has {len(samples)} samples."
        return {"problems": [{"code": "data.row", "where": "row", "what": message}]}
    file = io.StringIO()
    Console(file=file, width=120).print(render_preview(samples, prepared.tokenizer, rows=[row], title="preview"))
    tokens, mask = samples.sample(row)
    return {"problems": [], "text": file.getvalue(), "tokens": len(tokens), "learned": int(mask.sum())}


def _without_path(problem: dict[str, str], file: Path) -> dict[str, str]:
    """Nothing of the server's folders reaches a client."""
    return {key: text.replace(str(file), "the file").replace(str(file.parent), "") for key, text in problem.items()}
