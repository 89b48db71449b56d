"""Strategies that spoil documents, and what every reader of files must keep to.

CI draws 200 cases of each kind, always the same; `pytest tests/reliability/test_fuzz.py --hypothesis-profile nightly`
draws 10 000 new ones.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from limits import limited

from lorafusion_jax.errors import LoraFusionError
from scheduling import PlanError

CI_CASES, UNSET = 80, 100


def cases[F: Callable[..., None]](test: F) -> F:
    """Decorates a property test with the number of cases of the chosen profile."""
    chosen = settings.default.max_examples  # pyright: ignore[reportOptionalMemberAccess]
    return settings(
        max_examples=CI_CASES if chosen == UNSET else chosen,
        derandomize=chosen == UNSET,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )(test)


NUMBERS = (None, True, False, 0, -1, 1, 2, 3.5, -0.0, 10**6, 2**31, 2**63, 10**40, 10**400, 1e308, 1e-320)
NOT_FINITE = (float("inf"), float("-inf"), float("nan"))
TEXTS = ("", " ", "a", "x" * 5000, "\0", "../..", "/", "a/b", "nan", "1e999", "{{ x }}", "%s", "\ud83d", "é", "[" * 50)
HOLDERS = ([], [[]], [None], [1, "a"], {}, {"a": {}}, {"": ""}, "auto", "none", "true")
ODD = st.sampled_from([*NUMBERS, *NOT_FINITE, *TEXTS, *HOLDERS]).map(copy.deepcopy)  # they are spoilt further


def places(document: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths to everything inside a document of lists and objects."""
    if path:
        yield path
    inside = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in inside:
        yield from places(value, (*path, key))


@st.composite
def spoilt(draw: st.DrawFn, document: Any) -> Any:
    """The document with one to three values replaced, taken away, doubled or renamed."""
    result = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        paths = list(places(result))
        if not paths:
            return draw(ODD)
        *path, key = draw(st.sampled_from(paths))
        holder = result
        for step in path:
            holder = holder[step]
        what = draw(st.sampled_from(["replace", "replace", "replace", "remove", "wrap", "rename", "other"]))
        if what == "replace":
            holder[key] = draw(ODD)
        elif what == "remove":
            del holder[key]
        elif what == "wrap":
            holder[key] = draw(st.sampled_from([[holder[key]], {"a": holder[key]}, [holder[key]] * 3]))
        elif what == "rename" and isinstance(holder, dict):
            holder[draw(st.text(max_size=4))] = holder.pop(key)
        else:  # a value from elsewhere in the document
            *other, last = draw(st.sampled_from(paths))
            value = result
            for step in (*other, last):
                value = value[step] if isinstance(value, dict | list) and _has(value, step) else None
            holder[key] = copy.deepcopy(value)
    return result


def _has(value: dict | list, step: Any) -> bool:
    return step in value if isinstance(value, dict) else isinstance(step, int) and step < len(value)


@st.composite
def spoilt_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """The bytes with some of them flipped, cut, doubled, or with others put between."""
    result = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        offset = draw(st.integers(0, max(0, len(result) - 1)))
        what = draw(st.sampled_from(["flip", "flip", "cut", "insert", "double", "tail"]))
        if what == "flip" and result:
            result[offset] ^= 1 << draw(st.integers(0, 7))
        elif what == "cut":
            del result[offset:]
        elif what == "insert":
            more = draw(st.sampled_from([b"\0", b"\xff\xfe", b"\n", b'"', b"[" * 3000, b"9" * 5000, b"{", b",", b": "]))
            result[offset:offset] = more
        elif what == "double":
            result += result[offset:]
        else:
            del result[:offset]
    return bytes(result)


def written(document: Any) -> bytes:
    """JSON, with NaN and lone surrogates where the document has them."""
    return json.dumps(document).encode()


def of_json(document: Any) -> st.SearchStrategy[bytes]:
    """A spoilt JSON file: mostly still JSON."""
    return st.one_of(
        spoilt(document).map(written), spoilt(document).map(written), spoilt_bytes(json.dumps(document).encode())
    )


@contextmanager
def clear_errors(*names: str) -> Iterator[None]:
    """Whatever is read inside ends well or with our own error that names the file, within the limits.

    Args:
        names: of which the message has one at least.
    """
    with limited():
        try:
            yield
        except (LoraFusionError, PlanError) as problem:
            text = str(problem)
            assert "error[" in text, text
            assert not names or any(name in text for name in names), text
            assert len(text) < 20_000, f"{len(text)} characters: {text[:1000]}"
