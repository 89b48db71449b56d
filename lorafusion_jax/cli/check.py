"""lorafusion check: job file and data only, every mistake at once."""

from __future__ import annotations

import json

from rich.table import Table

from lorafusion_jax.cli.common import JobFile, Json, Overrides, next_command, out, warn
from lorafusion_jax.config import load_config
from lorafusion_jax.config.load import ineffective
from lorafusion_jax.data.prepare import Prepared, prepare
from lorafusion_jax.report.format import count

NAME = "check"


def command(jobs: JobFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Checks a job file and its data, without touching a device. Example: lorafusion check jobs.yaml"""
    config = load_config(jobs, overrides or ())
    prepared = prepare(config)
    console = out()
    notes = ineffective(config) + data_notes(prepared)
    if as_json:
        print(json.dumps({"adapters": {name: summary(data.train.report) for name, data in prepared.adapters.items()},
                          "warnings": notes}))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("adapter", "format", "rows", "tokens", "learned", "longest", "cut", "dropped", "held-out rows"):
        table.add_column(title, justify="left" if title in ("adapter", "format") else "right", no_wrap=True)
    for name, data in prepared.adapters.items():
        report = data.train.report
        table.add_row(name, report.format, f"{report.rows}", count(report.tokens), count(report.loss_tokens),
                      f"{report.longest}", f"{report.cut}", f"{len(report.dropped)}",
                      f"{data.eval.report.rows}" if data.eval else "–")
    console.print(table)
    warn(console, notes)
    next_command(console, f"lorafusion plan {jobs}")


def summary(report) -> dict:
    return {"source": str(report.source), "format": report.format, "rows": report.rows, "tokens": report.tokens,
            "loss_tokens": report.loss_tokens, "longest": report.longest, "cut": report.cut,
            "dropped": [int(row) for row in report.dropped]}


def data_notes(prepared: Prepared) -> list[str]:
    """Warnings about cut and dropped rows, with rows named."""
    notes = []
    for name, data in prepared.adapters.items():
        report = data.train.report
        if report.cut:
            notes.append(f"{name}: {report.cut} of {report.rows} rows are cut at data.max_length; raise it to keep them whole, "
                         "or set data.on_long: drop")
        if report.dropped:
            rows = ", ".join(str(row) for row in report.dropped[:5]) + (" …" if len(report.dropped) > 5 else "")
            notes.append(f"{name}: {len(report.dropped)} rows have no token to learn from and are left out: rows {rows}")
    return notes
