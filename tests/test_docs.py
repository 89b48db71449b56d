"""Snippets in the README and the docs run, and the files, links and commands in them exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from acceptance import CHECKS
from small_jobs import write_rows

from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.read import read_source
from lorafusion_jax.data.formats import FORMATS, detect_layout
from lorafusion_jax.data.rows import Rows
from lorafusion_jax.modules import adapter_arrays

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").glob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NAMES = [path.name for path in PAGES]


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for _, language, text in BLOCK.findall(page.read_text(encoding="utf-8")) if language in languages]


NAMES_OF_JOBS = {
    "rollouts.md": ["maths", "chat"],
    "objectives.md": ["chat", "helpful", "polite", "maths"],
    "data.md": ["law"],
    "sweeps.md": [f"law-rank{rank}-lr{lr}" for rank in (8, 32) for lr in ("1e-4", "3e-4", "1e-3")],
    "kinds.md": ["chat", "law", "small", "wide"],
}


# The runs of these pages on a base and in microbatches whose programs tests of commands need as well.
QUICKER = {
    "python.md": {
        'examples_directory() / "base"': "TINY_BASE",
        'examples_directory() / "data"': "ROWS",
        '"max_length": 256': '"max_length": 64',
        '"capacity_tokens": 512, "tile_tokens": 32': '"capacity_tokens": 64, "tile_tokens": 16',
    },
    "training-api.md": {
        'examples_directory() / "base"': "TINY_BASE",
        '"capacity_tokens": 512, "tile_tokens": 32': '"capacity_tokens": 64, "tile_tokens": 16',
    },
}


WITH_PYTHON = [path for path in PAGES if blocks(path, "python")]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda path: path.name)
def test_python_of_pages_imports_what_exists(page):
    """Also of pages that run nightly."""
    for number, text in enumerate(blocks(page, "python")):
        imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), f"{page.name}, python block {number}", "exec"), {})


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda path: path.name)
def test_python_runs(page, tmp_path, monkeypatch, tiny_base):
    """Blocks of a page share one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": __name__, "TINY_BASE": tiny_base, "ROWS": tmp_path}  # dataclasses look up a module that exists
    for name in ("ask", "cards"):
        write_rows(tmp_path, name, 8, longest=8)
    texts = blocks(page, "python")
    for shown, instead in QUICKER.get(page.name, {}).items():
        assert sum(text.count(shown) for text in texts) == 1
        texts = [text.replace(shown, instead) for text in texts]
    for number, text in enumerate(texts):
        exec(compile(text, f"{page.name}, python block {number}", "exec"), names)


@pytest.mark.parametrize("page", [path for path in PAGES if blocks(path, "yaml")], ids=lambda path: path.name)
def test_job_files_are_valid(page, tmp_path):
    for text in blocks(page, "yaml"):
        assert len(text.splitlines()) <= 12
        assert yaml.safe_load(text)
        (tmp_path / "jobs.yaml").write_text(text)
        config = parse_config(read_source(tmp_path / "jobs.yaml"))
        wanted = NAMES_OF_JOBS.get(page.name, ["law", "chat-lr1e-4", "chat-lr2e-4"])
        assert [adapter.name for adapter in config.adapters] == wanted


@pytest.mark.parametrize("page", [path for path in PAGES if blocks(path, "yml")], ids=lambda path: path.name)
def test_parts_of_job_files_are_valid(page, tmp_path):
    """What is shown of a job file is valid in one that has the rest."""
    for text in blocks(page, "yml"):
        rest = {"base": {"model": "org/base"}, "adapters": [{"name": "law", "data": {"train": "law.jsonl"}}]}
        (tmp_path / "jobs.yaml").write_text(yaml.safe_dump(rest | yaml.safe_load(text)))
        assert parse_config(read_source(tmp_path / "jobs.yaml")).adapters


def shown_commands() -> Iterator[tuple[str, str]]:
    """(page, command) of every `lorafusion …` in a block or in a table."""
    for page in PAGES:
        lines = [line for text in blocks(page, "", "console") for line in text.splitlines()]
        lines += re.findall(r"`(lorafusion [^`]+)`", page.read_text(encoding="utf-8"))
        for line in lines:
            command = re.search(r"\blorafusion (?!jax)[a-z].*", line.partition("   #")[0])
            if command:
                yield page.name, command[0]


