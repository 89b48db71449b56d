"""Builds an objective with its settings from the section `objective` of a job file. Never imports jax.

Other packages can install an entry point of the group `lorafusion_jax.objectives` that loads an `Objective`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from contextlib import suppress
from types import NoneType
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from lorafusion_jax.adapters.kind import Head
from lorafusion_jax.errors import ConfigError, did_you_mean
from lorafusion_jax.objective.protocol import DIVERGENCE, Chosen, Objective
from lorafusion_jax.objective.table import OBJECTIVES
from lorafusion_jax.plugins import find, known_names, not_known

GROUP = "lorafusion_jax.objectives"


class UnknownOption(ValueError):
    """An objective does not have this option.

    Attributes:
        key: the option.
    """

    def __init__(self, key: str, text: str):
        super().__init__(text)
        self.key = key


def objective(name: str) -> Objective:
    """Finds an objective by its name in a job file.

    Raises:
        ConfigError: `plugin.unknown`, `plugin.broken`.
    """
    return find(GROUP, OBJECTIVES, name, Objective)


def unknown_objective(name: str) -> str | None:
    """Explains an unknown `objective.name`; None if the name exists."""
    return not_known(GROUP, OBJECTIVES, name)


def known_heads() -> tuple[Head, ...]:
    """Returns the heads of all objectives that have one without options; those that do not load are left out."""
    heads: list[Head] = []
    for name in known_names(GROUP, OBJECTIVES):
        with suppress(ConfigError, TypeError, ValueError):
            entry = objective(name)
            head = Chosen(name=name, objective=entry, options=entry.options()).head
            heads += [] if head is None else [head]
    return tuple(heads)


def on_rollouts() -> list[str]:
    """Names of the objectives that train on rewarded answers; those that do not load are left out."""
    names: list[str] = []
    for name in known_names(GROUP, OBJECTIVES):
        with suppress(ConfigError):
            names += [name] if objective(name).advantages else []
    return names


def choose(name: str, options: Mapping[str, Any], reference: str | None = None) -> Chosen:
    """Returns an objective with its settings.

    Raises:
        ValueError: the objective does not have an option, or no reference.
        pydantic.ValidationError: the value of an option is invalid.
        ConfigError: as in `objective`.
    """
    entry = objective(name)
    option_of = {option.name: option for option in dataclasses.fields(entry.options)}
    for key in options:
        if key not in option_of:
            near = did_you_mean(key, option_of)
            has = f"the options {', '.join(sorted(option_of))}" if option_of else "no options"
            raise UnknownOption(key, f"options of {name}, which has {has}, not '{key}'" + (f"; {near}" if near else ""))
    types = _types(entry.options)
    values = {key: _as_written(types.get(key), key, value) for key, value in options.items()}
    choice = Chosen(
        name=name, objective=entry, options=_adapter(entry.options).validate_python(values), reference=reference
    )
    if reference is not None and not choice.compares:
        raise ValueError(f"options of {name}, which has no reference")
    if reference is None and DIVERGENCE in choice.needs:
        raise ValueError(f"options of {name} with a reference, its teacher: an adapter of the job, or a PEFT folder")
    assert choice.num_segments
    return choice


def _as_written(type_of: Any, key: str, value: Any) -> Any:
    """As in the rest of a job file, a text or true is not a number, and a text or 1 is not true.

    Args:
        type_of: type of the option.
    """
    if NoneType in (members := get_args(type_of)) and value is not None and len(members) == 2:  # a number, or none
        type_of = next(member for member in members if member is not NoneType)
    if type_of is bool and not isinstance(value, bool):
        raise _not_of_type("bool_type", key, value)
    if type_of in (int, float) and (isinstance(value, bool) or (isinstance(value, str) and "e" not in value.lower())):
        raise _not_of_type("float_type", key, value)
    return value


def _not_of_type(type_name: str, key: str, value: Any) -> ValidationError:
    """The error of pydantic for a type, which names the option's place."""
    return ValidationError.from_exception_data("options", [{"type": type_name, "loc": (key,), "input": value}])


@functools.cache
def _adapter(options: type) -> TypeAdapter[Any]:
    return TypeAdapter(options)


@functools.cache
def _types(options: type) -> dict[str, Any]:
    """The types of an objective's options, without those that cannot be resolved."""
    try:
        return get_type_hints(options)
    except (NameError, TypeError):  # of a package whose annotations are texts of local names
        return {}
