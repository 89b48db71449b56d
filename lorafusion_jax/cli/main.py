"""Entry point: collects the commands, and converts errors to a message and an exit code.

0 all adapters done · 1 run error · 2 config or data error · 3 some adapters failed · 130 interrupted, state saved
"""

from __future__ import annotations

import ast
import errno
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from lorafusion_jax import __version__
from lorafusion_jax.errors import ConfigError, LoraFusionError, RunError
from lorafusion_jax.files import written_name
from lorafusion_jax.plugins import plugin_fault
from lorafusion_jax.report.console import errors_to
from lorafusion_jax.signals import INTERRUPTED, stop_signals

# Commands that are imported when they are run.
#
# The list of commands needs only the beginning of each docstring, which is read from the source: `lorafusion --help`
# and the completion of a shell import no command.


TYPES = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER", "path": "PATH", "file": "FILE"}
_TYPE = re.compile(r" <(?:list\[)?([^\[\]<>]*?)(?: range)?\]?>")
_DEFAULT_IN_WORDS = re.compile(r"\[default: \((.*?)\)(?=[;\]])")  # `show_default="the newest"` of an option


def _value_names(option: str) -> str:
    """Names the value of an option as arguments are named.

    >>> _value_names("-a, --adapter <list[str]>"), _value_names("--steps <int range>"), _value_names("--goal <a|b>")
    ('-a, --adapter TEXT', '--steps INTEGER', '--goal a|b')
    """
    return _TYPE.sub(lambda match: f" {TYPES.get(match[1], match[1])}", option)


class Sections:
    """Prints help as plain text in the sections that `rich_help_panel` names: importing rich takes longer than that.

    Names are NAME of one value, [NAME] of one that may be left out, NAME... of several, in usage and errors alike.
    """

    def collect_usage_pieces(self: Any, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)  # pyright: ignore[reportAttributeAccessIssue]
        return [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in pieces]

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (row := parameter.get_help_record(ctx)) is not None:
                text = _DEFAULT_IN_WORDS.sub(r"[default: \1", row[1])
                kind, row = "Options", (_value_names(row[0]), text)
                if parameter.param_type_name == "argument":
                    kind, row = "Arguments", (parameter.metavar, text)
                sections.setdefault(parameter.rich_help_panel or kind, []).append(row)
        for name, command in getattr(self, "commands", {}).items():
            text = self.get_command(ctx, name).help.split("\n\n")[0]
            sections.setdefault(command.rich_help_panel or "Commands", []).append((name, text))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def parse_args(self: Any, ctx: Any, args: list[str]) -> list[str]:
        for parameter in self.get_params(ctx):
            if parameter.name in ("help", "install_completion", "show_completion"):
                parameter.default = False  # typer hands None to pydantic, whose import takes longer than the help
        return super().parse_args(ctx, args)  # pyright: ignore[reportAttributeAccessIssue]


class SectionedCommand(Sections, TyperCommand):
    """A command whose help is in sections."""


class SectionedGroup(Sections, TyperGroup):
    """A group whose help is in sections."""


def group_of(paths: dict[str, str]) -> type[TyperGroup]:
    """Returns the class of a group of commands, which `add_names` adds to its application.

    Args:
        paths: `module:attribute` of each command, which is a function or an application with commands of its own.
            The application may have other commands beside them.
    """

    class Commands(SectionedGroup):
        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            command = super().get_command(ctx, cmd_name)
            if command is not None and cmd_name in paths:
                command.help = documentation(paths[cmd_name])
            return command

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, command, arguments = super().resolve_command(ctx, args)
            return name, imported(name, paths[name]) if name in paths else command, arguments

    return Commands


PANELS = {
    name: panel
    for panel, names in {
        "Start": "demo new init check plan data doctor",
        "Train": "train resume status timeline report verify",
        "While a run trains": "cancel pause continue finish weight extend add",
        "Use adapters": "generate chat export handover combine",
        "Service": "serve jobs keys backup",
        "Measure": "profile tune simulate",
    }.items()
    for name in names.split()
}


