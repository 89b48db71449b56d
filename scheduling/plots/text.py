"""A timeline as text for a terminal."""

from __future__ import annotations

from itertools import islice
from string import ascii_lowercase

from scheduling.plots.colors import adapter_names
from scheduling.timeline import Span, Timeline

IDLE = "·"


def timeline_text(timeline: Timeline, width: int = 100) -> str:
    """Draws one line per stage: a letter per adapter (lower case = forward, upper case = backward), · = idle.

    Each column shows the adapter with the most time in it. The adapters of a microbatch share its time equally.
    """
    names = adapter_names(timeline)
    letters = dict(zip(names, islice(ascii_lowercase, len(names)), strict=False))
    columns = max(10, width - 4)
    lines = [
        f"s{stage:<2} " + _line(timeline, spans, letters, columns) for stage, spans in enumerate(timeline.by_stage)
    ]
    legend = "  ".join(f"{letter}={name}" for name, letter in letters.items())
    more = f"  (+{len(names) - len(letters)} more, drawn as ?)" if len(names) > len(letters) else ""
    scale = f"    0 s{f'{timeline.duration_s:.3g} s':>{max(1, columns - 3)}}"
    summary = f"    bubbles {100 * timeline.bubble_share:.1f} % · fill and drain {timeline.fill_drain_s:.3g} s"
    return "\n".join([*lines, scale, f"    {legend}{more}  {IDLE}=idle", summary])


def _line(timeline: Timeline, spans: tuple[Span, ...], letters: dict[str, str], columns: int) -> str:
    column_s = timeline.duration_s / columns or 1.0
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in spans:
        start, end = span.start_s - timeline.start_s, span.end_s - timeline.start_s
        adapters = span.adapters or timeline.slot_adapters.get(span.slot, ()) or ("",)
        for column in range(int(start / column_s), min(columns, int(end / column_s) + 1)):
            share = min(end, (column + 1) * column_s) - max(start, column * column_s)
            for adapter in adapters:
                mark = letters.get(adapter, "?")
                mark = mark.upper() if span.kind == "backward" else mark
                shares[column][mark] = shares[column].get(mark, 0.0) + share / len(adapters)
    return "".join(_largest_share(share, column_s) for share in shares)


def _largest_share(shares: dict[str, float], column_s: float) -> str:
    if sum(shares.values()) < column_s / 2:
        return IDLE
    return max(sorted(shares), key=shares.__getitem__)
