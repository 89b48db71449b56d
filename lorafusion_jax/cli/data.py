"""lorafusion data preview: the tokens of samples and their loss mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorafusion_jax.cli.common import JobFile, Json, Overrides, next_command
from lorafusion_jax.errors import ConfigError, quoted
from lorafusion_jax.report.console import out

if TYPE_CHECKING:
    from lorafusion_jax.config.schema import AdapterConfig, JobConfig
    from lorafusion_jax.data.tokenized_set import TokenizedSet
    from lorafusion_jax.data.tokenizer import Tokenizer

app = typer.Typer(no_args_is_help=True, help="Shows training data.")


@app.callback()
def _group() -> None:
    """Shows training data."""


@app.command("preview")
def preview(
    jobs: JobFile,
    overrides: Overrides = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="ADAPTER", help="name of the adapter", show_default="all")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="rows per adapter")] = 3,
    as_json: Json = False,
) -> None:
    """Shows tokens coloured by loss mask.

    Example: lorafusion data preview jobs.yaml --adapter law --rows 3
    """
    from lorafusion_jax.checkpoint.base_model import base_directory
    from lorafusion_jax.config import load_config
    from lorafusion_jax.data.prepare import tokenizer_of_base
    from lorafusion_jax.data.preview import render_preview

    config = load_config(jobs, overrides or ())
    names = [entry.name for entry in config.adapters]
    if adapter is not None and adapter not in names:
        raise ConfigError(
            "config.unknown-adapter", f"there is no adapter '{adapter}'.", fix=f"one of: {', '.join(names)}"
        )
    tokenizer, console = tokenizer_of_base(base_directory(config))[0], out()
    sets = {entry.name: _load(config, entry, tokenizer) for entry in config.adapters if adapter in (None, entry.name)}
    if as_json:
        print(json.dumps({name: _numbers(samples, tokenizer, rows) for name, samples in sets.items()}))
        return
    for name, samples in sets.items():
        console.print(render_preview(samples, tokenizer, rows=rows, title=name))
    next_command(console, f"lorafusion plan {quoted(jobs)}")


def _load(config: JobConfig, adapter: AdapterConfig, tokenizer: Tokenizer) -> TokenizedSet:
    from lorafusion_jax.data.prepare import load_sources, tokenizer_of
    from lorafusion_jax.data.tokenized import load_samples

    base_dir = Path(config.directory)

    def load(source: str) -> TokenizedSet:
        return load_samples(
            source,
            settings=adapter.data,
            tokenizer=tokenizer_of(adapter, tokenizer),
            adapter=adapter.name,
            base_dir=base_dir,
            objective=adapter.objective.chosen,
        )

    return load_sources(adapter.data.train, base_dir, load)[0]


def _numbers(samples: TokenizedSet, tokenizer: Tokenizer, rows: int) -> list[dict]:
    """Tokens of the first samples as plain values."""
    result = []
    for index in range(min(rows, len(samples))):
        tokens, loss_mask = samples.sample(index)
        lengths = samples.segment_lengths_of(index)
        result.append(
            {
                "row": int(samples.rows[index]),
                "tokens": tokens.tolist(),
                "learned": loss_mask.tolist(),
                **({} if lengths is None else {"segment_lengths": list(lengths)}),
                "pieces": [tokenizer.piece(int(token)) for token in tokens],
            }
        )
    return result
