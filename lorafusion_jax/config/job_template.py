"""Generates a job file with every key, its default and its meaning, from the schema."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Annotated, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lorafusion_jax.config.schema import DEFAULTS, SHARED, SINGLE_DEFAULTS, AdapterConfig

COLUMN, WIDTH = 34, 120  # start and end columns of comments
HEAD = """\
# lorafusion job file: every key with its default. Keep only the keys that you change.
# Only base.model, adapters[].name and data.train have no default."""
OWN = "data, lora, optim, objective, batch: {global_samples: 8}, epochs, seed, weight, priority"
EXAMPLES = {"model": "path/to/model", "train": "data/law.jsonl", "name": "law"}  # keys without a default


def reference() -> str:
    """Returns a job file with every key."""
    lines = [HEAD]
    for title, sections in (("The whole run.", SHARED), ("Shared defaults; an adapter may override any.", DEFAULTS)):
        lines += ["", f"# {title}"]
        for key, model in sections.items():
            lines += [f"{key}:  # {model.__doc__}", *_fields(model, required=key == "base")]
    for key in SINGLE_DEFAULTS:
        lines += _line("", key, AdapterConfig.model_fields[key])
    lines += ["", f"# The adapters; each may also have its own {OWN}."]
    lines += ["adapters:", *_line("  - ", "name", AdapterConfig.model_fields["name"])]
    lines += ["    data:", *_line("      ", "train", DEFAULTS["data"].model_fields["train"])]
    return "\n".join(lines) + "\n"


def _fields(model: type[BaseModel], *, required: bool) -> Iterator[str]:
    for key, field in model.model_fields.items():
        if required or not field.is_required():
            yield from _line("  ", key, field)


def _line(indent: str, key: str, field: FieldInfo) -> list[str]:
    """`key: default` with its comment; long comments continue on the next lines."""
    value = EXAMPLES[key] if field.is_required() else field.default
    value_text = yaml.safe_dump(value, default_flow_style=True, width=WIDTH).removesuffix("...\n").strip()
    comment = "; ".join(text for text in (field.description, " | ".join(_options(field.annotation))) if text)
    first, *more = textwrap.wrap(comment, WIDTH - COLUMN - 2) or [""]
    start = f"{indent}{key}: {value_text}"
    return [f"{start:<{COLUMN - 1}} # {first}" if first else start, *(f"{'':{COLUMN}}# {text}" for text in more)]


def _options(annotation) -> list[str]:
    """The values of an enumerated key."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    inner = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return [option for part in inner for option in _options(part)]
