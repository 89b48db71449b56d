"""Sweeps: list values expand an entry to several adapters. `lr: [1e-4, 2e-4]` → chat-lr1e-4, chat-lr2e-4."""

from __future__ import annotations

import copy
import itertools
import math

from lorafusion_jax.config.read import Keys
from lorafusion_jax.errors import ConfigError

MOST_ADAPTERS = 4096  # of one run

SWEPT = ("lora", "optim", "objective", "batch", "epochs", "seed")  # not `data`, where a list is an error
LISTS_BY_NATURE = {("lora", "targets"), ("objective", "loss"), ("objective", "loss_weights")}  # never a sweep


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
    result = []
    for values in itertools.product(*(options for _, options in swept)):
        single = copy.deepcopy(entry)
        for (keys, _), value in zip(swept, values, strict=True):
            _set(single, keys, value)
        # Safe as a folder, as a hub repository, and in `vllm --lora-modules name=path`.
        suffix = "".join(f"-{keys[-1]}{value}" for (keys, _), value in zip(swept, values, strict=True))
        single["name"] = f"{entry.get('name')}{suffix}"
        result.append(single)
    return result


def _lists(value: dict, keys: Keys):
    for key, inner in value.items():
        here = (*keys, key)
        if isinstance(inner, dict):
            yield from _lists(inner, here)
        elif isinstance(inner, list) and inner and here not in LISTS_BY_NATURE:
            yield here, inner


def _set(entry: dict, keys: Keys, value) -> None:
    for key in keys[:-1]:
        entry = entry[key]
    entry[keys[-1]] = value
