"""Converts pydantic's validation errors to errors with the line, the key and the nearest known key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pydantic import BaseModel

from lorafusion_jax.config.other_programs import advice, value_advice
from lorafusion_jax.config.read import Keys, Source, dotted
from lorafusion_jax.config.schema import ADAPTER_KEYS, DEFAULTS, SHARED, SINGLE_DEFAULTS
from lorafusion_jax.errors import ConfigError, did_you_mean
from lorafusion_jax.families.hf_config import shortened
from lorafusion_jax.objective.choose import UnknownOption

# A list makes an adapter per value. Not of `data`, where a list is an error.
SWEPT = ("lora", "optim", "objective", "batch", "epochs", "seed")
LISTS: dict[Keys, tuple[str, str]] = {  # (expected value, example) of keys that are explained as a whole
    ("mesh", "layers"): ("a list of numbers, each 1 or more, whole or with a half", "[20.5, 11.5]"),
    ("lora", "targets"): ("a text or a list of texts", "[q_proj, v_proj]"),
}
RENAMED: dict[Keys, Keys] = {("train", "keep"): ("train", "remat")}  # old name → new name
EXPECTED = {  # pydantic's error types in the terms of a job file
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of few digits",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "literal_error": "{expected}",
    "string_type": "a text",
    "string_pattern_mismatch": "at most 100 letters, digits and . _ @ + -, the first a letter or digit",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list of numbers",
    "dict_type": "a table",
    "invalid_key": "a text, as every name of a setting",
    "model_type": "a table of settings",
}

_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def new_name(setting: str) -> str:
    """The current name of a setting.

    >>> new_name("train.keep"), new_name("mesh.fsdp")
    ('train.remat', 'mesh.fsdp')
    """
    return {dotted(earlier): dotted(later) for earlier, later in RENAMED.items()}.get(setting, setting)


def unknown_key(source: Source, keys: Keys, known_keys: Iterable[str]) -> ConfigError:
    """Builds the error for an unknown key, with its new name or the nearest known key."""
    if keys in RENAMED:
        name = dotted(RENAMED[keys])
        return ConfigError(
            "config.renamed-key", f"'{dotted(keys)}' is now '{name}'.", where=source.where(keys), fix=f"write {name}"
        )
    known_keys = sorted(known_keys)
    return ConfigError(
        "config.unknown-key",
        f"unknown key '{dotted(keys)}'.",
        where=source.where(keys),
        fix=advice(str(keys[-1]))
        or right_place(keys, source.value(keys))
        or did_you_mean(str(keys[-1]), known_keys, cutoff=0.5)
        or f"known keys: {', '.join(known_keys)}",
    )


def explain(source: Source, section: Keys, model: type[BaseModel], detail) -> ConfigError:
    """Builds the error for one pydantic error below `section`."""
    location: Keys = detail["loc"]
    of_adapter = location[:1] == ("global_samples",) and section != ("batch",)
    keys = (*section, *(("batch", "global_samples") if of_adapter else location))
    if detail["type"] == "extra_forbidden":
        return unknown_key(source, keys, _fields(model, location[:-1]))
    if detail["type"] == "missing":
        return ConfigError(
            "config.required",
            f"'{dotted(keys)}' is required.",
            where=source.where(keys),
            fix=_example(str(location[-1])),
        )
    expected, example = _expectation(detail), _without_quotes(detail)
    for n in range(len(keys) - 1):
        if keys[n : n + 2] in LISTS:
            (of_list, example), section_keys = LISTS[keys[n : n + 2]], keys[: n + 2]
            expected = expected if keys == section_keys and detail["type"] == "value_error" else of_list
            keys = section_keys
            break
    typed = source.typed(keys)
    problem = detail.get("ctx", {}).get("error")
    hint = advice(problem.key) if isinstance(problem, UnknownOption) else ""
    example = example or _as_list(keys, detail["input"])
    hint = hint or value_advice(".".join(str(key) for key in keys[-2:]), detail["input"])
    return ConfigError(
        "config.override" if typed else "config.value",
        f"'{dotted(keys)}' must be {expected}.",
        where=source.where(keys),
        fix=hint or (f"e.g. {_as_typed(keys, typed)}{'=' if typed else ': '}{example}" if example else ""),
    )


def _expectation(detail) -> str:
    value = detail["input"]
    value = "null" if value is None else shortened(str(value).lower() if isinstance(value, bool) else value)
    pattern = EXPECTED.get(detail["type"])
    if detail["type"] == "value_error":  # from a validator of the schema
        return str(detail["ctx"]["error"])
    bounds = {name: _whole(bound) for name, bound in detail.get("ctx", {}).items()}
    return f"{pattern.format(**bounds)}, not {value}" if pattern else detail["msg"]


def _as_typed(keys: Keys, typed: str) -> str:
    """A key as the command line had it, which names an adapter and has no numbers."""
    text = typed.partition("=")[0]
    return text if text.rpartition(".")[2] == keys[-1] else dotted(keys)


def _whole(bound: object) -> object:
    """A whole bound without a point, as it is written; pydantic 2.10 gives those of floats as floats."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _without_quotes(detail) -> str:
    """The number that a text stands for where a number is meant; empty if there is none."""
    text = detail["input"]
    if detail["type"] != "value_error" or not isinstance(text, str):
        return ""
    return text.strip() if _NUMBER.fullmatch(text.strip()) else ""


def _as_list(keys: Keys, value: object) -> str:
    """The list that several numbers stand for, in a section of which a list makes an adapter per value; else empty."""
    numbers = value.replace(",", " ").split() if isinstance(value, str) else []
    are_numbers = all(re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", number, re.IGNORECASE) for number in numbers)
    is_swept = keys[-1] == "global_samples" or any(key in SWEPT and key != "batch" for key in keys[-2:])
    return f"[{','.join(numbers)}]" if len(numbers) > 1 and are_numbers and is_swept else ""


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


def right_place(keys: Keys, value: object = None) -> str:
    """Says where a misplaced key belongs; empty if no section has it.

    >>> right_place(("eval", "every_steps"))
    'write train.eval_every_steps'
    >>> right_place(("train", "epochs"))
    'epochs is a key of an adapter, or of the whole file: it stands in no section'
    >>> right_place(("adapters", 0, "train"), {"max_steps": 9})
    'train holds for the whole run: write it beside adapters, not in one'

    Args:
        keys: the key and the sections above it.
        value: what the file has there.
    """
    *above, key = map(str, keys)
    if keys[0] == "adapters" and len(keys) == 3 and key in SHARED and isinstance(value, Mapping):
        return f"{key} holds for the whole run: write it beside adapters, not in one"
    if len(above) and (key in SINGLE_DEFAULTS or (key in ADAPTER_KEYS and len(keys) == 2)):
        whole_file = ", or of the whole file" if key != "name" else ""
        return f"{key} is a key of an adapter{whole_file}: it stands in no section"
    sections = [section for section in (*DEFAULTS, *SHARED) if section != (above[-1] if above else "")]
    fields = {section: (DEFAULTS | SHARED)[section].model_fields for section in sections}
    names = (f"{above[-1]}_{key}", key) if above else (key,)  # eval.every_steps is eval_every_steps
    field_name = next((name for name in names if any(name in fields[section] for section in sections)), "")
    dotted_names = [f"{section}.{field_name}" for section in sections if field_name in fields[section]]
    whole_run = (
        keys[0] == "adapters"
        and dotted_names
        and all(dotted_name.split(".")[0] in SHARED for dotted_name in dotted_names)
    )
    return f"write {' or '.join(dotted_names)}{', for the whole run' if whole_run else ''}" if dotted_names else ""
