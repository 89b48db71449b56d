"""Marks cases that only `make test-nightly` runs."""

from collections.abc import Iterable
from typing import Any

import pytest

EVERY_RUN = "not gpu and not nightly"  # pyproject.toml's addopts
LEFT_OUT = {"gpu", "nightly"}


def nightly(*values: Any, **options: Any) -> Any:
    """A case of a kind that is tested anyway."""
    return pytest.param(*values, marks=pytest.mark.nightly, **options)


def mostly_nightly(cases: Iterable[Any], always: Iterable[Any]) -> list[Any]:
    """All cases; those that are not in `always` are of the nightly run."""
    always = list(always)
    assert all(case in list(cases) for case in always)
    return [case if case in always else nightly(*case) if isinstance(case, tuple) else nightly(case) for case in cases]


def drop_unasked(metafunc: pytest.Metafunc) -> None:
    """Takes out of a test's `parametrize` what every run leaves out: making thousands of items costs seconds.

    All stay where cases are chosen by name, where a test would have none, and where others would be numbered anew.
    """
    config, marks = metafunc.config, metafunc.definition.own_markers
    if config.option.markexpr == EVERY_RUN and not any("::" in argument for argument in config.args):
        marks[:] = [_of_every_run(mark) if mark.name == "parametrize" else mark for mark in marks]


def _of_every_run(mark: pytest.Mark) -> pytest.Mark:
    names, values, *rest = mark.args
    values, ids = list(values), mark.kwargs.get("ids")
    chosen = [row for row, value in enumerate(values) if not LEFT_OUT & _marks_of(value)]
    if not chosen or len(chosen) == len(values) or (ids is None and not all(map(_names_itself, values))):
        return mark
    kwargs = dict(mark.kwargs) | ({} if ids is None or callable(ids) else {"ids": [list(ids)[row] for row in chosen]})
    return pytest.mark.parametrize(names, [values[row] for row in chosen], *rest, **kwargs).mark


def _marks_of(value: Any) -> set[str]:
    return {mark.name for mark in getattr(value, "marks", ())}


def _names_itself(value: Any) -> bool:
    """Whether pytest makes the name of a case from its values, not from its number."""
    parts = value if isinstance(value, tuple) else (value,)
    if hasattr(value, "marks"):
        parts = value.values if value.id is None else ()
    return all(part is None or isinstance(part, str | int | float | bool) for part in parts)
