"""lorafusion tune: measures tile sizes and implementations on this device, for a job or the benchmark shapes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorafusion_jax.cli.common import Json, Overrides, next_command
from lorafusion_jax.errors import ConfigError, RunError, quoted
from lorafusion_jax.report.console import errors_to, out, plain_table, say
from lorafusion_jax.tuning_table import check_table, read_table, share_table, table_path, take_table, use_tables

# The second part of lorafusion tune: which implementation of each op is the fastest.

if TYPE_CHECKING:
    from rich.console import Console

    from lorafusion_jax.cli.job_calls import LayerCalls
    from lorafusion_jax.config.schema import JobConfig
    from lorafusion_jax.families.model import ModelConfig
    from pallas_kernels.measured import OpRow
    from pallas_kernels.tuning.ops import OpCase


def calls_of(jobs: Path | None, overrides: Sequence[str], *, quick: bool) -> list[LayerCalls]:
    """The calls whose implementations are compared."""
    from lorafusion_jax.checkpoint.base_model import base_directory
    from lorafusion_jax.cli.job_calls import calls_of_job, named_calls
    from lorafusion_jax.config import load_config
    from lorafusion_jax.families.model import ModelConfig

    if jobs is None:
        return named_calls(quick=quick)
    config = load_config(jobs, overrides)
    return calls_of_job(config, ModelConfig.from_hf(base_directory(config)))


def choose_implementations(calls: Sequence[LayerCalls], path: Path) -> list[OpRow]:
    """Times every implementation of every call; nothing where kernels are interpreted."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from lorafusion_jax.cli.job_calls import op_cases
    from pallas_kernels import config_store
    from pallas_kernels.device import interprets
    from pallas_kernels.tuning.ops import tune_ops

    if interprets():
        return []
    if path.exists():
        config_store.use(path)  # its tile sizes are those that runs will have
    cases, rows = list(op_cases(calls)), []
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=errors_to()) as bar:
        task = bar.add_task("implementations", total=len(cases))

        def advance(case: OpCase, row: OpRow | None) -> None:
            rows.extend([] if row is None else [row])
            bar.update(task, advance=1, description=case.call.op)

        tune_ops(cases, path, progress=advance)
    return rows


def show_implementations(console: Console, rows: Sequence[OpRow]) -> None:
    """Prints the times of every call, the fastest first, and what is the default now."""
    console.print("\nimplementations, forward and backward", style="bold")
    for row in rows:
        times = sorted(row.median_us.items(), key=lambda item: item[1])
        times_text = ", ".join(f"{name} {us:.0f} us" for name, us in times)
        now = "the default as before"
        if row.winner != row.default:
            now = f"default now, {row.speedup:.2f} × as fast as {row.default}"
        say(console, f"  {row.call.op}: {row.call.label}\n    {times_text}: {row.winner} is {now}")


if TYPE_CHECKING:
    from pallas_kernels.arg_specs import LinearSpec
    from pallas_kernels.tuning.store import Table
    from pallas_kernels.tuning.tune import Failure

SHOWN = 5  # failures to show


