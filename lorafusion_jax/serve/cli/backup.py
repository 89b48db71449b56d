"""lorafusion backup: copies the database of a service, also while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lorafusion_jax.serve.cli.keys import HOME, Home, open_home


def command(
    to: Annotated[Path, typer.Argument(metavar="FILE", help="the copy; replaces a file once it is whole")],
    home: Home = HOME,
) -> None:
    """Copies the database of a service, also while it runs. Copy datasets/ and jobs/ of its home after it.

    Example: lorafusion backup backups/service.db --home service
    """
    db = open_home(home, other_version="read")
    try:
        db.copy(to.absolute())
    finally:
        db.close()
    print(f"{home} copied to {to}")