def add_names(app: typer.Typer, paths: dict[str, str]) -> None:
    """Adds commands to an application whose class is `group_of(paths)`."""
    for name in paths:
        app.command(name, rich_help_panel=PANELS.get(name))(_unknown)


def _unknown() -> None:
    """Stands for a command that has not been imported."""


@cache
def imported(name: str, path: str) -> Any:
    """Imports a command."""
    module, _, attribute = path.partition(":")
    command, parent = (
        getattr(import_module(module), attribute),
        typer.Typer(add_completion=False, rich_markup_mode=None),
    )
    parent.callback()(_unknown)  # with it, an application of one command is a group, too
    if isinstance(command, typer.Typer):
        command.rich_markup_mode = None
        for registered in command.registered_commands:
            registered.cls = SectionedCommand
        parent.add_typer(command, name=name, cls=SectionedGroup)
    else:
        parent.command(name, cls=SectionedCommand)(command)
    group: Any = typer.main.get_command(parent)
    loaded = group.commands[name]
    loaded.help = _unwrapped(loaded.help or "")
    return loaded


def _unwrapped(text: str) -> str:
    """Joins the lines of a paragraph: a screen wraps them itself."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


@cache
def documentation(path: str) -> str:
    """Returns the docstring of a command that is a function, or the help of one that is an application."""
    module, _, attribute = path.partition(":")
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(path)
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute:
            return _unwrapped(ast.get_docstring(node) or "")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            helps = {keyword.arg: keyword.value for keyword in node.value.keywords}
            if ast.unparse(node.targets[0]) == attribute and "help" in helps:
                return ast.literal_eval(helps["help"])
    raise LookupError(path)


NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)
DISK = (*NOT_ALLOWED, errno.EIO, errno.EFBIG, errno.ESTALE)  # also of files that are open
FIXES = dict.fromkeys(NOT_ALLOWED, "a place where you may read and write, or rights to this one") | {
    errno.EEXIST: "a place where no file has this name: a folder is needed",
    errno.ENOTDIR: "a place whose path leads through folders alone: a part of this one is a file",
    errno.EISDIR: "the name of a file: this is a folder",
    errno.ENAMETOOLONG: "a shorter path: most systems have names of 255 bytes and paths of 4096",
    errno.ENOENT: "look whether it, or the folder above it, is there under this name",
}

FILES = (
    *("demo", "new", "init", "check", "plan", "train", "resume", "status", "timeline", "report", "generate", "chat"),
    *("export", "handover", "combine", "verify", "profile", "tune", "doctor", "simulate"),
)
CONTROLS = ("cancel", "pause", "continue", "finish", "weight", "extend", "add")
COMMANDS = {
    **{name: f"lorafusion_jax.cli.{name}:command" for name in FILES},
    **{name: f"lorafusion_jax.cli.control:{name}_adapter" for name in CONTROLS},
    "data": "lorafusion_jax.cli.data:app",
}
COMMANDS |= import_module("lorafusion_jax.serve.cli").COMMANDS  # by name: its rooms are above this one
COMMANDS = {name: COMMANDS[name] for name in PANELS}
app = typer.Typer(
    cls=group_of(COMMANDS),
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 110},
    help="Trains several LoRA adapters of one base model together. Start with: lorafusion demo",
)
add_names(app, COMMANDS)


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit", is_eager=True)] = False,
) -> None:
    if version:
        print(f"lorafusion-jax {__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with its code."""
    with stop_signals() as signals:
        signals.watch()
        try:
            code = run(arguments)
        except KeyboardInterrupt:  # a second signal
            code = INTERRUPTED
        signals.ending = True
        sys.exit(code)


