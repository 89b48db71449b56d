"""Objects that print as the command line does, and show the same in a notebook."""

from __future__ import annotations

import html
from collections.abc import Callable
from io import StringIO

from rich.console import Console

WIDTH = 110  # columns without a terminal
PRE = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:1.3;'
    "font-family:Menlo,'DejaVu Sans Mono',consolas,monospace\">{code}</pre>"
)


class Shown:
    """Base class of objects with a screen: `str()` returns its text, and a notebook shows its HTML and drawings."""

    __slots__ = ()

    def _show(self, console: Console) -> None:
        raise NotImplementedError

    def _drawings(self) -> str:
        """HTML that follows the screen in a notebook."""
        return ""

    def __str__(self) -> str:
        return as_text(self._show)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self._show) + self._drawings()


def as_text(show: Callable[[Console], None]) -> str:
    """Returns what `show` prints, without colours."""
    text = StringIO()
    show(Console(file=text, width=WIDTH, force_jupyter=False, force_terminal=False))
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


def as_html(show: Callable[[Console], None]) -> str:
    """Returns what `show` prints as HTML, with colours."""
    console = recording_console()
    show(console)
    return console.export_html(code_format=PRE, inline_styles=True)


def recording_console() -> Console:
    """Returns a console without output whose record becomes HTML."""
    return Console(file=StringIO(), record=True, width=WIDTH, force_jupyter=False, force_terminal=True)


def framed(page: str, height: int) -> str:
    """Returns HTML that shows a whole page inside a notebook."""
    return f'<iframe srcdoc="{html.escape(page)}" width="100%" height="{height}" style="border:0"></iframe>'
