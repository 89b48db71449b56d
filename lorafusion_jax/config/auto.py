"""Settings that a job leaves to the planner: `auto` in place of a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lorafusion_jax.errors import ConfigError

AUTO = "auto"
CAPACITY, MESH, QUANTIZE = "batch.capacity_tokens", "mesh", "base.quantize"


def take_auto(values: dict[str, Any]) -> tuple[str, ...]:
    """Removes each `auto` from the values of a job file, in place, and returns their keys.

    >>> values = {"mesh": "auto", "batch": {"capacity_tokens": "auto", "global_samples": 8}}
    >>> take_auto(values), values
    (('batch.capacity_tokens', 'mesh'), {'batch': {'global_samples': 8}})
    """
    keys = []
    for key in (CAPACITY, MESH, QUANTIZE):
        *sections, last = key.split(".")
        table: Any = values
        for section in sections:
            table = table.get(section) if isinstance(table, dict) else None
        if isinstance(table, dict) and table.get(last) == AUTO:
            del table[last]
            keys.append(key)
    return tuple(keys)


def refuse_auto(keys: Sequence[str], command: str) -> None:
    """Refuses what a command that measures cannot leave open.

    Raises:
        ConfigError: `config.auto`.
    """
    if keys:
        raise ConfigError(
            "config.auto",
            f"{', '.join(keys)} is auto, and {command} measures one choice.",
            fix=f"give it a value: lorafusion plan JOBS shows what auto takes, and {keys[0]}=… sets it",
        )
