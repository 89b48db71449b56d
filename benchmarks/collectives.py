"""The collectives of a compiled program."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np

COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
SHAPE = re.compile(r"(pred|[a-z]+\d+)\[([\d,]*)\]")


def collectives(text: str) -> dict[str, dict[str, Any]]:
    """Of each kind of collective in a compiled program: how many there are, bytes and shapes of their results."""
    kinds: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        if (match := COLLECTIVE.search(line)) is None or " = " not in line[: match.start()]:
            continue
        kind = kinds.setdefault(match[1], {"count": 0, "bytes": 0, "shapes": Counter()})
        kind["count"] += 1
        for dtype, dims in SHAPE.findall(line[: match.start()].split(" = ", 1)[1]):
            kind["shapes"][f"{dtype}[{dims}]"] += 1
            kind["bytes"] += _bytes(dtype) * int(np.prod([int(number) for number in dims.split(",") if number]))
    return kinds


def _bytes(dtype: str) -> int:
    return max(int(re.sub(r"\D", "", dtype) or 8) // 8, 1)