def run(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        _refuse_empty(sys.argv[1:] if arguments is None else arguments)
        with stop_signals():
            return app(arguments, standalone_mode=False, prog_name="lorafusion") or 0
    except LoraFusionError as problem:
        _print_error(problem)
        return problem.exit_code
    except typer.TyperException as problem:  # unknown command or option, missing argument
        problem.message = problem.message.replace("Value error, ", "")  # pyright: ignore[reportAttributeAccessIssue]
        problem.show()  # pyright: ignore[reportAttributeAccessIssue]
        if fix := _usage_fix(problem):
            errors_to().print(f"  fix: {fix}", style="red", markup=False, highlight=False, soft_wrap=True)
        return problem.exit_code
    except (typer.Abort, KeyboardInterrupt):
        errors_to().print("interrupted", style="yellow")
        return INTERRUPTED
    except BrokenPipeError:  # `lorafusion init | head`
        return 0
    except Exception as problem:
        from scheduling import PlanError  # not before an error: it needs numpy

        if isinstance(problem, PlanError):
            _print_error(problem)
            return 2
        if (fault := plugin_fault(problem)) is not None:
            _print_error(fault)
            return fault.exit_code
        if not isinstance(problem, OSError):
            raise
        _print_error(_system_error(problem))
        return 1


def _usage_fix(problem: Any) -> str:
    """How the command is typed whose arguments are wrong; empty if its error says it."""
    if setting := _as_setting(problem):
        return f"settings of a job file are typed without dashes: {setting}"
    command = None if problem.ctx is None else problem.ctx.command
    match = re.search(r"Example: (lorafusion .+?)(\n\n|$)", getattr(command, "help", None) or "", re.DOTALL)
    if command is None or match is None:
        return ""
    example = " ".join(match[1].split())
    option = (getattr(problem, "option_name", None) or "").lstrip("-").upper()
    arguments = [parameter.metavar for parameter in command.params if parameter.param_type_name == "argument"]
    if option and option in arguments:
        return f"{option} is typed without --{option.lower()}, as in {example}"
    return example if "Missing" in problem.format_message() else ""


def _as_setting(problem: Any) -> str:
    """How a setting is typed that was typed as an option, as `--lr 1e-4`; nothing if it is none."""
    name = (getattr(problem, "option_name", None) or "").lstrip("-").replace("-", "_")
    if (
        not name
        or problem.ctx is None
        or all(parameter.name != "overrides" for parameter in problem.ctx.command.params)
    ):
        return ""
    from lorafusion_jax.config.json_schema import job_schema
    from lorafusion_jax.config.other_programs import advice

    sections = job_schema()["properties"]
    keys = [f"{section}.{name}=…" for section, schema in sections.items() if name in schema.get("properties", {})]
    return " or ".join([f"{name}=…"] * (name in sections) or keys) or advice(name)


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Refuses `--out ""`, as of a shell's variable that is not set: an empty path would be the current folder."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if not (argument.partition("=")[2] if re.match(r"--[\w-]+=", argument) else argument).strip():
            option = argument.rstrip("= ") or (before if before.startswith("-") else "an argument")
            raise ConfigError(
                "command.empty", f"{option} is empty.", fix="give it a value, or leave it out; . is the current folder"
            )


def _print_error(problem: Exception) -> None:
    errors_to().print(str(problem), style="red", highlight=False, markup=False, soft_wrap=True)


def _system_error(problem: OSError) -> RunError:
    """Converts an error of the file system to a message without traceback."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(
            "save.no-space",
            "the disk is full.",
            where=str(problem.filename or ""),
            why=str(problem),
            fix="free some space and repeat the command; continue a run with lorafusion resume",
        )
    if problem.filename is None and problem.errno not in DISK:
        raise problem
    file = written_name(problem.filename) if isinstance(problem.filename, str) else problem.filename or "a file"
    why, fix = problem.strerror or str(problem), FIXES.get(problem.errno or 0, "")
    return RunError("system.file", f"{file} cannot be used.", why=why, fix=fix)
