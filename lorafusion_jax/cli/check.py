"""lorafusion check: reports all errors of the job file, the data and the layers of the stages."""

from __future__ import annotations

import json
from pathlib import Path

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.checkpoint.base_weights import weight_problems
from lorafusion_jax.cli.common import (
    JobFile,
    Json,
    Overrides,
    checked_data,
    layer_problems,
    next_command,
    out,
    plain_table,
    typed,
    warn,
)
from lorafusion_jax.config.load import examine_config, ineffective
from lorafusion_jax.config.model import ModelConfig
from lorafusion_jax.config.overrides import unreached
from lorafusion_jax.config.read import read_source
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.errors import CheckpointError, LoraFusionError
from lorafusion_jax.report.data_notes import data_notes
from lorafusion_jax.report.format import count, whole

NAME = "check"


def command(jobs: JobFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Checks a job file and its data, without using a device.

    Example: lorafusion check jobs.yaml
    """
    config, errors = examine_config(jobs, overrides or ())
    unchecked, more = layer_problems(config) if config else ([], [])
    config, prepared = checked_data(config, [*errors, *more, *_base_problems(config)])
    notes = (
        unchecked + unreached(read_source(jobs), overrides or ()) + ineffective(config) + data_notes(config, prepared)
    )
    if as_json:
        print(
            json.dumps(
                {
                    "adapters": {name: summary(data.train.report) for name, data in prepared.adapters.items()},
                    "warnings": notes,
                }
            )
        )
        return
    console = out()
    table = plain_table(("adapter", "format"), ("rows", "tokens", "learned", "max", "cut", "dropped", "held-out"))
    for name, data in prepared.adapters.items():
        report = data.train.report
        table.add_row(
            name,
            report.format,
            whole(report.rows),
            count(report.tokens),
            count(report.loss_tokens),
            whole(report.longest),
            whole(report.cut),
            whole(len(report.dropped) + len(report.too_long)),
            whole(data.eval.report.rows) if data.eval else "–",
        )
    console.print(table)
    warn(console, notes)
    next_command(console, f"lorafusion plan {typed(jobs, overrides)}")


def _base_problems(config: JobConfig | None) -> list[LoraFusionError]:
    """What is wrong with the base model's files, or that no run could train it."""
    try:
        return [] if config is None else _of_model(base_directory(config))
    except LoraFusionError:  # no base model: whoever reads its tokenizer says so
        return []


def _of_model(directory: Path) -> list[LoraFusionError]:
    problems = weight_problems(directory)
    try:
        ModelConfig.from_hf(directory)
    except CheckpointError as problem:
        problems += [problem] if problem.code == "model.unsupported" else []
    return problems


def summary(report) -> dict:
    """A data report as plain numbers."""
    return {
        "source": str(report.source),
        "format": report.format,
        "rows": report.rows,
        "tokens": report.tokens,
        "loss_tokens": report.loss_tokens,
        "longest": report.longest,
        "cut": report.cut,
        "dropped": [int(row) for row in report.dropped],
        "too_long": [int(row) for row in report.too_long],
    }
