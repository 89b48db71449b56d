"""Arguments of the functions for users: unknown ones say which was meant, and settings come in several forms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any

from lorafusion_jax.errors import CallError, did_you_mean


def names_unknown[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Makes a call with an unknown argument say which one was meant, or which setting of a job file it is.

    Raises:
        TypeError: as without it, with more words.

    >>> @names_unknown
    ... def train(job, *, rank=8): ...
    >>> train("jobs.yaml", rnk=4)
    Traceback (most recent call last):
        ...
    TypeError: train() has no argument 'rnk'; did you mean 'rank'?
    >>> train("jobs.yaml", capacity_tokens=4096)
    Traceback (most recent call last):
        ...
    TypeError: train() has no argument 'capacity_tokens'; a job file has it as batch.capacity_tokens
    """
    names = list(inspect.signature(function).parameters)

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        for name in named:
            if name not in names:
                hint = did_you_mean(name, names) or _setting(name)
                text = f"{getattr(function, '__name__', '')}() has no argument {name!r}"
                raise TypeError(f"{text}; {hint}" if hint else text)
        return function(*arguments, **named)

    return call


def read_settings[T](kind: type[T], settings: Any, by_name: Mapping[str, Any], *, code: str, argument: str) -> T:
    """Reads the settings of a dataclass from one, from another object with its attributes, a dict, or by name.

    Args:
        settings: in any of these forms; None: by name. A value of None is the default.
        code, argument: of errors, and what the caller calls `settings`.

    Raises:
        CallError: settings in two forms, unknown ones, or an object without them.
    """
    names = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    if settings is not None and by_name:
        raise CallError(code, f"{argument} and settings by name.", fix="one of them")
    values = by_name if settings is None else settings
    if not isinstance(values, Mapping):
        if not all(hasattr(settings, name) for name in names):
            message = f"{argument} is of the type {type(settings).__name__}."
            raise CallError(code, message, fix=f"a dict, or an object with {', '.join(names)}")
        values = {name: getattr(settings, name) for name in names}
    for name in values:
        if name not in names:
            hint = did_you_mean(str(name), names) or f"one of {', '.join(names)}"
            raise CallError(code, f"{argument} has no setting {name!r}.", fix=hint)
    return kind(**{name: value for name, value in values.items() if value is not None})


def _setting(name: str) -> str:
    """Says where a job file has a setting of this name; empty if it has none."""
    from lorafusion_jax.config.schema import DEFAULTS, SHARED, AdapterConfig

    sections = SHARED | DEFAULTS
    keys = [f"{section}.{name}" for section, settings in sections.items() if name in settings.model_fields]
    keys += [name] if name in sections or name in AdapterConfig.model_fields else []
    return f"a job file has it as {' or '.join(keys)}" if keys else ""
