"""lorafusion simulate: simulates a trace of jobs on a cluster under one or more policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorafusion_jax.cli.common import Json, ends_in, next_command
from lorafusion_jax.errors import ConfigError, quoted
from lorafusion_jax.files import make_folders, write_output
from lorafusion_jax.readable import DATA, read_text
from lorafusion_jax.report.console import out, plain_table, say

if TYPE_CHECKING:
    from scheduling.online import ClusterResult, Rates, Worker

HOST_GPUS = 8
EXAMPLE_JOBS = 60


def command(
    trace: Annotated[
        str | None,
        typer.Argument(metavar="TRACE", help="CSV file: our columns, or those of Philly, Helios or ACME"),
    ] = None,
    also: Annotated[list[str] | None, typer.Argument(metavar="POLICY", help="further policies")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="number of GPUs of the cluster, in hosts of eight")] = 64,
    device: Annotated[str, typer.Option(metavar="NAME", help="the GPUs, as in plan")] = "h200",
    memory_gib: Annotated[
        float | None, typer.Option(min=1, help="memory of each GPU", show_default="by device")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="ours, and others to compare with, such as fifo srtf")
    ] = None,
    to: Annotated[Path, typer.Option("--out", "-o", help="an .html page to replay the runs")] = Path("simulate.html"),
    seed: Annotated[int, typer.Option(min=0, help="seed for bases and data, which public traces do not contain")] = 0,
    example: Annotated[Path | None, typer.Option(help="write a trace of 60 made-up jobs here, and simulate it")] = None,
    as_json: Json = False,
) -> None:
    """Simulates jobs that arrive over time on a cluster, and compares policies in a table, a plot and a replay page.

    Example: lorafusion simulate --example trace.csv --gpus 16 --policy ours fifo
    """
    from lorafusion_jax.planning.prediction import memory_of
    from scheduling.online import POLICIES, Rates, Worker, read_trace, simulate_cluster
    from scheduling.online.replay import completion_svg, replay_html

    ends_in(to, ".html")
    if example is not None and trace in POLICIES:  # the first free word, behind `--policy ours`
        trace, also = None, [trace, *(also or [])]
    if (trace is None) == (example is None):
        message = "there is no trace to simulate." if trace is None else "there are two traces."
        raise ConfigError(
            "simulate.trace", message, fix="lorafusion simulate TRACE.csv, or --example NEW.csv to see one"
        )
    names: list[str] = list(dict.fromkeys([*(policy or ["ours"]), *(also or [])]))
    if unknown := [name for name in names if name not in POLICIES]:
        raise ConfigError("simulate.policy", f"no policy {unknown[0]!r}.", fix=f"some of {', '.join(POLICIES)}")
    memory = memory_gib or (memory_of(device) or 0) / 2**30 or 140.0
    workers = [
        Worker(f"host{first // HOST_GPUS}", min(HOST_GPUS, gpus - first), memory, device)
        for first in range(0, gpus, HOST_GPUS)
    ]
    rates = Rates()
    if example is not None:
        _write_example(example, workers, seed, rates)
    file = example if trace is None else Path(trace)
    assert file is not None
    jobs = read_trace(_text(file), workers=workers, seed=seed, rates=rates, where=str(file))
    results = [simulate_cluster(jobs, workers, policy=name, rates=rates) for name in names]
    make_folders(to.parent)
    write_output(to, replay_html(results, title=f"{file.name}: {len(jobs)} jobs on {gpus} GPUs"))
    plot = to.with_suffix(".svg")
    write_output(plot, completion_svg(results))
    if as_json:
        rows = {result.policy: result.summary() for result in results}
        print(json.dumps({"jobs": len(jobs), "gpus": gpus, "policies": rows, "files": [str(to), str(plot)]}))
        return
    _show(results)
    say(out(), f"completion times drawn in {plot}")
    next_command(out(), f"open {quoted(to)}")


def _write_example(file: Path, workers: list[Worker], seed: int, rates: Rates) -> None:
    from scheduling.online import generate_trace, write_trace

    if file.exists():
        raise ConfigError(
            "simulate.exists", f"{file} exists.", fix=f"lorafusion simulate {quoted(file)}, or a new name"
        )
    make_folders(file.parent)
    jobs = generate_trace("steady", jobs=EXAMPLE_JOBS, workers=workers, seed=seed, rates=rates)
    write_output(file, write_trace(jobs))


def _text(trace: Path) -> str:
    try:
        return read_text(trace, DATA)
    except OSError as problem:
        message = f"{trace} cannot be read."
        raise ConfigError("simulate.trace", message, why=str(problem), fix="lorafusion simulate TRACE.csv") from None
    except UnicodeDecodeError as problem:
        raise ConfigError(
            "simulate.trace", f"{trace} is no UTF-8 text.", why=str(problem), fix="save the table as CSV in UTF-8"
        ) from None


def _show(results: list[ClusterResult]) -> None:
    from scheduling.online.replay import COLUMNS, format_figure

    table = plain_table(("policy",), tuple(title for title, _ in COLUMNS))
    for result in results:
        summary = result.summary()
        table.add_row(result.policy, *(format_figure(name, summary[name]) for _, name in COLUMNS))
    out().print(table)
