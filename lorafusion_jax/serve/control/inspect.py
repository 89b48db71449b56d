"""Reads uploaded files: counts rows and columns, and shows rows as the model sees them. Runs in a child process."""

from __future__ import annotations

import dataclasses
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.read import source_of
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.data.preview import render_preview
from lorafusion_jax.data.row_blocks import LARGE, unpacked_parquet_bytes
from lorafusion_jax.data.sources import kind_of, open_source, row_blocks
from lorafusion_jax.errors import DataError, LoraFusionError, raise_all
from lorafusion_jax.serve.refusals import describe

UNPACKED_BYTES, UNPACKED_RATIO = 64 << 20, 200  # of the rows of a Parquet file, beside its own bytes
MOST_COLUMNS, COLUMN_ROWS = 100, 1000  # columns that are listed, and rows that are looked at for them


def count(file: Path, most_bytes: int) -> dict[str, Any]:
    """Returns rows and columns of a file, or its problems. It reads block by block.

    Args:
        most_bytes: that the rows may have once they are unpacked.
    """
    rows, columns = 0, set[str]()
    try:
        _check_unpacked(file, most_bytes)
        for block in row_blocks(open_source(str(file), Path(".")), one_block=False):
            raise_all(block.problems)
            columns.update(key for row in block.values[: max(0, COLUMN_ROWS - rows)] for key in row)
            rows += len(block.values)
    except LoraFusionError as problem:
        return {"problems": [_without_path(describe(error), file) for error in getattr(problem, "errors", [problem])]}
    return {"problems": [], "rows": rows, "columns": sorted(columns)[:MOST_COLUMNS]}


def preview(values: dict[str, Any], row: int) -> dict[str, Any]:
    """Returns a row as text, with ⟦ ⟧ around what is learned. Of the file it reads nothing after that row."""
    (adapter,) = values["adapters"]
    file = Path(adapter["data"]["train"])
    with tempfile.TemporaryDirectory(prefix="preview-") as folder:
        part = Path(folder) / f"{file.stem}.jsonl"
        try:
            line = json.dumps(_row(file, row), default=str)
            part.write_text("\n" * row + line + "\n", encoding="utf-8")  # messages name its line
            adapter = adapter | {"data": adapter["data"] | {"train": str(part)}}
            prepared = prepare(parse_config(source_of(values | {"adapters": [adapter]})))
        except LoraFusionError as problem:
            errors = [describe(error) for error in getattr(problem, "errors", [problem])]
            return {"problems": [{k: v.replace(str(part), str(file)) for k, v in error.items()} for error in errors]}
        samples = prepared.adapters[adapter["name"]].train
        samples = dataclasses.replace(samples, rows=samples.rows + row)
        output = io.StringIO()
        Console(file=output, width=120).print(render_preview(samples, prepared.tokenizer, title="preview"))
        text = output.getvalue().replace(str(part), str(file))
        tokens, mask = samples.sample(0)
        return {"problems": [], "text": text, "tokens": len(tokens), "learned": int(mask.sum())}


def _check_unpacked(file: Path, most_bytes: int) -> None:
    """Refuses a small file that would take much of the memory and time of all who read it.

    Raises:
        DataError: `data.unpacked`.
    """
    if kind_of(file) != "parquet":
        return
    most = min(most_bytes, UNPACKED_BYTES + UNPACKED_RATIO * file.stat().st_size)
    if unpacked_parquet_bytes(str(file), file, most) > most:
        raise DataError(
            "data.unpacked",
            f"the rows of the file take more than {most >> 20} MiB once they are unpacked.",
            where="the file",
            why=f"a file of its size has at most {UNPACKED_BYTES >> 20} MiB and {UNPACKED_RATIO} times its bytes here",
            fix="split it, remove what is repeated, or upload the rows as JSONL",
        )


def _row(file: Path, row: int) -> dict[str, Any]:
    """Reads blocks of a file up to a row.

    Raises:
        DataError: `data.row`; problems of the block.
    """
    kind, rows = kind_of(file), 0
    assert kind is not None
    for block in LARGE[kind](str(file), file):
        if row < rows + len(block.values):
            return block.values[row - rows]
        raise_all(block.problems)
        rows += len(block.values)
    raise DataError("data.row", f"the data set has {rows} rows.", where="row", fix="a smaller row")


def _without_path(problem: dict[str, str], file: Path) -> dict[str, str]:
    """Nothing of the server's folders reaches a client."""
    return {key: text.replace(str(file), "the file").replace(str(file.parent), "") for key, text in problem.items()}
