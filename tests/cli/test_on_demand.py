"""The list of commands, which imports none of them."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from lorafusion_jax.cli.main import COMMANDS, PANELS, documentation, imported, run

NAME = r"[A-Z]+(?:[=:\[]+[A-Z]+\]?)*"  # RUN, KEY=VALUE, HOST:PORT, ADAPTER[=WEIGHT]
ROW = re.compile(r"  (-.*?)(?:  .*)?$")  # of an option, up to its text
ONE_NAME = {
    **{"run": "RUN", "runs": "RUN", "jobs": "JOBS", "adapter": "ADAPTER", "drop": "ADAPTER"},
    **{"job": "JOB", "url": "URL", "overrides": "KEY=VALUE"},
}
DEAR = (
    "lorafusion_jax.config.schema",
    "numpy",
    "jinja2",
    "tokenizers",
    "scheduling",
    "jax",
    "fastapi",
    "pydantic",
    "rich",
    "lorafusion_jax.cli.train",
)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["pasue"]])
def test_what_runs_no_command_imports_none(arguments):
    code = f"""
import sys
from lorafusion_jax.cli.main import run
run({arguments!r})
print([name for name in {DEAR!r} if name in sys.modules])
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "[]"


def test_help_of_every_command_imports_nothing_dear():
    code = f"""
import sys
from lorafusion_jax.cli.main import COMMANDS, run
assert not any(run([name, "--help"]) for name in COMMANDS)
print([name for name in {DEAR!r} if name in sys.modules and name != "lorafusion_jax.cli.train"])
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "[]"


def test_options_stand_in_their_sections(capsys):
    assert run(["train", "--help"]) == 0
    help_of_train = capsys.readouterr().out
    assert (
        help_of_train.index("Options:")
        < help_of_train.index("Several processes:")
        < help_of_train.index("--process-id")
    )
    assert run(["--help"]) == 0
    titles = [line[:-1] for line in capsys.readouterr().out.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles == ["Options", *dict.fromkeys(PANELS.values())]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_shows_the_text_of_the_command_itself(name, capsys):
    command = imported(name, COMMANDS[name])
    assert documentation(COMMANDS[name]) == inspect.cleandoc(command.help)
    assert run(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert " ".join(command.help.split("\n\n")[0].split()) in shown


def test_a_group_shows_its_commands(capsys):
    assert run(["data", "--help"]) == 0
    assert "Shows tokens coloured by loss mask." in capsys.readouterr().out


def test_a_wrong_name_is_answered_with_the_right_one(capsys):
    assert run(["pasue"]) == 2
    assert "Did you mean 'pause'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--lr", "optim.lr=…"),
        ("--max-steps=4", "train.max_steps=…"),
        ("--learning-rate", "optim.lr"),
        ("--epochs", "epochs=…"),
    ],
)
def test_an_option_that_is_a_setting_says_how_it_is_typed(option, said, capsys):
    assert run(["train", "jobs.yaml", option]) == 2
    assert said in capsys.readouterr().err
    assert run(["train", "jobs.yaml", "--colour"]) == 2
    assert "fix:" not in capsys.readouterr().err


def command_lines() -> list[list[str]]:
    """Every command, and every command of a group."""
    groups = {name: getattr(imported(name, path), "commands", {}) for name, path in COMMANDS.items()}
    return [[name, *inner] for name, commands in groups.items() for inner in [[], *([part] for part in commands)]]


@pytest.mark.parametrize("line", command_lines(), ids=" ".join)
def test_names_of_arguments_and_values_follow_one_rule(line, capsys):
    assert run([*line, "--help"]) == 0
    usage, _, options = capsys.readouterr().out.partition("\n")
    for piece in usage.removeprefix(f"Usage: lorafusion {' '.join(line)} ").split():
        assert re.fullmatch(rf"{NAME}(\.\.\.)?|\[{NAME}\](\.\.\.)?", piece), usage
    rows = [words[1] for words in map(ROW.match, options.partition("\nOptions:\n")[2].splitlines()) if words]
    assert rows
    for row in rows:
        *_, last = row.split(", ")
        _, _, value = last.partition(" ")
        assert re.fullmatch(rf"({NAME})?|(\w[\w-]*\|)+[\w-]+|/ --[\w-]+", value), row


def parameters_of_commands() -> Iterator[tuple[list[str], Any]]:
    for line in command_lines():
        command = imported(line[0], COMMANDS[line[0]])
        for parameter in (command if len(line) == 1 else command.commands[line[1]]).params:
            yield line, parameter


def test_a_default_stands_where_every_default_stands(capsys):
    """In brackets behind the text, also where it is no value: `show_default="the newest"`."""
    for line, parameter in parameters_of_commands():
        assert "default" not in (getattr(parameter, "help", None) or ""), (line, parameter.name)
    assert run(["generate", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "[default: the newest]" in shown
    assert "[default: 128]" in shown


def test_what_is_one_thing_has_one_name():
    for line, parameter in parameters_of_commands():
        assert parameter.metavar == ONE_NAME.get(parameter.opts[0].lstrip("-"), parameter.metavar), line
        assert parameter.param_type_name == "option" or parameter.metavar, line


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["report"], "Missing argument 'RUN'"),
        (["generate"], "Missing argument 'SOURCE'"),
        (["combine", "--to", "x"], "Missing argument 'ADAPTER[=WEIGHT]'"),
        (["handover", "runs/exp1"], "Missing argument 'ADAPTER'"),
        (["new", "--goal", "answer"], "'--goal': 'answer' is not one of 'answers'"),
    ],
)
def test_usage_errors_use_the_names_of_the_help(line, said, capsys):
    assert run(line) == 2
    told = capsys.readouterr().err
    assert said in told
    assert not set("{<") & set(told.splitlines()[0])


def test_every_command_is_in_a_panel():
    assert set(PANELS) >= set(COMMANDS)
