"""A JSON schema of job files as users write them, for editors that complete and check keys while one types,
and a job file with every key, its default and its meaning.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lorafusion_jax.config.auto import AUTO
from lorafusion_jax.config.schema import DEFAULTS, SHARED, SINGLE_DEFAULTS, AdapterConfig
from lorafusion_jax.config.sweep import LISTS_BY_NATURE, SWEPT

COLUMN, WIDTH = 34, 120  # start and end columns of comments
HEAD = """\
# lorafusion job file: every key with its default. Keep only the keys that you change.
# Only base.model, adapters[].name and data.train have no default."""
OWN = "data, lora, optim, objective, batch: {global_samples: 8}, epochs, seed, weight, priority"
EXAMPLES = {"model": "path/to/model", "train": "data/law.jsonl", "name": "law"}  # keys without a default
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """Returns the schema. Numbers of adapters may be lists, which sweep; commands check the rest.

    >>> schema = job_schema()
    >>> schema["required"], "rank" in schema["properties"]["lora"]["properties"]
    (['base', 'adapters'], True)
    """
    definitions: dict[str, Any] = {}
    shared = {key: _section(key, model, definitions) for key, model in SHARED.items()}
    shared["batch"]["properties"]["global_samples"] = _swept(shared["batch"]["properties"]["global_samples"])
    batch_keys = shared["batch"]["properties"]
    batch_keys["capacity_tokens"] = _or_auto(batch_keys["capacity_tokens"])
    shared["mesh"] = _or_auto(shared["mesh"])
    defaults = {key: _section(key, model, definitions, partial=True) for key, model in DEFAULTS.items()}
    defaults["objective"] = {"anyOf": [{"type": "string"}, defaults["objective"]]}
    adapter_schema = AdapterConfig.model_json_schema()["properties"]
    singles = {key: _swept(adapter_schema[key]) if key in SWEPT else adapter_schema[key] for key in SINGLE_DEFAULTS}
    batch = {
        "type": "object",
        "properties": {"global_samples": shared["batch"]["properties"]["global_samples"]},
        "additionalProperties": False,
    }
    adapter = {
        "type": "object",
        "properties": {"name": adapter_schema["name"]} | defaults | {"batch": batch} | singles,
        "required": ["name"],
        "additionalProperties": False,
    }
    entries = {"type": "array", "items": adapter, "minItems": 1}
    return {
        "$schema": DIALECT,
        "title": "lorafusion job file",
        "type": "object",
        "properties": shared | defaults | singles | {"adapters": {"anyOf": [entries, _of_files(adapter)]}},
        "required": ["base", "adapters"],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _section(key: str, model: type[BaseModel], definitions: dict[str, Any], *, partial: bool = False) -> dict[str, Any]:
    """A section; a partial one may lack keys that another place of the file has, and lists in it may sweep."""
    schema = model.model_json_schema()
    definitions |= schema.pop("$defs", {})
    if partial:
        schema.pop("required", None)
        if key in SWEPT:
            schema["properties"] = {
                name: value if (key, name) in LISTS_BY_NATURE else _swept(value)
                for name, value in schema["properties"].items()
            }
    return schema


def _or_auto(value: dict[str, Any]) -> dict[str, Any]:
    notes = {name: value[name] for name in ("description", "default", "title") if name in value}
    return notes | {"anyOf": [{name: inner for name, inner in value.items() if name not in notes}, {"const": AUTO}]}


def _swept(value: dict[str, Any]) -> dict[str, Any]:
    """A value or a list of values."""
    notes = {name: value[name] for name in ("description", "default", "title") if name in value}
    single = {name: inner for name, inner in value.items() if name not in notes}
    return notes | {"anyOf": [single, {"type": "array", "items": single, "minItems": 1}]}


def _of_files(adapter: dict[str, Any]) -> dict[str, Any]:
    """An adapter for each file: `from` beside the keys of every one."""
    pattern = {"type": "string", "minLength": 1}
    patterns = {"anyOf": [pattern, {"type": "array", "items": pattern, "minItems": 1}]}
    return adapter | {
        "properties": {"from": patterns, "split_by": pattern} | adapter["properties"],
        "required": ["from"],
    }


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