@pytest.mark.parametrize(("page", "line"), sorted(set(shown_commands())))
def test_commands_and_their_options_exist(page, line):
    from lorafusion_jax.cli.main import COMMANDS, imported

    words = shlex.split(line)[1:]
    assert words[0] in COMMANDS, f"{page}: there is no command in '{line}'"
    command = imported(words[0], COMMANDS[words.pop(0)])
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands"), f"{page}: there is no command in '{line}'"
    known = {option for parameter in command.params for option in parameter.opts}
    assert [word for word in words if word.startswith("-") and word not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_nothing_is_installed_from_a_registry_and_extras_exist(page):
    """The package is in none; a folder, a file or a repository is behind a path or an @."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    text = page.read_text(encoding="utf-8")
    for line in re.findall(r"pip install (?:-e )?[\"']?((?:lorafusion-jax|\.)[^\n`]*)", text):
        assert line.startswith(".") or " @ " in line, f"{page.name}: {line}"
        names = re.match(r"[\w.-]+\[([\w,]+)\]", line)
        assert set(names[1].split(",") if names else ()) <= set(extras), f"{page.name}: {line}"


def test_rows_of_the_data_page_have_the_formats_of_its_table():
    (block,) = blocks(ROOT / "docs" / "pages" / "data.md", "json")
    formats = [detect_layout(Rows(source="page", values=[json.loads(line)])).format for line in block.splitlines()]
    assert formats == list(FORMATS)


def test_llms_txt_has_a_line_for_each_page(tmp_path, monkeypatch):
    """The hooks of the site, as mkdocs calls them."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # the hooks add the repository
    spec = importlib.util.spec_from_file_location("generated", ROOT / "docs" / "generated.py")
    assert spec is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    for page in PAGES[1:]:
        if page.name not in ("api.md", "rest-api.md", "reliability.md", "benchmarks.md"):  # slow to generate
            hooks.on_page_markdown(
                page.read_text(encoding="utf-8"), page=SimpleNamespace(file=SimpleNamespace(src_uri=page.name))
            )
    hooks.on_post_build(config={"site_dir": tmp_path, "site_name": "name", "site_description": "what it is"})
    lines = (tmp_path / "llms.txt").read_text(encoding="utf-8").splitlines()
    assert lines[:3] == ["# name", "", "> what it is"]
    listed = re.findall(r"^- \[(.+)\]\((.+)\): .+[.:)]$", "\n".join(lines), re.MULTILINE)
    assert ("Data", "data.md") in listed
    assert len(listed) == len(hooks.pages) == len(list(tmp_path.glob("*.md")))
    assert "generated:" not in (tmp_path / "job-file.md").read_text(encoding="utf-8")


def callable_or_class(thing) -> bool:
    return inspect.isclass(thing) or inspect.isroutine(thing)


@pytest.mark.parametrize(
    "package", ["lorafusion_jax", "lorafusion_jax.modules", "lorafusion_jax.extend", "pallas_kernels"]
)
def test_the_api_page_has_every_public_name(package):
    page = (ROOT / "docs" / "pages" / "api.md").read_text(encoding="utf-8")
    paths = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    objects = {path.rpartition(".")[2]: path for path in paths}
    assert len(objects) == len(paths), "two objects of one name"
    module = importlib.import_module(package)
    names = getattr(module, "__all__", None) or [name for name in vars(module) if name[0].isupper()]
    assert len(names) >= 8
    things = {name: getattr(module, name) for name in names}
    constants = {name for name, thing in things.items() if f"`{name}`" in page and not callable_or_class(thing)}
    assert sorted(set(names) - set(objects) - constants) == []
    for name in set(names) - constants:
        home, _, _ = objects[name].rpartition(".")
        assert getattr(importlib.import_module(home), name) is getattr(module, name)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_are_valid(page):
    text = page.read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_named_files_exist(page):
    names = re.findall(
        r"`((?:benchmarks|tests|notebooks|examples|lorafusion_jax|pallas_kernels|scheduling)/[\w./-]+)`",
        page.read_text(encoding="utf-8"),
    )
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_walk_through_one_step_names_files_that_exist():
    text = (ROOT / "docs" / "pages" / "one-step.md").read_text(encoding="utf-8")
    files = re.findall(r"`([\w/]+\.py)`", text)
    assert len(files) > 15
    assert [file for file in files if not (ROOT / "lorafusion_jax" / file).is_file()] == []


def test_every_promise_has_tests_that_exist():
    functions = {}
    assert list(CHECKS) == ["A1", "A2", "A3", "A4", "B1", "C1", "C2", "C3", "D1", "D2", "D3", "E1", "E2", "E3", "E4"]
    for _, nodes in CHECKS.values():
        for file, _, name in (node.partition("::") for node in nodes):
            if file not in functions:
                tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
                functions[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in functions[file], f"{file} has no {name}"


def test_the_readme_is_short():
    assert (ROOT / "README.md").stat().st_size <= 9_000


def test_the_first_script_trains_an_adapter_as_alone():
    (script,) = (block for block in blocks(ROOT / "README.md", "python") if "use_adapters" in block)
    script = re.sub(r"adamw\(.e-3\)", "sgd(0.5)", script)  # Adam would hide a gradient of another scale
    alone = script
    for text, without in (
        ("specs = [law, med]", "specs = [law]"),
        (', "med": optax.sgd(0.5)', ""),
        ("(0), (4, 16, 64))", "(0), (4, 16, 64))[jnp.array([0, 3])]"),
        ("jnp.array([0, 1, 1, 0])", "jnp.array([0, 0])"),
    ):
        assert text in alone
        alone = alone.replace(text, without)

    def trained(code):
        names = {}
        exec(code, names)
        for _ in range(2):
            names["step"](names["model"], names["optimizer"], x := names["x"], x + 1, names["table"])
        return adapter_arrays(names["model"], "law")

    together, separate = trained(script), trained(alone)
    for path, array in separate.items():
        np.testing.assert_allclose(together[path], array, rtol=1e-6, atol=1e-7)
    assert abs(separate["up.lora_b"]).max() > 1e-2
