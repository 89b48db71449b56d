"""A JSON schema of job files as users write them, for editors that complete and check keys while one types."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from lorafusion_jax.config.auto import AUTO
from lorafusion_jax.config.schema import DEFAULTS, SHARED, SINGLE_DEFAULTS, AdapterConfig
from lorafusion_jax.config.sweep import LISTS_BY_NATURE, SWEPT

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
