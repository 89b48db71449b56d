"""Commands that are imported when they are run.

The list of commands needs only the beginning of each docstring, which is read from the source: `lorafusion --help` and
the completion of a shell import no command.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup


def group_of(paths: dict[str, str]) -> type[TyperGroup]:
    """Returns the class of a group of commands, which `add_names` adds to its application.

    Args:
        paths: `module:attribute` of each command, which is a function or an application with commands of its own.
            The application may have other commands beside them.
    """

    class Commands(TyperGroup):
        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            command = super().get_command(ctx, cmd_name)
            if command is not None and cmd_name in paths:
                command.help = documentation(paths[cmd_name])
            return command

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, command, rest = super().resolve_command(ctx, args)
            return name, imported(name, paths[name]) if name in paths else command, rest

    return Commands


def add_names(app: typer.Typer, paths: dict[str, str]) -> None:
    """Adds commands to an application whose class is `group_of(paths)`."""
    for name in paths:
        app.command(name)(_unknown)


def _unknown() -> None:
    """Stands for a command that has not been imported."""


@cache
def imported(name: str, path: str) -> Any:
    """Imports a command."""
    module, _, attribute = path.partition(":")
    command, parent = getattr(import_module(module), attribute), typer.Typer(add_completion=False)
    parent.callback()(_unknown)  # with it, an application of one command is a group, too
    if isinstance(command, typer.Typer):
        parent.add_typer(command, name=name)
    else:
        parent.command(name)(command)
    group: Any = typer.main.get_command(parent)
    return group.commands[name]


@cache
def documentation(path: str) -> str:
    """Returns the docstring of a command that is a function, or the help of one that is an application."""
    module, _, attribute = path.partition(":")
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(path)
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            helps = {keyword.arg: keyword.value for keyword in node.value.keywords}
            if ast.unparse(node.targets[0]) == attribute and "help" in helps:
                return ast.literal_eval(helps["help"])
    raise LookupError(path)
