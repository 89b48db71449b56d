"""Text that is on every machine with Python: sources, docstrings and the language reference of the standard library.

Sources are read with `ast`, never imported, so that nothing depends on the platform.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
TESTS = {"test", "tests", "idle_test"}
# tables, copies of other projects, and code written for another language version
LEFT_OUT = {
    "site-packages",
    "encodings",
    "lib2to3",
    "idlelib",
    "ensurepip",
    "_vendor",
    "pydoc_data",
    "turtledemo",
    "__pycache__",
    "config",
}
CODE_LINE = re.compile(r"^\s*(>>>|\.\.\.|::|def |class |import |from |\|)|::=|={4}|-{4}|\*{4}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A documented function, method or class.

    Attributes:
        call: how it is called, `join(a, *p)`.
        source: its text without the docstring.
        summary: first paragraph of the docstring on one line.
        doc: whole docstring.
    """

    module: str
    name: str
    kind: str
    call: str
    source: str
    summary: str
    doc: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


def share(name: str) -> float:
    """Draws a number in [0, 1) from a name; always the same."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def source_files(*, tests: bool = False) -> list[Path]:
    """Lists the library's Python files, sorted; its tests on demand."""
    files = []
    for path in sorted(LIBRARY.rglob("*.py")):
        parts = set(path.relative_to(LIBRARY).parts[:-1])
        if not any(part in LEFT_OUT or part.startswith("config-") for part in parts) and (tests or not parts & TESTS):
            files.append(path)
    return files


def read_text(path: Path) -> str | None:
    """Reads a source; None for the few that are broken on purpose."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def library_items() -> list[Item]:
    """Collects every public, documented function, method and class, sorted by path, one for each docstring."""
    found: dict[str, Item] = {}
    for path in source_files():
        module = ".".join(path.relative_to(LIBRARY).with_suffix("").parts).removesuffix(".__init__")
        text = read_text(path)
        if text is None or any(part.startswith("_") for part in module.split(".")):
            continue
        for item in _items(ast.parse(text), text, module, ()):
            found.setdefault(item.summary, item)  # os.path has each function twice: posixpath and ntpath
    return sorted(found.values(), key=lambda item: item.path)


def _items(tree: ast.AST, text: str, module: str, outer: tuple[str, ...]) -> Iterator[Item]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = (*outer, node.name)
        doc = ast.get_docstring(node)
        summary = _summary(doc or "")
        if doc and summary:
            kind = "class" if isinstance(node, ast.ClassDef) else "method" if outer else "function"
            yield Item(
                module=module,
                name=".".join(name),
                kind=kind,
                call=_call(node),
                source=_source(node, text),
                summary=summary,
                doc=inspect.cleandoc(doc),
            )
        if isinstance(node, ast.ClassDef):
            yield from _items(node, text, module, name)


def _summary(doc: str) -> str:
    first = " ".join(doc.strip().split("\n\n")[0].split())
    plain = 20 <= len(first) <= 400 and first[0].isupper() and first[-1] in ".!" and not CODE_LINE.search(first)
    return first if plain and " " in first and "->" not in first and ">>>" not in first else ""


def _call(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.ClassDef):
        made = [child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"]
        arguments = ast.unparse(made[0].args) if made else ""
    else:
        arguments = ast.unparse(node.args)
    arguments = re.sub(r"^(self|cls)(, |$)(/, )?", "", arguments)
    return f"{node.name}({arguments})"


def _source(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, text: str) -> str:
    lines = text.splitlines()
    doc = node.body[0]
    kept = lines[node.lineno - 1 : doc.lineno - 1] + lines[doc.end_lineno : node.end_lineno]
    kept = [line.rstrip() for line in kept]
    return re.sub(r"\n{3,}", "\n\n", textwrap.dedent("\n".join(kept)).strip("\n"))


def reference_paragraphs() -> list[tuple[str, str]]:
    """Collects the prose paragraphs of the language reference as (heading, paragraph)."""
    found: dict[str, str] = {}
    for _, text in sorted(topics.items()):
        heading = text.strip().splitlines()[0]
        for block in text.split("\n\n"):
            lines = block.strip("\n").splitlines()
            if len(lines) > 1 and set(lines[1]) <= set("*=-~^") and len(set(lines[1])) == 1:
                heading = lines[0]
                continue
            paragraph = " ".join(re.sub(r"(?<=\w)-\n\s*(?=[a-z])", "-", block).split())  # left-|hand side
            prose = not any(CODE_LINE.search(line) for line in lines) and not paragraph.startswith(("*", "-", "[", "+"))
            if prose and paragraph[:1].isupper() and paragraph[-1:] == "." and len(paragraph) >= 120:
                found.setdefault(paragraph, heading.strip())
    return [(heading, paragraph) for paragraph, heading in found.items()]


def library_documents(*, tests: bool = False) -> dict[str, str]:
    """Collects whole sources and reference topics by name, in an order shuffled by a fixed draw."""
    documents = {path.relative_to(LIBRARY).as_posix(): read_text(path) for path in source_files(tests=tests)}
    documents |= {f"topics/{name}": text for name, text in topics.items()}
    # longer than this are tables and test data, not text
    kept = [name for name, text in documents.items() if text and 200 < len(text) < 200_000]
    return {name: documents[name] for name in sorted(kept, key=share)}
