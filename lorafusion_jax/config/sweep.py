"""Third step of loading a job: lists expand an entry to several adapters.

`lr: [1e-4, 2e-4]` makes chat-lr1e-4 and chat-lr2e-4.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, TypeGuard

from lorafusion_jax.config.explain import SWEPT
from lorafusion_jax.config.merge import Entry
from lorafusion_jax.config.read import Keys, Source
from lorafusion_jax.config.values import as_number
from lorafusion_jax.errors import ConfigError, LoraFusionError
from lorafusion_jax.objective.choose import objective, unknown_objective

MOST_ADAPTERS = 4096  # of one run

LISTS_BY_NATURE = {  # never a sweep
    *(("lora", key) for key in ("targets", "layers_to_transform", "exclude", "trainable_tokens")),
    *(("lora", "trainable_tokens", module) for module in ("embed_tokens", "lm_head")),
    *(("objective", key) for key in ("loss", "loss_weights")),
}


def expand_entries(entries: Sequence[Entry], source: Source, errors: list[LoraFusionError]) -> list[Entry]:
    """Returns an entry for each adapter, with single values; none if there are too many, which is an error."""
    adapters = [
        dataclasses.replace(entry, values=with_objective_defaults(values))
        for entry in entries
        for values in expand_section(entry.values, source, errors)
    ]
    if len(adapters) <= MOST_ADAPTERS:
        return adapters
    errors.append(
        ConfigError(
            "config.too-many-adapters",
            f"the file makes {len(adapters)} adapters; a run has at most {MOST_ADAPTERS}.",
            where=source.where(("adapters",)),
            fix="shorter lists, or several runs",
        )
    )
    return []


def expand_section(values: dict, source: Source, errors: list[LoraFusionError]) -> list[dict]:
    """`expand`, with its error in the list."""
    try:
        return expand(values)
    except ConfigError as problem:
        errors.append(ConfigError(problem.code, problem.what, where=str(source.path), why=problem.why, fix=problem.fix))
        return []


def expand_batch(batch: Any, source: Source, errors: list[LoraFusionError]) -> list[Any]:
    """The shared batch section, once per value of the key that adapters may override."""
    if not isinstance(batch, dict) or not isinstance(batch.get("global_samples"), list):
        return [batch]
    swept = expand_section({"batch": {"global_samples": batch["global_samples"]}}, source, errors)
    return [batch | single["batch"] for single in swept]


def with_objective_defaults(values: dict) -> dict:
    """Fills in what an adapter's objective has other defaults for. Settings of the file take precedence.

    >>> with_objective_defaults({"name": "law", "lora": {"rank": 4}})
    {'name': 'law', 'lora': {'rank': 4}}
    """
    section = values.get("objective")
    name = section.get("name") if isinstance(section, dict) else None
    if not isinstance(name, str) or unknown_objective(name) is not None:
        return values
    try:
        defaults = objective(name).defaults
    except ConfigError:  # a broken package, which validation reports
        return values
    settings = dict(values)
    for setting, value in defaults.items():
        key, _, inner = setting.partition(".")
        if isinstance(section_values := settings.get(key, {}), dict):
            settings[key] = {inner: value, **section_values}
    return settings


def expand(entry: dict) -> list[dict]:
    """Expands one adapter entry to the product of its list values.

    Args:
        entry: an adapter merged with the defaults.

    Returns:
        entries with single values, named after the values of the sweep; the entry itself if it has no lists.

    >>> [e["name"] for e in expand({"name": "law", "optim": {"lr": ["1e-4", "2e-4"]}})]
    ['law-lr1e-4', 'law-lr2e-4']
    """
    swept = list(_lists({key: entry[key] for key in SWEPT if key in entry}, ()))
    if not swept:
        return [entry]
    many = math.prod(len(options) for _, options in swept)
    if many > MOST_ADAPTERS:
        lists = " × ".join(f"{len(options)} of {keys[-1]}" for keys, options in swept)
        raise ConfigError(
            "config.too-many-adapters",
            f"the lists of '{entry.get('name', 'the shared defaults')}' make {many} adapters.",
            why=f"{lists}; a run has at most {MOST_ADAPTERS}",
            fix="shorter lists, or several runs",
        )
    entries = []
    for point in itertools.product(*(zip(options, short_texts(options), strict=True) for _, options in swept)):
        single, suffix = copy.deepcopy(entry), ""
        for (keys, _), (value, text) in zip(swept, point, strict=True):
            _set(single, keys, value)
            suffix += f"-{keys[-1]}{text}"
        # Safe as a folder, as a hub repository, and in `vllm --lora-modules name=path`.
        single["name"] = f"{entry.get('name')}{suffix}"
        entries.append(single)
    return entries


def short_texts(options: list) -> list[str]:
    """The values of a list in the names of its adapters.

    A number has one spelling, however the file or Python writes it. Fractions of a list share a notation: powers of ten
    if one of them is shorter so.

    >>> short_texts([0.001, "1e-3", 0.01, 2.5e-05, 16, 1.0, True, "cosine"])
    ['1e-3', '1e-3', '1e-2', '2.5e-5', '16', '1', 'true', 'cosine']
    >>> short_texts([0, 0.05, 0.1])
    ['0', '0.05', '0.1']
    """
    numbers = [_number(value) for value in options]
    powers = any(len(_with_power(number)) < len(f"{number:f}") for number in numbers if _is_fraction(number))
    return [
        _as_word(value) if number is None else _with_power(number) if powers and _is_fraction(number) else f"{number:f}"
        for value, number in zip(options, numbers, strict=True)
    ]


def _number(value: object) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return Decimal(str(as_number(value))).normalize()
    except (ValueError, ArithmeticError):
        return None


def _is_fraction(number: Decimal | None) -> TypeGuard[Decimal]:
    return number is not None and number.is_finite() and number.adjusted() < 0 and number != 0


def _with_power(number: Decimal) -> str:
    digits = "".join(map(str, number.as_tuple().digits))
    mantissa = digits if len(digits) == 1 else f"{digits[0]}.{digits[1:]}"
    return f"{'-' * number.is_signed()}{mantissa}e{number.adjusted()}"


def _as_word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _lists(value: dict, keys: Keys):
    for key, inner in value.items():
        location = (*keys, key)
        if isinstance(inner, dict):
            yield from _lists(inner, location)
        elif isinstance(inner, list) and inner and location not in LISTS_BY_NATURE:
            yield location, inner


def _set(entry: dict, keys: Keys, value) -> None:
    for key in keys[:-1]:
        entry = entry[key]
    entry[keys[-1]] = value
