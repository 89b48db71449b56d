"""Unknown arguments of the functions for users: which one was meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps

from lorafusion_jax.errors import did_you_mean


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


def _setting(name: str) -> str:
    """Says where a job file has a setting of this name; empty if it has none."""
    from lorafusion_jax.config.schema import DEFAULTS, SHARED, AdapterConfig

    sections = SHARED | DEFAULTS
    keys = [f"{section}.{name}" for section, settings in sections.items() if name in settings.model_fields]
    keys += [name] if name in sections or name in AdapterConfig.model_fields else []
    return f"a job file has it as {' or '.join(keys)}" if keys else ""
