"""Tables of how fast texts are generated, of rows of `decode_products.py` and `generate.py`."""

from __future__ import annotations

from benchmarks.csv_rows import markdown
from benchmarks.csv_rows import rows as rows_of

PASSES = "decode_products_h200_2026-11-30/decode_products.jsonl"
RUNS = "generate_h200_2026-11-30/generate.jsonl", "generate_h200_2026-11-29/generate.jsonl"
WAY = {64: "joined", 256: "separate"}  # rows → how decoding multiplies them


def decoding() -> str:
    """A pass over the next token of all sequences, beside a read of everything."""
    lines = [
        (
            row["rows"], row["base"].replace("bf16", "bfloat16"), f"{row['pass_ms']:.1f} ms",
            f"{row['rows'] / row['pass_ms']:.1f} k", f"{row['bound_ms']:.1f} ms", f"{row['of_bound']:.2f}",
        )
        for row in sorted(rows_of(PASSES), key=lambda row: row.get("rows", 0))
        if row["section"] == "pass" and row["way"] == WAY[row["rows"]]
    ]  # fmt: skip
    head = (
        "sequences", "base", "a pass", "tokens per second while all run", "reading everything once", "share of it",
    )  # fmt: skip
    return markdown(head, lines)


def generated() -> str:
    """Whole runs, prompts and uneven answers included; the newest of each number of sequences."""
    runs = {row["rows"]: row for file in reversed(RUNS) for row in rows_of(file) if row["section"] == "ours"}
    lines = [
        (
            rows, run["requests"], f"{run['tokens_per_s'] / 1e3:.1f} k", f"{run['mean_rows']:.0f}",
            f"{run['of_bound']:.2f}",
        )
        for rows, run in sorted(runs.items())
    ]  # fmt: skip
    head = "sequences", "requests", "tokens per second", "sequences that ran on average", "reading alone, of the time"
    return markdown(head, lines)
