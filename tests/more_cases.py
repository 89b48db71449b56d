"""Marks cases that only `make test-nightly` runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def nightly(*values: Any, **options: Any) -> Any:
    """A case of a kind that is tested anyway."""
    return pytest.param(*values, marks=pytest.mark.nightly, **options)


def mostly_nightly(cases: Iterable[Any], always: Iterable[Any]) -> list[Any]:
    """All cases; those that are not in `always` are of the nightly run."""
    always = list(always)
    assert all(case in list(cases) for case in always)
    return [case if case in always else nightly(*case) if isinstance(case, tuple) else nightly(case) for case in cases]
