"""Rows of whole training runs: names of the variants, and which row of several runs is the newest."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

Row = dict[str, Any]
WORKLOADS = ("xsum", "cnn", "wiki", "mix", "het")
LABELS = {
    "single_xla": "one at a time, XLA LoRA", "single": "one at a time, our kernels",
    "fsdp_xla": "FSDP, one at a time, XLA LoRA", "flush": "pipeline flushed at every step, XLA LoRA",
    "mlora": "mLoRA's order, our kernels", "ours_xla": "ours, XLA LoRA", "ours": "ours",
    "frozen": "frozen base, no LoRA: the floor",
}  # fmt: skip
RUNS = ("first", "second", "third", "fourth", "fifth", "sixth")  # of a day, in files that number them


def devices_of(row: Row) -> int:
    return math.prod(row["mesh"].values())


def age(row: Row) -> tuple:
    """Sorts rows by when they ran: by the day, its numbered runs, and the time of those that say it."""
    day, _, rest = (row.get("run") or row.get("date") or "").replace(", ", " ", 1).partition(" ")
    name, _, _ = rest.partition(",")
    return (day, RUNS.index(name), "") if name in RUNS else (day, len(RUNS) if rest else -1, rest)


def newest(rows: list[Row]) -> dict[tuple[str, str], Row]:
    """(workload, variant) -> its row of the newest run.

    Of equally new rows that with the most slots, then that of the run with the most baselines, then the slowest.
    """
    baselines = Counter(row.get("run") for row in rows if row["variant"] != "ours")

    def rank(row: Row) -> tuple:
        return *age(row), row["slots"], baselines[row.get("run")], -row["useful_tokens_per_s"]

    return {(row["workload"], row["variant"]): row for row in sorted(rows, key=rank)}
