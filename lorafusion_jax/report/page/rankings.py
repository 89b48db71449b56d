"""Which adapters of a page are compared, in the order of their results: the members of a sweep or a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lorafusion_jax.report.ranking import OUT_OF_RACE

BEST_SHOWN = 6  # of a crowd, beside the worst
SECONDARY = ("seed",)  # differs wherever something is swept, and says nothing of a point


def rank_adapters(adapters: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Marks the best of adapters with the same held-out data and measure, and returns a ranking of each such group.

    Adapters that were cancelled or failed come last, with those that have no result. One that nothing can be compared
    with is in no ranking.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    for adapter in adapters:
        groups.setdefault(adapter.pop("compared"), []).append(adapter)
    rankings = []
    for (held_out, measure), group in groups.items():
        compared = [adapter for adapter in group if _competes(adapter)]
        if held_out is None or len(compared) < 2:
            continue
        compared.sort(key=lambda adapter: measure.sort_key(adapter["best"][1]))
        compared[0]["is_best"] = True
        out = [adapter["label"] for adapter in group if not _competes(adapter)]
        rankings.append(
            {
                "measure": measure.label,
                "labels": [adapter["label"] for adapter in compared] + out,
                "placed": len(compared),
                "swept": _swept(group),
            }
        )
    return rankings


def best_shown(rankings: Sequence[dict[str, Any]]) -> list[str]:
    """The adapters that a page of many shows for their results, the first of each ranking before the second."""
    orders = [ranking["labels"][: ranking["placed"]] for ranking in rankings]
    in_turn = [labels[number] for number in range(BEST_SHOWN) for labels in orders if number < len(labels)]
    return in_turn[:BEST_SHOWN]


def _competes(adapter: dict[str, Any]) -> bool:
    return adapter["best"] is not None and adapter["status"] not in OUT_OF_RACE


def _swept(group: Sequence[dict[str, Any]]) -> list[str]:
    """The settings in which the members of a group differ."""
    keys = dict.fromkeys(key for adapter in group for key in adapter["settings"])
    values = {key: {repr(adapter["settings"].get(key)) for adapter in group} for key in keys}
    differing = [key for key in keys if len(values[key]) > 1]
    return [key for key in differing if key not in SECONDARY] or differing
