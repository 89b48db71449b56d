"""Turns pydantic's findings into errors that name the line, the key and the nearest known key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import BaseModel

from lorafusion_jax.config.read import Keys, Source, dotted
from lorafusion_jax.errors import ConfigError


def unknown_key(source: Source, keys: Keys, known: Iterable[str]) -> ConfigError:
    """Builds the error for a key that does not exist, with the nearest one that does."""
    known = sorted(known)
    near = difflib.get_close_matches(str(keys[-1]), known, n=1, cutoff=0.5)
    return ConfigError(
        "config.unknown-key",
        f"unknown key '{dotted(keys)}'.",
        where=source.where(keys),
        fix=f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}",
    )


def explain(source: Source, section: Keys, model: type[BaseModel], detail) -> ConfigError:
    """Builds the error for one finding of pydantic below `section`."""
    location: Keys = tuple(key for key in detail["loc"] if key not in ("str", "list[str]"))  # branches of a union
    keys = (*section, *(("batch", "global_samples") if location[:1] == ("global_samples",) else location))
    if detail["type"] == "extra_forbidden":
        return unknown_key(source, keys, _fields(model, location[:-1]))
    if detail["type"] == "missing":
        return ConfigError(
            "config.required",
            f"'{dotted(keys)}' is required.",
            where=source.where(keys),
            fix=_example(str(location[-1])),
        )
    message = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return ConfigError(
        "config.value", f"'{dotted(keys)}' {message}, not {detail['input']!r}.", where=source.where(keys)
    )


def _fields(model: type[BaseModel], location: Keys) -> list[str]:
    for key in location:
        inner = model.model_fields.get(str(key))
        if inner is None or not (isinstance(inner.annotation, type) and issubclass(inner.annotation, BaseModel)):
            return []
        model = inner.annotation
    return list(model.model_fields)


def _example(field: str) -> str:
    return {
        "model": "base: {model: path/to/hf-directory}",
        "name": "{name: law, ...}",
        "train": "data: {train: data/law.jsonl}",
        "data": "data: {train: data/law.jsonl}",
    }.get(field, "")
