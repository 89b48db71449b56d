"""Mistakes in the values of a request, one problem for each value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lorafusion_jax.serve.control.spec import NOT_SERVED, RUN

CODES = {"missing": "api.missing", "extra_forbidden": "api.unknown-key", "json_invalid": "api.json"}
FIXES = {"missing": "add it", "extra_forbidden": "leave it out"}
NOT_THERE = ("missing", "json_invalid")  # the end of their place is no key of the body
PLACES = ("body", "query", "path", "header")
Detail = dict[str, Any]
Keys = tuple[str | int, ...]


def value_problems(details: Sequence[Detail], body: Any) -> list[dict[str, str]]:
    """Describes mistakes that pydantic has found.

    A value that may be of several kinds has a mistake for each of them, whose place names the kind by pydantic's own
    words. They become one problem, whose place has keys of the body only.

    Args:
        body: of the request.
    """
    by_union: dict[Keys, list[tuple[Keys, Detail]]] = {}
    for number, detail in enumerate(details):
        keys, union = _keys_in(body, detail)
        by_union.setdefault((number,) if union is None else ("union", *union), []).append((keys, detail))
    return [_problem(likely) for mistakes in by_union.values() for likely in _likely(mistakes)]


def _keys_in(body: Any, detail: Detail) -> tuple[Keys, Keys | None]:
    """Returns the keys of a mistake, and those of the value that may be of several kinds (None: there is none)."""
    if detail["loc"][:1] != ("body",):
        return tuple(part for part in detail["loc"] if part not in PLACES), None
    keys: list[str | int] = []
    union, value, parts = None, body, detail["loc"][1:]
    for number, part in enumerate(parts, 1):
        holds_it = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if holds_it:
            value = value[part]
            keys.append(part)
        elif number == len(parts) and detail["type"] in NOT_THERE:
            keys.append(part)
        elif union is None:
            union = tuple(keys)
    return tuple(keys), union


def _likely(mistakes: list[tuple[Keys, Detail]]) -> list[list[tuple[Keys, Detail]]]:
    """Groups mistakes by their place, without those of kinds that the value is clearly not of."""
    if len(mistakes) > 1:
        deepest = max(len(keys) for keys, _ in mistakes)
        mistakes = [(keys, detail) for keys, detail in mistakes if len(keys) == deepest]
        of_kind = [(keys, detail) for keys, detail in mistakes if not detail["type"].endswith("_type")]
        mistakes = of_kind or mistakes
    by_place: dict[Keys, list[tuple[Keys, Detail]]] = {}
    for keys, detail in mistakes:
        by_place.setdefault(keys, []).append((keys, detail))
    return list(by_place.values())


def _problem(mistakes: list[tuple[Keys, Detail]]) -> dict[str, str]:
    where, kind = ".".join(map(str, mistakes[0][0])), mistakes[0][1]["type"]
    if kind == "extra_forbidden" and where in NOT_SERVED:
        sentence = f"a service does not take {where}."
        return {"code": "job.not-served", "what": sentence, "where": where, "why": NOT_SERVED[where], "fix": RUN}
    messages = dict.fromkeys(detail["msg"].removeprefix("Value error, ") for _, detail in mistakes)
    message = ", or: ".join(messages)
    sentence = {"missing": f"{where} is missing.", "extra_forbidden": f"there is no key {where}."}.get(
        kind, f"{where}: {message}." if where else f"{message}."
    )
    code, fix = CODES.get(kind, "api.value"), FIXES.get(kind, "see /openapi.json")
    return {"code": code, "what": sentence[:500], "where": where[:200], "fix": fix}
