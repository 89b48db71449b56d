"""One colour per adapter, the same in every drawing."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable

from scheduling.timeline import Timeline

# Okabe and Ito's palette, distinguishable with every kind of colour vision
_DISTINCT = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c00", "#7f5ab6")


def adapter_names(*timelines: Timeline) -> list[str]:
    """All adapters, in order of first appearance."""
    names: dict[str, None] = {}
    for timeline in timelines:
        names.update((name, None) for slot in sorted(timeline.slot_adapters) for name in timeline.slot_adapters[slot])
        names.update((name, None) for span in timeline.spans for name in span.adapters)
    return list(names)


def adapter_colors(*timelines: Timeline) -> dict[str, str]:
    """A colour for each adapter, the same in all timelines."""
    return colors_of(adapter_names(*timelines))


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, by its place in the alphabet, so that all drawings of a run agree.

    >>> colors_of(["med", "law"])["law"] == colors_of(["law", "med"])["law"]
    True
    """
    names = list(names)
    color_by_name = dict(zip(sorted(names), palette(len(names)), strict=True))
    return {name: color_by_name[name] for name in names}


def palette(count: int) -> list[str]:
    """Colours that are told apart, the same first ones for every count; beyond eight, hues by golden angle."""
    return [_color(index) for index in range(count)]


def _color(index: int) -> str:
    if index < len(_DISTINCT):
        return _DISTINCT[index]
    red, green, blue = colorsys.hls_to_rgb(index * 0.381966 % 1, 0.45 + 0.1 * (index % 3), 0.55)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"
