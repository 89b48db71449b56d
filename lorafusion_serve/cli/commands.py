"""What `lorafusion` gains from this package; found by name, because that package does not import this one."""

from __future__ import annotations

import typer

from lorafusion_serve.cli import backup, jobs, keys, serve


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("serve")(serve.command)
    app.command("backup")(backup.command)
    app.add_typer(jobs.app, name="jobs")
    app.add_typer(keys.app, name="keys")
