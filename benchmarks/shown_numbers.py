"""Numbers of README and docs that `make tables` does not make.

    python -m benchmarks.shown_numbers    # lists those that are stated nowhere

What a document shows is made from rows or by code (`published.py`, `figures.py`), or it is stated: measured rows in
`results/`, a setting, a limit of the code, a bound that a test asks for, a condition. Those are in
`benchmarks/data/stated_numbers.csv`, with where each is from. Code blocks and words in backquotes are not read: they
are inputs, names, or screens that tests compare.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import FIGURES, pattern
from benchmarks.published import PLACE

ROOT = Path(__file__).resolve().parents[1]
STATED = ROOT / "benchmarks" / "data" / "stated_numbers.csv"
UNITS = (
    r"%|×(?!\s?\d)|(?:[kMG] )?tokens/s|[kKMGT]i?B\b|k\b|(?:CPU )?(?:ms|µs|s|seconds?|minutes?|h|hours?|days?)\b|times\b"
    r"|[mb]illion"
)
RANGE = r"\d(?:[\d ,.]*\d)?(?:(?: to | and |–)\d[\d.]*)?"
NUMBER = re.compile(rf"(?<![\w.\-/]){RANGE}\s?(?:{UNITS})|\d[\d.]*e-\d+|(?<![\w.\-])\d+\.\d+(?![\w.])")
CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]+`|<!--.*?-->", re.DOTALL | re.MULTILINE)
# Versions of programs and names of models, settings of a measurement, and how long the scripts of benchmarks/ take.
NAMES = r"Python|jax|torch|transformers|PEFT|TRL|Liger|Ray|bitsandbytes|capability|Llama|Small|Apertus|flax|qwix"
CONDITIONS = re.compile(
    rf"\b(?:{NAMES})(?: ≥|,)? \d[\d.]*(?:, \d[\d.]*)*|\b(?:dropout|load)\s0?\d?\.\d+|^\| .* \| `[\w/]+(?:\.py)?`.*\|$",
    re.MULTILINE,
)


class Stated(NamedTuple):
    """A text with numbers that no row is needed for.

    Args:
        document: path in the repository; * for every one.
        text: as in the document, but for line breaks; `{}` stands for a number that is made.
        source: where the numbers are from.
    """

    document: str
    text: str
    source: str


def stated() -> list[Stated]:
    with STATED.open(newline="", encoding="utf-8") as stream:
        return [Stated(**row) for row in csv.DictReader(stream)]


def documents() -> list[str]:
    files = (ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    return [file.relative_to(ROOT).as_posix() for file in files]


def unmade(document: str, text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each number that is neither made nor stated."""
    texts = [entry.text for entry in stated() if entry.document in (document, "*")]
    texts += [figure.text for figure in FIGURES if figure.document == document]
    for covered in (PLACE, *map(pattern, texts), CONDITIONS, CODE):
        text = covered.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, match[0]) for match in NUMBER.finditer(line))


def main() -> int:
    rows = [
        f"{name}:{line}: {number}"
        for name in documents()
        for line, number in unmade(name, (ROOT / name).read_text(encoding="utf-8"))
    ]
    print(*rows, sep="\n")
    return int(bool(rows))


if __name__ == "__main__":
    sys.exit(main())
