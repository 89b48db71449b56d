"""Shared parts of the commands: options, and what a command prints about commands."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from lorafusion_jax.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

JobFile = Annotated[Path, typer.Argument(metavar="JOBS", help="job file, YAML or TOML")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="run folder")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="settings that override those of the file, e.g. train.max_steps=20; optim.lr=1e-4 applies to adapters "
        "without their own value, adapters.NAME.optim.lr=1e-4 to one adapter",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="machine-readable output")]
ProgramCache = Annotated[
    bool,
    typer.Option(
        "--program-cache/--no-program-cache",
        help="keep compiled programs for the next start, in the user's cache folder (see lorafusion doctor)",
    ),
]


def typed(jobs: Path, overrides: Sequence[str] | None) -> str:
    """Job file and settings as typed on a command line."""
    return shlex.join([str(jobs), *(overrides or ())])


def standard_input() -> TextIO:
    """Standard input. What is no text in it becomes half characters, which the check of prompts names.

    Raises:
        ConfigError: `generate.no-prompt`, it is closed.
    """
    if sys.stdin is None:
        raise ConfigError("generate.no-prompt", "standard input is closed.", fix="a text, or --file FILE")
    if isinstance(sys.stdin, TextIOWrapper) and sys.stdin.errors != "surrogateescape":
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


def ends_in(path: Path, *endings: str) -> None:
    """Checks that the suffix of an output file fits its content.

    Raises:
        ConfigError: `output.ending`.
    """
    if path.suffix not in endings:
        raise ConfigError(
            "output.ending",
            f"{path} does not end in {' or '.join(endings)}.",
            fix=" or ".join(str(path.with_suffix(ending)) for ending in endings),
        )


def next_command(console: Console, command: str) -> None:
    """Prints the command to type next, as the last line."""
    console.print(f"next: {command}", style="bold", highlight=False, markup=False, soft_wrap=True)