def command(
    jobs: Annotated[
        Path | None,
        typer.Argument(
            metavar="JOBS",
            help="job file, YAML or TOML, for the layers of its base model",
            show_default="shapes of the kernel benchmark and a layer of Llama-3.1-8B",
        ),
    ] = None,
    overrides: Overrides = None,
    table: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="output file", show_default="this machine's table, which runs use"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="a third of the candidates; without a job file only 8192 tokens")
    ] = False,
    tiles: Annotated[
        bool, typer.Option("--tiles/--no-tiles", help="whether to measure tile sizes, which takes most of the time")
    ] = True,
    share: Annotated[
        Path | None,
        typer.Option("--share", help="measures nothing: writes this machine's table to one file that you can send"),
    ] = None,
    use: Annotated[
        Path | None,
        typer.Option("--use", help="measures nothing: makes a file that somebody shared this machine's table"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measures tile sizes and implementations of every op on this device. The fastest become the defaults of this
    machine. It can be stopped and continued at any time.

    Example: lorafusion tune jobs.yaml, or lorafusion tune
    """
    if share is not None or use is not None:
        if jobs is not None or table is not None or (share is not None and use is not None):
            raise ConfigError(
                "tune.one-thing", "--share and --use measure nothing, and go with no other option.",
                fix="lorafusion tune --share FILE",
            )  # fmt: skip
        pass_on(share, use, as_json=as_json)
    else:
        tune_here(jobs, overrides or (), table, quick=quick, tiles=tiles, as_json=as_json)


def tune_here(
    jobs: Path | None, overrides: Sequence[str], table: Path | None, *, quick: bool, tiles: bool, as_json: bool
) -> None:
    """Measures what the table lacks, and shows the results.

    Raises:
        ConfigError: `tune.interpreted`, `tune.nothing-fits`.
        RunError: `tune.all-failed`.
    """
    from pallas_kernels.device import device_kind

    use_tables()
    if not (jobs and tiles):
        check_compiled()
    calls = calls_of(jobs, overrides, quick=quick)
    specs = []
    if tiles:
        specs = job_specs(jobs, overrides, quick=quick) if jobs else named_specs(quick=quick)
    path = table or table_path(device_kind())
    check_table(path)
    tile_table, failed = tuned(specs, path, quick=quick)
    rows = fastest(tile_table, specs)
    implementations = choose_implementations(calls, path) if rows or not tiles else []
    if as_json:
        failures = [dataclasses.asdict(failure) for failure in failed]
        numbers = {"table": str(path), "device": tile_table.device, "best": rows, "failed": failures}
        print(json.dumps(numbers | {"implementations": [row.to_json() for row in implementations]}))
    else:
        if tiles:
            show(out(), rows, failed)
        if implementations:
            show_implementations(out(), implementations)
    if tiles and not rows:
        raise RunError(
            "tune.all-failed",
            f"none of the {len(failed)} candidates runs on this device.",
            where=tile_table.device,
            why=failed[0].reason,
            fix="lorafusion doctor lists the kernels for this device",
        )
    if not as_json:
        outcome = f"written: {path}" if path.exists() else "nothing to choose: one implementation runs each call"
        out().print(f"\n{outcome}", highlight=False, markup=False, soft_wrap=True)
        next_command(
            out(),
            f"lorafusion train {quoted(jobs)} --out {quoted(f'runs/{jobs.stem}')}" if jobs else "lorafusion doctor",
        )


def pass_on(share: Path | None, use: Path | None, *, as_json: bool) -> None:
    """Writes this machine's table to a file, or the other way round."""
    if share is not None:
        path, table = share, share_table(share)
    else:
        assert use is not None
        path = take_table(use)
        table = read_table(path)
    numbers = {"table": str(path), "device": table.device, "tile sizes": len(table.entries), "calls": len(table.ops)}
    if as_json:
        print(json.dumps(numbers))
        return
    for name, value in numbers.items():
        say(out(), f"{name}: {value}")
    next_command(out(), "lorafusion doctor")


def job_specs(jobs: Path, overrides: Sequence[str], *, quick: bool) -> list[LinearSpec]:
    """Layers of the base model of a job.

    Raises:
        ConfigError: `tune.nothing-fits`.
    """
    from lorafusion_jax.checkpoint.base_model import base_directory
    from lorafusion_jax.config import load_config
    from lorafusion_jax.config.auto import refuse_auto
    from lorafusion_jax.families.model import ModelConfig
    from pallas_kernels.tuning.tune import count

    config = load_config(jobs, overrides)
    refuse_auto(config.auto, "tune")
    specs = layer_specs(config, ModelConfig.from_hf(base_directory(config)))
    if not count(specs, quick=quick):
        raise ConfigError(
            "tune.nothing-fits",
            "no kernel supports the layers of this job.",
            where=str(jobs),
            why=f"tiles of {config.batch.tile_tokens} tokens, {config.batch.largest} tokens per microbatch",
            fix="batch.tile_tokens: 128 and batch.capacity_tokens a multiple of it",
        )
    return specs


def named_specs(*, quick: bool) -> list[LinearSpec]:
    """Layers of the kernel benchmark."""
    from pallas_kernels.arg_specs import tuning_specs

    return tuning_specs(quick=quick)


def check_compiled() -> None:
    """Checks that kernels are compiled here.

    Raises:
        ConfigError: `tune.interpreted`.
    """
    from pallas_kernels.device import device_kind, interprets

    if interprets():
        raise ConfigError(
            "tune.interpreted",
            "implementations and the shapes of the kernel benchmark need a GPU.",
            where=device_kind(),
            why="kernels are interpreted on this machine, which takes hours and measures nothing",
            fix="run it on a GPU, or give a job file with a small base model, without --no-tiles",
        )


def tuned(specs: Sequence[LinearSpec], path: Path, *, quick: bool) -> tuple[Table, tuple[Failure, ...]]:
    """Measures under a progress bar; returns the table and the failures."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from lorafusion_jax.report.console import errors_to
    from pallas_kernels.device import device_kind
    from pallas_kernels.tuning.tune import count, tune

    failures: tuple[Failure, ...] = ()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors_to()) as bar:
        task = bar.add_task(f"tuning for {device_kind()}", total=count(specs, quick=quick))

        def advance(now) -> None:
            nonlocal failures
            failures = now.failed
            also = f", {len(failures)} failed" if failures else ""
            bar.update(task, completed=now.done, description=f"{now.kernel} {now.shape}{also}")

        tile_table = tune(specs, path, quick=quick, progress=advance)
    return tile_table, failures


def show(console: Console, rows: Sequence[dict], failed: Sequence[Failure]) -> None:
    """Prints best and worst times of every kernel, and the failures."""
    table = plain_table(("kernel", "layer"), ("best us", "worst us", "tried"))
    for row in rows:
        best, worst = f"{row['best_us']:.1f}", f"{row['worst_us']:.1f}"
        table.add_row(row["kernel"], row["layer"], best, worst, f"{row['tried']}")
    console.print(table)
    if failed:
        console.print(f"\n{len(failed)} candidates failed", style="bold yellow")
        for failure in failed[:SHOWN]:
            settings = ", ".join(f"{name}={value}" for name, value in failure.config.items())
            say(console, f"  {failure.kernel} {failure.shape}: {settings}\n    {failure.reason}")
        if len(failed) > SHOWN:
            say(console, f"  and {len(failed) - SHOWN} more; --json lists all")


def layer_specs(config: JobConfig, model: ModelConfig) -> list[LinearSpec]:
    """The op calls of a job: every projection, and sibling projections with their combined ranks."""
    from pallas_kernels.arg_specs import LinearSpec
    from pallas_kernels.policy import padded_rank

    width, inner = model.hidden_size, model.intermediate_size
    heads, key_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    groups = [(width, (heads, key_heads, key_heads)), (heads, (width,)), (width, (inner, inner)), (inner, (width,))]
    rank = padded_rank(max(adapter.lora.rank for adapter in config.adapters))
    shapes: dict[tuple[int, int, int], None] = {}
    for num_in, widths in groups:
        shapes.update({(num_in, num_out, rank): None for num_out in widths})
        shapes[num_in, max(widths), padded_rank(rank * len(widths))] = None
    return [
        LinearSpec(
            tokens=config.batch.largest, in_features=num_in, out_features=num_out, rank=rank,
            adapters=len(config.adapters), rate=max(adapter.lora.dropout for adapter in config.adapters),
            tile=config.batch.tile_tokens,
        )
        for num_in, num_out, rank in shapes
    ]  # fmt: skip


def fastest(table: Table, specs: Sequence[LinearSpec]) -> list[dict]:
    """Best and worst time of every kernel of every layer; equivalent layers are listed once."""
    from pallas_kernels.tuning.tune import key_of

    kernels = dict.fromkeys(entry.kernel for entry in table.entries)
    rows = []
    for key in dict.fromkeys(key_of(spec, kernel) for spec in specs for kernel in kernels):
        kernel, tokens, num_in, num_out, rank, dropout = key
        times = sorted(entry.p50_us for entry in table.entries if entry.key == key)
        layer = f"{tokens} × {num_in or 'any'} → {num_out or 'any'}, r {rank}{', dropout' if dropout else ''}"
        if times:
            best = {"kernel": kernel, "layer": layer, "tried": len(times)}
            rows.append(best | {"best_us": times[0], "worst_us": times[-1]})
    return rows
