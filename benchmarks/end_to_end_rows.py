"""Rows of whole training runs: names of the variants, and selection of the newest rows."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

Row = dict[str, Any]
WORKLOADS = ("xsum", "cnn", "wiki", "mix", "het")
LABELS = {
    "single_xla": "one at a time, XLA LoRA", "single": "one at a time, our kernels",
    "fsdp_xla": "FSDP, one at a time, XLA LoRA",
    "fsdp": "FSDP, one at a time, our kernels", "flush": "pipeline flushed at every step, XLA LoRA",
    "mlora": "mLoRA's order, our kernels", "ours_xla": "ours, XLA LoRA", "ours": "ours",
    "frozen": "frozen base, no LoRA: the floor",
}  # fmt: skip
RUNS = ("first", "second", "third", "fourth", "fifth", "sixth")  # numbers of the runs of a day in old files


def devices_of(row: Row) -> int:
    return math.prod(row["mesh"].values())


def age(row: Row) -> tuple:
    """Sort key for the time of a row: day, number of the run, and time if known."""
    day, _, rest = (row.get("run") or row.get("date") or "").replace(", ", " ", 1).partition(" ")
    name, _, _ = rest.partition(",")
    return (day, RUNS.index(name), "") if name in RUNS else (day, len(RUNS) if rest else -1, rest)


def newest(rows: list[Row]) -> dict[tuple[str, str], Row]:
    """(workload, variant) -> the row of the newest run.

    Ties go to the row with the most slots, then to the run with the most baselines, then to the slowest row.
    """
    baselines = Counter(row.get("run") for row in rows if row["variant"] != "ours")

    def rank(row: Row) -> tuple:
        return *age(row), row["slots"], baselines[row.get("run")], -row["useful_tokens_per_s"]

    return {(row["workload"], row["variant"]): row for row in sorted(rows, key=rank)}
