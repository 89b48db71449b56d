"""Functions of users in files of theirs, `FILE.py:function`: what a check can know without running the file."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from lorafusion_jax.errors import did_you_mean, first_few

FUNCTION = re.compile(r"(?P<file>[^:\n]+\.py):(?P<name>[A-Za-z_]\w*)")
BATCH = ("prompts", "completions")  # what a function of answers gets besides columns of the rows
ANSWERS = ("row", "answers")  # what a tool gets, in this order


def missing_function(folder: Path, text: str) -> str:
    """Says why FILE.py:function does not exist, or cannot be called; empty if it can."""
    path, name = _parts(folder, text)
    try:
        tree = _read(path)
    except FileNotFoundError:
        return f"there is no file {path}."
    except (OSError, ValueError, SyntaxError, RecursionError) as problem:
        return f"{path} cannot be read: {problem}."
    if any(isinstance(node, ast.AsyncFunctionDef) and node.name == name for node in tree.body):
        return f"{name} of {path} is async, and nothing awaits it."
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if name in {*names, *_bound(tree)}:
        return ""
    near = did_you_mean(name, names) or (f"it has {first_few(names, 6)}" if names else "")
    return f"{path} has no function {name}" + (f"; {near}" if near else "") + "."


def unknown_arguments(folder: Path, text: str, columns: Collection[str]) -> str:
    """Says which arguments of a function of answers have no column of the rows; empty if all do.

    Only of a plain `def`: what decorators, imports and assignments make takes what it takes.
    """
    names = BATCH + tuple(sorted({*columns} - {"prompt", *BATCH}))
    if (node := _plain(folder, text)) is None:
        return ""
    unknown = [argument for argument in _needed(node.args) if argument not in names]
    if not unknown:
        return ""
    near = did_you_mean(unknown[0], names)
    return f"{text} has the argument '{unknown[0]}', and is given {', '.join(names)}{near and '; ' + near}."


def wrong_tool(folder: Path, text: str) -> str:
    """Says why a function cannot be called as a tool; empty if it can."""
    if (node := _plain(folder, text)) is None:
        return ""
    arguments = node.args
    positions = len(arguments.posonlyargs) + len(arguments.args)
    least, most = positions - len(arguments.defaults), positions if arguments.vararg is None else len(ANSWERS)
    by_name = any(default is None for default in arguments.kw_defaults)
    if least <= len(ANSWERS) <= most and not by_name:
        return ""
    return f"{text} cannot be called as {node.name}({', '.join(ANSWERS)})."


def _plain(folder: Path, text: str) -> ast.FunctionDef | None:
    """The definition of a function that its name surely means."""
    path, name = _parts(folder, text)
    try:
        tree = _read(path)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return None if not nodes or nodes[-1].decorator_list or name in _bound(tree) else nodes[-1]


def _needed(arguments: ast.arguments) -> Iterator[str]:
    """The arguments without a default."""
    positions = [*arguments.posonlyargs, *arguments.args]
    for argument in positions[: len(positions) - len(arguments.defaults)]:
        yield argument.arg
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is None:
            yield argument.arg


def _bound(tree: ast.Module) -> set[str]:
    """Names that a file binds other than by `def`."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imports = (node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    return names | {alias.asname or alias.name for node in imports for alias in node.names}


def _parts(folder: Path, text: str) -> tuple[Path, str]:
    parts = FUNCTION.fullmatch(text)
    assert parts is not None
    return folder / parts["file"], parts["name"]


def _read(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), path.name)
