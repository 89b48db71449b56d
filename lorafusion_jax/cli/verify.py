"""lorafusion verify: compares the files of a run folder or an exported folder with their digests."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lorafusion_jax.checkpoint.verify_folder import verify_folder
from lorafusion_jax.cli.common import Json, errors_to, out, plain_table, say
from lorafusion_jax.report.format import whole

NAME = "verify"
DAMAGED = 2


def command(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="run folder, or a folder with SHA256SUMS")],
    as_json: Json = False,
) -> int:
    """Compares every file with its digest; exits with 2 if one is damaged.

    Example: lorafusion verify runs/exp1
    """
    verdicts = verify_folder(path)
    damage = [text for verdict in verdicts for text in verdict.damage]
    if as_json:
        print(json.dumps({"folder": str(path), "good": not damage, "files": [asdict(one) for one in verdicts]}))
        return DAMAGED if damage else 0
    table = plain_table(("", "state"), ("files",))
    for one in verdicts:
        state = "[bold red]damaged[/]" if one.damage else one.note or "[green]good[/]"
        table.add_row(one.name, state, whole(one.files))
    console = out()
    console.print(table)
    for text in damage:
        errors_to().print(f"error[verify.damaged] {text}", style="red", highlight=False, markup=False, soft_wrap=True)
    if not damage:
        say(console, f"all {whole(sum(one.files for one in verdicts))} files are as they were written")
    return DAMAGED if damage else 0
