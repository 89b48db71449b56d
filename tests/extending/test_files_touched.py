"""The table of docs/pages/extending.md: eight extensions, each in one file outside, and in two of the packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lorafusion_jax", "lorafusion_jax.serve", "pallas_kernels", "scheduling")
TABLES = ("adapters/table.py", "families/table.py", "objective/table.py")
ROW = re.compile(r"\| [^|]+ \| `(test_toy_\w+\.py)`: `([A-Z]+)` \| (`[^|]+`) \|")


def rows() -> list[tuple[str, str, list[str]]]:
    """(file of the toy, its name, files of the packages) of each extension."""
    page = (ROOT / "docs" / "pages" / "extending.md").read_text(encoding="utf-8")
    return [(file, name, re.findall(r"`([^`]+)`", files)) for file, name, files in ROW.findall(page)]


def source(file: Path) -> str | None:
    """The module that a test installs as a package of its own."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SOURCE":
            return ast.literal_eval(node.value)
    return None


def imports(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("file", sorted(Path(__file__).parent.glob("test_*.py")), ids=lambda file: file.stem)
def test_toys_import_what_is_public(file):
    text = source(file)
    if text is not None:
        ours = {module for module in imports(text) if module.split(".")[0] in PACKAGES}
        assert ours == {"lorafusion_jax.extend"}


def test_the_table_has_eight_extensions():
    assert len(rows()) == 8


@pytest.mark.parametrize(("toy", "name", "files"), rows())
def test_an_extension_is_one_file_outside_and_at_most_two_inside(toy, name, files):
    text = source(Path(__file__).parent / toy)
    assert text is not None
    assert re.search(rf"^{name} = ", text, re.MULTILINE)
    assert len(files) <= 2
    assert all((ROOT / "lorafusion_jax" / file).is_file() for file in files)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_alone_imports_what_its_rows_add(table):
    """Siblings may build on one another, as CPO does on DPO."""
    added = {
        "lorafusion_jax." + file.removesuffix(".py").replace("/", ".")
        for _, _, files in rows()
        for file in files
        if table in files and file != table
    }
    folder = ROOT / "lorafusion_jax" / table.split("/")[0]
    texts = {file: file.read_text(encoding="utf-8") for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    naming = {file: text for file, text in texts.items() if any(module in text for module in added)}
    importers = {file for file, text in naming.items() if added & set(imports(text))}
    assert {file.parent for file in importers} <= {folder}
    assert (folder / "table.py" in importers) == bool(added)
