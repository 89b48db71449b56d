"""lorafusion check: reports all errors of the job file, the data and the layers of the stages."""

from __future__ import annotations

import json

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
from lorafusion_jax.config.overrides import unreached
from lorafusion_jax.report.data_notes import data_notes
from lorafusion_jax.report.format import count, whole

NAME = "check"


def command(jobs: JobFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Checks a job file and its data, without using a device.

    Example: lorafusion check jobs.yaml
    """
    config, errors = examine_config(jobs, overrides or ())
    unchecked, more = layer_problems(config) if config else ([], [])
    config, prepared = checked_data(config, [*errors, *more])
    notes = unchecked + unreached(jobs, overrides or ()) + ineffective(config) + data_notes(config, prepared)
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
