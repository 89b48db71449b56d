"""A timeline that draws itself in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lorafusion_jax.api.shown import framed
from lorafusion_jax.files import replace_text
from scheduling import Timeline, timeline_html

HEIGHT = 420


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineView:
    """A predicted or measured timeline of the stages.

    Args:
        timeline: every span of time.
        note: a sentence above the drawing.
    """

    timeline: Timeline
    note: str = ""

    def save(self, path: str | Path) -> Path:
        """Writes the drawing as an HTML page."""
        replace_text(Path(path), self._page())
        return Path(path)

    def _page(self) -> str:
        return timeline_html(self.timeline, note=self.note)

    def _repr_html_(self) -> str:
        return framed(self._page(), HEIGHT)
