"""lorafusion check: reports all errors of the job file, the data and the layers of the stages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorafusion_jax.cli.common import JobFile, Json, Overrides, next_command, typed
from lorafusion_jax.errors import LoraFusionError, unique
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.report.console import most_telling, out, plain_table, say, warn
from lorafusion_jax.report.format import count, exact, loss_text

if TYPE_CHECKING:
    from rich.console import Console

    from lorafusion_jax.config.schema import JobConfig
    from lorafusion_jax.data.prepare import Prepared
    from lorafusion_jax.training.base_loss import BaseLoss


def command(
    jobs: JobFile,
    overrides: Overrides = None,
    base_loss: Annotated[
        bool,
        typer.Option(
            "--base-loss",
            help="also evaluate the base model, before and after base.quantize, on the held-out data; uses a device",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Checks a job file and its data, without using a device.

    Example: lorafusion check jobs.yaml

    Example: lorafusion check jobs.yaml base.quantize=nf4 --base-loss
    """
    from lorafusion_jax.api.plans import check_start
    from lorafusion_jax.config.job_checks import ineffective
    from lorafusion_jax.config.load import examine_config, read_job_file
    from lorafusion_jax.config.overrides import unreached
    from lorafusion_jax.planning.checks import checked_data, layer_problems, weight_notes
    from lorafusion_jax.report.data_notes import data_notes
    from lorafusion_jax.report.trackers import handovers, missing_packages

    config, errors = examine_config(jobs, overrides or ())
    of_layers, more = layer_problems(config) if config else ([], [])
    config, prepared = checked_data(config, [*errors, *more, *_base_problems(config)])
    check_start(config, prepared)
    handovers(config, Path())
    notes = [
        *of_layers,
        *unreached(read_job_file(jobs), overrides or ()),
        *ineffective(config),
        *weight_notes(config),
        *missing_packages(config.report),
        *data_notes(config, prepared),
    ]
    losses = _base_losses(config, prepared) if base_loss else {}
    if as_json:
        numbers = {
            "adapters": {name: summary(data.train.report) for name, data in prepared.adapters.items()},
            "warnings": notes,
        }
        numbers_of_loss = {name: dataclasses.asdict(loss) for name, loss in losses.items()}
        print(json.dumps(numbers | ({"base_loss": numbers_of_loss} if base_loss else {})))
        return
    console = out()
    table = plain_table(("adapter", "format"), ("rows", "tokens", "learned", "max", "cut", "dropped", "held-out"))
    data_by_name, omission = most_telling(prepared.adapters, lambda data: data.train.report.tokens)
    for name, data in data_by_name.items():
        report = data.train.report
        table.add_row(
            name,
            report.format,
            exact(report.rows),
            count(report.tokens),
            count(report.loss_tokens),
            exact(report.longest),
            exact(report.cut),
            exact(sum(len(part.dropped) + len(part.too_long) for part in report.files)),
            exact(data.eval.report.rows) if data.eval else "–",
        )
    console.print(table)
    if omission:
        say(console, omission)
    if losses:
        _show_base_losses(console, config, losses)
    warn(console, notes)
    next_command(console, f"lorafusion plan {typed(jobs, overrides)}")


def _base_losses(config: JobConfig, prepared: Prepared) -> dict[str, BaseLoss]:
    from lorafusion_jax.checkpoint.base_model import base_directory
    from lorafusion_jax.families.model import ModelConfig

    prepare_machine()
    from lorafusion_jax.training.base_loss import base_losses

    has_quantised_base = ModelConfig.from_hf(base_directory(config)).checkpoint_format is not None
    return base_losses(config, prepared, comes_quantised=has_quantised_base)


def _show_base_losses(console: Console, config: JobConfig, losses: Mapping[str, BaseLoss]) -> None:
    """Perplexity is of the loss of the adapter's objective."""
    from lorafusion_jax.weights.table import NONE

    quantize = config.base.quantize
    table = plain_table(("base on", "data"), ("tokens", f"perplexity in {config.base.dtype}", f"as {quantize}", "loss"))
    for name, loss in losses.items():
        before, after = loss.perplexities
        table.add_row(
            name,
            "held-out" if loss.held_out else "training",
            count(loss.tokens),
            "–" if before is None else f"{before:.4g}",
            "–" if quantize == NONE else f"{after:.4g}",
            " → ".join(loss_text(value) for value in (loss.before, loss.after) if value is not None),
        )
    console.print(table)
    if not all(loss.held_out for loss in losses.values()):
        say(console, "  training data, where an adapter has no held-out data (data.eval)")
    if any(loss.before is None for loss in losses.values()):
        say(console, "  the checkpoint comes quantised: there is no other base to compare with")


def _base_problems(config: JobConfig | None) -> list[LoraFusionError]:
    """What is wrong with the base model's files, or that no run could train it."""
    from lorafusion_jax.checkpoint.base_model import base_directory

    try:
        return [] if config is None else _of_model(base_directory(config))
    except LoraFusionError:  # no base model: whoever reads its tokenizer says so
        return []


def _of_model(directory: Path) -> list[LoraFusionError]:
    from lorafusion_jax.checkpoint.base_weights import weight_problems
    from lorafusion_jax.planning.checks import problems_of_base

    return list(unique([*weight_problems(directory), *problems_of_base(directory)]))


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
