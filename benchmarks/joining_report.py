"""Tables of the page "Does joining pay?", of rows of `joining.py` and `learning.py`."""

from __future__ import annotations

from benchmarks.csv_rows import Row, markdown
from benchmarks.csv_rows import rows as rows_of

JOINING = [f"joining_h200_{day}/joining.jsonl" for day in ("2026-11-29", "2026-11-30b")]
PEERS = {day: f"joining_h200_{day}/peers.jsonl" for day in ("2026-11-29", "2026-11-30")}  # each day another machine
LEARNING = "learning_cpu_2026-11-29/learning.jsonl"
CELL = ("quantize", "rank", "tokens", "adapters", "batch")


def _measured(part: str) -> list[Row]:
    return [row for file in JOINING for row in rows_of(file) if row["part"] == part and "error" not in row]


def joining() -> str:
    """Supervised fine-tuning: adapters together, and one by one, both at the best size of microbatches."""
    rows = _measured("sft")
    alone = {tuple(row[key] for key in CELL): row for row in rows if row["way"] == "one by one"}
    lines = []
    for row in sorted(rows, key=lambda row: (row["quantize"] != "none", *(row[key] for key in CELL[1:]))):
        if row["way"] == "one by one" or (one := alone.get(tuple(row[key] for key in CELL))) is None:
            continue
        ratio = row["useful_tokens_per_s"] / one["useful_tokens_per_s"]
        own_s = row["batch"] * row["tokens"] / one["useful_tokens_per_s"]  # of one adapter alone
        lines.append(
            (
                row["batch"], row["tokens"], row["rank"], row["adapters"], row["quantize"].replace("none", "bf16"),
                *(f"{way['useful_tokens_per_s'] / 1e3:.1f} k" for way in (one, row)), f"{ratio:.2f}",
                f"{own_s:.2f}", f"{row['step_s']:.2f}", *(f"{way['predicted_gb'][0]:.0f}" for way in (one, row)),
            )
        )  # fmt: skip
    head = (
        "rows of a step", "tokens of a row", "rank", "adapters", "base", "useful tokens/s one by one", "together",
        "together / one by one", "s for a step of one alone", "of all together", "GB one by one", "together",
    )  # fmt: skip
    return markdown(head, lines)


def joining_peft() -> str:
    """PEFT in the same session on that card, one adapter, on each day."""
    days = [_peft(day) for day in PEERS]
    newest = days[-1]
    lines = [
        (batch, *(_thousands(day.get(batch)) for day in days), f"{newest[batch]['peak_gb']:.0f}")
        for batch in sorted(newest)
    ]
    return markdown(("rows of a step", *(f"useful tokens/s, {day}" for day in PEERS), "GB"), lines)


def _peft(day: str) -> dict[int, Row]:
    return {row["global_batch"]: row for row in rows_of(PEERS[day])}


def _thousands(row: Row | None) -> str:
    return "–" if row is None else f"{row['useful_tokens_per_s'] / 1e3:.1f} k"


def joining_search() -> str:
    """A search of all points together, and what PEFT's rates make of it: as many tokens at each number of rows."""
    rows = [row for row in _measured("search") if row["quantize"] == "none"]
    tokens = next(row["tokens"] for row in rows if row["phase"] == "planned")
    newest = _peft("2026-11-30")
    peft_s = []
    for day in PEERS:
        rates = [(newest | _peft(day))[batch]["useful_tokens_per_s"] for batch in newest]
        peft_s.append(sum(tokens / len(rates) / rate for rate in rates))
    lines = [("PEFT, one point after another", " or ".join(f"{seconds:.0f}" for seconds in peft_s), *"–––", "1")]
    for row in sorted(rows, key=lambda row: row["halving"]):
        if row["phase"] == "trained":
            seconds = row["from_first_step_s"]
            lines.append(
                (
                    "together, with halving" if row["halving"] else "together", f"{seconds:.1f}",
                    f"{row['evaluation_s']:.1f}", row["steps_done"], row["slots_done"],
                    " or ".join(f"{of_peft / seconds:.1f}" for of_peft in peft_s),
                )
            )  # fmt: skip
    return markdown(("way", "s", "of it evaluations", "steps", "slots", "times as fast as PEFT"), lines)


def joining_rl() -> str:
    """Reinforcement learning: clients that sample, together and one after another."""
    rows = _measured("rl")
    alone = next(row for row in rows if row["adapters"] == 1)
    lines = []
    for row in rows:
        if row["adapters"] > 1:
            turns_s = row["adapters"] * alone["step_s"]
            lines.append((row["adapters"], "one after another", f"{turns_s:.1f}", _share(alone), "1.00"))
            lines.append(
                (row["adapters"], "together", f"{row['step_s']:.1f}", _share(row), f"{turns_s / row['step_s']:.2f}")
            )
    return markdown(("clients", "way", "s for a step of all", "of it sampling", "times as fast"), lines)


def _share(row: Row) -> str:
    return f"{row['sampling_s'] / row['step_s']:.0%}"


def learning() -> str:
    """Mean rise of the reward of each task over seeds."""
    lines = [(row["task"], row["seeds"], row["rise"]) for row in rows_of(LEARNING) if "rise" in row]
    return markdown(("task", "seeds", "rise of the mean reward"), lines)
