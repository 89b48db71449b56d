"""lorafusion tune: times the kernels' tile sizes on this device for the layers of a job's base model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorafusion_jax.cli.common import JobFile, Json, Overrides, next_command, out, plain_table
from lorafusion_jax.config import load_config
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import base_directory
from lorafusion_jax.errors import ConfigError

if TYPE_CHECKING:
    from lorafusion_jax.models import ModelConfig
    from pallas_kernels.arg_specs import LinearSpec

NAME = "tune"


def command(
    jobs: JobFile,
    overrides: Overrides = None,
    table: Annotated[
        Path | None, typer.Option("--out", "-o", help="write here, not into the installed package, where runs look")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a third of the candidates")] = False,
    as_json: Json = False,
) -> None:
    """Finds the fastest tile sizes of every kernel on this device; stop it and go on at any time.

    Example: lorafusion tune jobs.yaml
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from lorafusion_jax.cli.common import errors_to
    from lorafusion_jax.models import ModelConfig
    from pallas_kernels.device import device_kind
    from pallas_kernels.tuning import store
    from pallas_kernels.tuning.tune import count, tune

    config = load_config(jobs, overrides or ())
    specs = layer_specs(config, ModelConfig.from_hf(base_directory(config)))
    if not (total := count(specs, quick=quick)):
        raise ConfigError(
            "tune.nothing-fits",
            "no kernel divides the layers of this job.",
            where=str(jobs),
            why=f"tiles of {config.batch.tile_tokens} tokens, {config.batch.capacity_tokens} tokens a microbatch",
            fix="batch.tile_tokens: 128 and batch.capacity_tokens a multiple of it",
        )
    path = table or store.DATA / store.file_name(device_kind())
    check_table(path)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors_to()) as bar:
        task = bar.add_task(f"tuning for {device_kind()}", total=total)
        measured = tune(
            specs, path, quick=quick,
            progress=lambda now: bar.update(task, completed=now.done, description=f"{now.kernel} {now.shape}"),
        )  # fmt: skip
    rows = [best for spec in specs for best in fastest(measured, spec)]
    if as_json:
        print(json.dumps({"table": str(path), "device": measured.device, "best": rows}))
        return
    console = out()
    shown = plain_table(("kernel", "layer"), ("best us", "worst us", "tried"))
    for row in rows:
        best, worst = f"{row['best_us']:.1f}", f"{row['worst_us']:.1f}"
        shown.add_row(row["kernel"], row["layer"], best, worst, f"{row['tried']}")
    console.print(shown)
    console.print(f"\nwritten: {path}", highlight=False, markup=False, soft_wrap=True)
    next_command(console, f"lorafusion train {jobs} --out runs/{jobs.stem}")


def check_table(path: Path) -> None:
    """Refuses a file that cannot be gone on with, before anything is measured."""
    from pallas_kernels.device import device_kind
    from pallas_kernels.tuning import store

    try:
        table = store.load(path)
    except ValueError as problem:
        raise ConfigError(
            "tune.old-table",
            "this is no table of this version's kernels.",
            where=str(path),
            why=str(problem.__cause__ or problem),
            fix=f"rm {path} and tune again",
        ) from None
    if table is not None and table.device != device_kind():
        raise ConfigError(
            "tune.other-device",
            f"this table holds times of {table.device}, and this device is {device_kind()}.",
            where=str(path),
            fix="--out with the name of a new file",
        )


def layer_specs(config: JobConfig, model: ModelConfig) -> list[LinearSpec]:
    """The layers whose kernels a run of this job calls: every projection, and siblings with their ranks together."""
    from pallas_kernels.arg_specs import LinearSpec
    from pallas_kernels.split_graph import padded_rank

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
            tokens=config.batch.capacity_tokens, in_features=num_in, out_features=num_out, rank=rank,
            adapters=len(config.adapters), rate=max(adapter.lora.dropout for adapter in config.adapters),
            tile=config.batch.tile_tokens,
        )
        for num_in, num_out, rank in shapes
    ]  # fmt: skip


def fastest(table, spec: LinearSpec) -> list[dict]:
    """Best and worst time of every kernel of one layer."""
    from pallas_kernels.tuning.tune import key_of

    rows = []
    for kernel in dict.fromkeys(entry.kernel for entry in table.entries):
        times = sorted(entry.p50_us for entry in table.entries if entry.key == key_of(spec, kernel))
        layer = f"{spec.in_features} → {spec.out_features}, r {spec.rank}"
        if times:
            found = {"kernel": kernel, "layer": layer, "tried": len(times)}
            rows.append(found | {"best_us": times[0], "worst_us": times[-1]})
    return rows
