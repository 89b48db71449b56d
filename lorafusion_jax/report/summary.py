"""Final numbers of a run, read back from its metrics."""

from __future__ import annotations

import statistics
from pathlib import Path

from lorafusion_jax.report.recorder import read_rows


def final_rows(folder: Path) -> dict[str, dict]:
    """Per adapter: last training loss, held-out loss before training and at the end, last step."""
    result: dict[str, dict] = {}
    for row in read_rows(folder / "metrics.jsonl"):
        if "adapter" not in row:
            continue
        own = result.setdefault(row["adapter"], {})
        if row["kind"] == "step":
            own |= {"loss": row["loss"], "step": row["step"], "lr": row["lr"], "grad_norm": row["grad_norm"]}
        elif row["kind"] == "eval":
            own["before" if row["step"] == 0 else "after"] = row["eval_loss"]
    return result


def got_worse(name: str, before: float | None, after: float | None) -> str | None:
    """Says so where an adapter's held-out loss is higher than before training: it may be finite and of no use.

    >>> got_worse("law", 4.6575, 8.0301)
    'law: held-out loss rose from 4.6575 to 8.0301 in training; a smaller optim.lr or fewer steps may help'
    >>> got_worse("law", 4.6575, 3.1)
    """
    if before is None or after is None or not after > before:
        return None
    risen = f"held-out loss rose from {before:.4f} to {after:.4f} in training"
    return f"{name}: {risen}; a smaller optim.lr or fewer steps may help"


def throughput(folder: Path) -> dict[str, float] | None:
    """Medians of useful and processed tokens/s and seconds per slot since the run is on this mesh; None without any."""
    began, mesh = 0.0, None
    for event in read_rows(folder / "events.jsonl"):
        if event["kind"] == "started" and event["mesh"] != mesh:
            began, mesh = event["time"], event["mesh"]
    metrics = read_rows(folder / "metrics.jsonl")
    rows = [row for row in metrics if row["kind"] == "slot" and row["slot_seconds"] and row["time"] >= began]
    if not rows:
        return None
    keys = ("useful_tokens_per_s", "processed_tokens_per_s", "slot_seconds")
    return {key: statistics.median(row[key] for row in rows) for key in keys}
