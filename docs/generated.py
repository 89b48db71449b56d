"""Puts what the code and the benchmarks say into pages, where a page has a line `<!-- generated: NAME -->`."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from campaigns.reliability_table import table  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from pydantic.fields import FieldInfo  # noqa: E402

from lorafusion_jax.config.schema import (  # noqa: E402
    DEFAULTS,
    SHARED,
    SINGLE_DEFAULTS,
    AdapterConfig,
)
from lorafusion_jax.families.refused import REFUSED  # noqa: E402
from lorafusion_jax.families.table import FAMILIES  # noqa: E402
from lorafusion_jax.objective.table import OBJECTIVES  # noqa: E402
from lorafusion_jax.serve.api.app import describe  # noqa: E402

MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)


pages: dict[str, str] = {}  # file of each page → its Markdown, for readers that take no HTML


def on_page_markdown(markdown: str, *, page, **_) -> str:
    """Called by mkdocs for every page."""
    pages[page.file.src_uri] = MARK.sub(lambda match: GENERATED[match[1]](), markdown)
    return pages[page.file.src_uri]


def on_post_build(*, config, **_) -> None:
    """Called by mkdocs at the end: writes the pages as Markdown beside the site, and `llms.txt`, which lists them."""
    site = Path(config["site_dir"])
    for name, markdown in pages.items():
        (site / name).write_text(markdown, encoding="utf-8")
    head = f"# {config['site_name']}\n\n> {config['site_description']}\n\n## Pages\n\n"
    (site / "llms.txt").write_text(head + "".join(map(page_line, pages, pages.values())), encoding="utf-8")


def page_line(name: str, markdown: str) -> str:
    """A line of `llms.txt`: title of a page, link, and the first sentence of its text.

    >>> page_line("data.md", "# Data\\n\\nRows come in *files*. They are read.\\n")
    '- [Data](data.md): Rows come in *files*.\\n'
    """
    title = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    prose = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    paragraph = re.search(r"^(?![#!|<\[:>*-]|\s)[^\n]+(?:\n[^\n#|]+)*", prose, re.MULTILINE)
    sentence = " ".join(re.split(r"(?<=\.)\s", paragraph[0])[0].split()) if paragraph else ""
    return f"- [{title[1] if title else name}]({name})" + (f": {sentence}" if sentence else "") + "\n"


def job_file() -> str:
    """Every key of a job file, a table per section."""
    parts = []
    for title, sections in (("The whole run", SHARED), ("Per adapter", DEFAULTS)):
        parts.append(f"## {title}\n")
        for key, model in sections.items():
            parts += [f"### `{key}`\n", f"{model.__doc__}\n", *_table(model), ""]
    parts += ["### Other keys of an adapter\n", *_head()]
    parts += [_row(key, AdapterConfig.model_fields[key]) for key in ("name", *SINGLE_DEFAULTS)]
    return "\n".join(parts) + "\n"


def objectives() -> str:
    """The settings of every objective, from the docstrings of their options."""
    lines = ["| objective | key | default | meaning |", "|---|---|---|---|"]
    for name, objective in OBJECTIVES.items():
        meanings = _attributes(objective.options)
        for option in dataclasses.fields(objective.options):
            default = option.default[0] if isinstance(option.default, tuple) else option.default
            lines.append(f"| `{name}` | `{option.name}` | `{_shown(default)}` | {meanings.get(option.name, '')} |")
    return "\n".join(lines) + "\n"


def _attributes(options: type) -> dict[str, str]:
    """Returns the meaning of each attribute from the docstrings of a class and its parents."""
    found: dict[str, str] = {}
    for parent in reversed(options.__mro__):
        text = (parent.__doc__ or "").partition("Attributes:\n")[2]
        for name, meaning in re.findall(r"^        (\w+(?:, \w+)*): (.*(?:\n            .*)*)", text, re.MULTILINE):
            found |= dict.fromkeys(name.split(", "), " ".join(meaning.split()).replace("|", "\\|"))
    return found


def models() -> str:
    """Families that are served."""
    lines = ["| family | `model_type` | beyond a Llama's layer |", "|---|---|---|"]
    lines += [
        f"| {family.models} | {', '.join(f'`{name}`' for name in (key, *family.model_types))} | {family.beyond} |"
        for key, family in FAMILIES.items()
    ]
    return "\n".join(lines) + "\n"


def refused_models() -> str:
    """Families that are refused, and why."""
    lines = ["| family | names in `config.json` | why it is refused |", "|---|---|---|"]
    lines += [
        f"| {family.models} | {', '.join(f'`{name}`' for name in family.names)} | {family.reason} |"
        for family in REFUSED
    ]
    return "\n".join(lines) + "\n"


def benchmarks() -> str:
    """The tables of benchmarks/README.md, from its second heading on; links lead to the repository."""
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    body = text[text.index("## Whole training runs") :]
    body = re.sub(r"!\[[^\]]+\]\([^)]+\)\n", "", body)  # plots are in the repository
    return re.sub(r"\[([^\]]+)\]\((?!http)[^)]+\)", r"\1", body)


def rest_api() -> str:
    """Every path of the service, from its OpenAPI description."""
    parts = []
    for path, methods in describe()["paths"].items():
        for method, operation in methods.items():
            parts += [f"## {method.upper()} {path}\n", f"{operation['description']}\n"]
            rows = [_parameter(each) for each in operation.get("parameters", ()) if each["in"] != "header"]
            parts += ["| parameter | in | type |", "|---|---|---|", *rows, ""] if rows else []
            if body := operation.get("requestBody", {}).get("content", {}).get("application/json"):
                parts += [f"Body: `{body['schema'].get('$ref', '').rpartition('/')[2]}`, see `/openapi.json`.\n"]
    return "\n".join(parts) + "\n"


def _parameter(parameter: dict) -> str:
    schema = parameter["schema"]
    kinds = [schema, *schema.get("anyOf", ())]
    names = [str(kind["type"]) for kind in kinds if kind.get("type", "null") != "null"]
    return f"| `{parameter['name']}` | {parameter['in']} | {' or '.join(names)} |"


def _table(model: type[BaseModel]) -> Iterator[str]:
    yield from _head()
    for key, field in model.model_fields.items():
        yield _row(key, field)


def _head() -> list[str]:
    return ["| key | default | meaning |", "|---|---|---|"]


def _row(key: str, field: FieldInfo) -> str:
    values = " · ".join(f"`{value}`" for value in _choices(field.annotation))
    meaning = (field.description or "").replace("|", "\\|")
    default = "required" if field.is_required() else f"`{_shown(field.default)}`"
    return f"| `{key}` | {default} | {meaning}{'<br>' + values if values else ''} |"


def _shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _choices(annotation: object) -> list[object]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for inner in get_args(annotation) if not isinstance(inner, str) for choice in _choices(inner)]


GENERATED: dict[str, Callable[[], str]] = {
    "job-file": job_file,
    "objectives": objectives,
    "benchmarks": benchmarks,
    "models": models,
    "refused-models": refused_models,
    "reliability": table,
    "rest-api": rest_api,
}
