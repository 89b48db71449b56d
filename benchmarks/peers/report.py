"""The table and the plot of a run of peers, and their published tables."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from benchmarks.csv_rows import RESULTS, markdown, rows

COMPILED_PEERS = "peers_h200_2026-11-26"
PEERS, SIZES = "peers_h200_2026-11-23", "end_to_end_h200_2026-11-23b/end_to_end.jsonl"
LABELS = {
    "frozen": "frozen base in bfloat16, forward and backward",
    "ours": "ours, four adapters together",
    "ours_fp8": "ours, four adapters, base in fp8",
    "ours_nf4": "ours, four adapters, base in nf4",
    "single": "ours, one adapter after another",
    "single_sizes": "ours, one after another, four sizes of microbatch",
    "lorafusion_full": "LoRAFusion's kernels, every microbatch full",
    "lorafusion": "LoRAFusion's kernels, one adapter",
    "compiled_full": "PEFT + Liger's loss, every microbatch full, torch.compile",
    "packed_full": "PEFT + Liger, every microbatch full",
    "packed": "PEFT + Liger, no padding, one adapter",
    "nf4": "PEFT + Liger, no padding, base in nf4",
    "compiled": "PEFT + Liger's loss, no padding, torch.compile",
    "default": "transformers + PEFT, defaults",
    "checkpointed": "transformers + PEFT, checkpointing",
}
COLUMNS = ("global_batch", "variant", "useful_tokens_per_s", "processed_tokens_per_s", "over_floor", "peak_gb")


def rows_of(folder: Path) -> list[dict]:
    """All rows of ours and of the peers; the last of a variant and batch counts."""
    by_variant: dict[tuple, dict] = {}
    for name in ("end_to_end.jsonl", "peers.jsonl"):
        path = folder / name
        for line in path.read_text().splitlines() if path.exists() else []:
            row = json.loads(line)
            if row["variant"] in LABELS and "error" not in row:
                by_variant[row["global_batch"], row["variant"]] = row
    return list(by_variant.values())


def table(rows: list[dict]) -> list[dict]:
    """Useful and processed tokens/s of each row, and its share of the frozen floor at the same batch."""
    floors = {row["global_batch"]: row["useful_tokens_per_s"] for row in rows if row["variant"] == "frozen"}
    result = []
    for row in sorted(rows, key=lambda row: (row["global_batch"], list(LABELS).index(row["variant"]))):
        useful, floor = row["useful_tokens_per_s"], floors.get(row["global_batch"])
        processed = row["processed"] / row["seconds"] if "processed" in row else useful / row["density"]
        result.append(
            {
                "global_batch": row["global_batch"],
                "variant": row["variant"],
                "useful_tokens_per_s": round(useful),
                "processed_tokens_per_s": round(processed),
                "over_floor": round(useful / floor, 3) if floor else None,
                "peak_gb": max(peak) if isinstance(peak := row.get("peak_gb"), list) else peak,
            }
        )
    return result


def report(folder: Path, stem: Path | None = None) -> list[Path]:
    """Writes a table and a plot of the rows in `folder`, as `stem`.csv and .png (None: peers.csv and .png there)."""
    lines = table(rows_of(folder))
    if not lines:
        return []
    stem = stem or folder / "peers"
    files = [stem.with_suffix(".csv"), stem.with_suffix(".png")]
    with files[0].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    batch = min(line["global_batch"] for line in lines)
    shown = [line for line in reversed(lines) if line["global_batch"] == batch]
    colours = {"frozen": "#b0b0b0", "ours": "#1f77b4", "ours_fp8": "#1f77b4", "ours_nf4": "#1f77b4"}
    colours |= {"single": "#7fb3dd", "single_sizes": "#7fb3dd"}
    figure, axes = plt.subplots(figsize=(8, 0.42 * len(shown) + 1.0), layout="constrained")
    bars = axes.barh(
        [LABELS[line["variant"]] for line in shown],
        [line["useful_tokens_per_s"] / 1000 for line in shown],
        color=[colours.get(line["variant"], "#e0a458") for line in shown],
    )
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_xlabel(f"useful tokens per second, thousands (batch {batch})")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(files[1], dpi=150)
    plt.close(figure)
    return files


README_PEERS = {
    "frozen": "our frozen model, forward and backward: the floor of our LoRA in bfloat16",
    "ours_fp8": "**lorafusion-jax, four adapters together, base in 8-bit floats**",
    "ours": "**lorafusion-jax, four adapters together**",
    "single_sizes": "lorafusion-jax, one adapter after another, four sizes of microbatch",
    "lorafusion_full": "PEFT with LoRAFusion's kernels, every microbatch full: an upper bound",
    "lorafusion": "PEFT with LoRAFusion's kernels, Liger and padding-free attention, one adapter after another",
    "compiled_full": "PEFT with `torch.compile`, every microbatch full: an upper bound (over its own frozen model)",
    "packed": "PEFT with Liger and padding-free attention, one adapter after another",
    "default": "transformers and PEFT with their defaults",
}


def peers_in_short() -> str:
    by_variant = {row["variant"]: row for row in _of_peers(PEERS)}
    alone = {row["variant"]: row for row in rows(SIZES)}  # of another run, ten minutes later
    rate, floor = (alone[variant]["useful_tokens_per_s"] for variant in ("single_sizes", "frozen"))
    by_variant["single_sizes"] = {"useful_tokens_per_s": rate, "over_floor": rate / floor}
    by_variant |= {row["variant"]: row for row in _of_peers(COMPILED_PEERS) if row["variant"].startswith("compiled")}
    lines = [
        (label, f"{by_variant[variant]['useful_tokens_per_s'] / 1e3:.1f} k", f"{by_variant[variant]['over_floor']:.2f}")
        for variant, label in README_PEERS.items()
    ]
    return markdown(("", "useful tokens/s", "of the frozen model"), lines)


def _of_peers(folder: str) -> list[dict]:
    return table(rows_of(RESULTS / folder))


def peers(folder: str = PEERS) -> str:
    lines = [
        (
            LABELS[row["variant"]],
            *(f"{row[key] / 1e3:.2f} k" for key in ("useful_tokens_per_s", "processed_tokens_per_s")),
            f"{row['over_floor']:.3f}",
            f"{row['peak_gb']:.0f} GB" if row["peak_gb"] else "",
        )
        for row in _of_peers(folder)
    ]
    return markdown(("program", "useful tok/s", "processed tok/s", "of the frozen model", "peak memory"), lines)


def peers_compiled() -> str:
    return peers(COMPILED_PEERS)
