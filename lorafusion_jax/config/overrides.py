"""Overrides on the command line: `optim.lr=1e-4`, `adapters.law.lora.rank=8`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from lorafusion_jax.config.read import Keys, Source, parse_value
from lorafusion_jax.errors import ConfigError


def overridden(source: Source, overrides: Sequence[str], errors: list) -> tuple[Source, dict]:
    """Applies overrides to a copy of the file's values; the source records them."""
    values, typed = with_named_objectives(copy.deepcopy(source.values)), []
    for override in overrides:
        try:
            typed.append((_override(values, override), override))
        except ConfigError as problem:
            errors.append(problem)
    return dataclasses.replace(source, overrides=tuple(typed)), with_named_objectives(values)


def with_named_objectives(values: dict) -> dict:
    """Writes `objective: NAME` as a section, in place."""
    entries = values.get("adapters")
    for section in (values, *(entries if isinstance(entries, list) else ())):
        if isinstance(section, dict) and isinstance(name := section.get("objective"), str):
            section["objective"] = {"name": name}
    return values


def _override(values: dict, override: str) -> Keys:
    """Applies one override; returns its keys, with adapters by number."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError("config.override", f"'{override}' is not key=value.", fix="e.g. train.max_steps=20")
    *path, last = key.split(".")
    table, keys = values, ()
    for name in path:
        key_in_table, inner = _find_named(table, name)
        if not isinstance(inner, dict | list):
            raise ConfigError(
                "config.override", f"'{override}': there is no '{name}' to set something in.", fix=_names_in(table)
            )
        table = inner
        keys += (key_in_table,)
    if not isinstance(table, dict):
        raise ConfigError(
            "config.override",
            f"'{override}' does not name one value.",
            fix="adapters are addressed by name: adapters.law.optim.lr=1e-4; those of a sweep all at once, by the name "
            "in the file",
        )
    if not text.strip():
        raise ConfigError(
            "config.override", f"'{override}' gives no value.", fix=f"{key}=null sets the default of none"
        )
    try:
        table[last] = parse_value(text)
    except ConfigError as problem:
        raise ConfigError("config.override", f"'{override[:60]}': the value cannot be read.", why=problem.why) from None
    return (*keys, last)


def _find_named(table, name: str) -> tuple[str | int, Any]:
    """The value under a name in a table or a list of named tables, and its key."""
    if isinstance(table, dict):
        return name, table.setdefault(name, {})
    matches = ((n, item) for n, item in enumerate(table) if isinstance(item, dict) and item.get("name") == name)
    return next(matches, (name, None))


def _names_in(table) -> str:
    """The names in a list of named tables, for a message."""
    if not isinstance(table, list):
        return ""
    names = [str(item["name"]) for item in table if isinstance(item, dict) and "name" in item]
    return f"one of: {', '.join(names)}; those of a sweep are set all at once" if names else ""


def unreached(source: Source, overrides: Sequence[str]) -> list[str]:
    """Names adapters that a setting of the command line does not reach, because the file gives them their own."""
    source, values = overridden(source, overrides, [])
    return [
        f"{text} does not reach {entry['name']}, which has its own: adapters.{entry['name']}.{text} sets that"
        for keys, text in source.overrides
        for number, entry in enumerate(values["adapters"])
        if not source.typed(("adapters", number, *keys)) and _hides(_lookup(entry, keys), _lookup(values, keys))
    ]


def _lookup(values, keys: Keys) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _hides(written, override) -> bool:
    """Whether an adapter's own value takes precedence over the override; tables are merged key by key."""
    if isinstance(written, dict) and isinstance(override, dict):
        return any(_hides(written[key], override[key]) for key in written.keys() & override.keys())
    return written is not None and written != override
