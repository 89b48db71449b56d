"""Shows a doctest that stands alone in a docstring as an example, for mkdocstrings."""

from __future__ import annotations

import griffe


class Doctests(griffe.Extension):
    """Puts `Examples:` before the first `>>>` of a docstring that has no such heading."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_heading(obj.docstring.value)


def with_heading(text: str) -> str:
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith(">>>")), None)
    if first is None:
        return text
    end = next((number for number in range(first, len(lines)) if not lines[number].strip()), len(lines))
    example = ["Examples:", *("    " + line for line in lines[first:end])]
    return "\n".join([*lines[:first], *example, *lines[end:]])
