"""The live view of a run inside a notebook: one output that is replaced while the run trains."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group

from lorafusion_jax.api.shown import PRE, as_html, recording_console
from lorafusion_jax.report.screen import LINE_EVERY_S, Screen

REDRAW_EVERY_S = 0.5  # a notebook's front end gets the whole view each time


class NotebookView:
    """Redraws lines and block of a `Screen` in one output of a notebook.

    Args:
        console: recording console of the screen's lines.
        block: returns the block below the lines.
    """

    def __init__(self, console: Console, block: Callable[[], Group]):
        self._console, self._block = console, block
        self._output: Any = None
        self._drawn_at = float("-inf")

    def start(self) -> None:
        from IPython.display import HTML, display

        self._output = display(HTML(self._html()), display_id=True)

    def refresh(self) -> None:
        if time.monotonic() - self._drawn_at >= REDRAW_EVERY_S:
            self._draw()

    def stop(self) -> None:
        self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML

        self._drawn_at = time.monotonic()
        self._output.update(HTML(self._html()))

    def _html(self) -> str:
        lines = self._console.export_html(clear=False, code_format=PRE, inline_styles=True)
        return lines + as_html(lambda console: console.print(self._block()))


def notebook_screen(name: str, _: Console, line_every_s: float = LINE_EVERY_S) -> Screen:
    """Returns the `Screen` of a run in a notebook."""
    console = recording_console()
    return Screen(name, console, line_every_s, live=lambda block: NotebookView(console, block))


def in_notebook() -> bool:
    """Whether the output of this process is a notebook and not a terminal, including one of IPython."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")
