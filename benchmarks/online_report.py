"""Tables of the online benchmark, from its rows."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

OTHERS = ("elastic-srtf", "srtf", "backfill", "fifo", "tlora", "packing", "mlora")
TARGETS = {  # mean completion time over ours, by number of GPUs; and the worst user's completion over its fair one
    1: {"elastic-srtf": 1.0, "srtf": 1.0, "backfill": 1.3, "worst_user": 2.0},
    2: {"elastic-srtf": 1.03, "srtf": 1.05, "backfill": 1.4, "worst_user": 2.0},
    4: {"elastic-srtf": 1.03, "srtf": 1.05, "backfill": 1.4, "worst_user": 2.0},
    8: {"elastic-srtf": 1.1, "srtf": 1.2, "backfill": 1.5, "worst_user": 1.6},
    64: {"elastic-srtf": 1.15, "srtf": 1.4, "backfill": 2.0, "worst_user": 1.5},
}
TOGETHER = {("qwen2.5-32b", 80.0): 1.45, ("llama-3.1-70b", 80.0): 1.5}  # tokens/s over FIFO
PUBLISHED = Path(__file__).parent / "results" / "online_2026-11-29"
CLAIMS = (
    ("completion time 2.3–5.4 ×", "jct_mean_s", ("mlora", "fifo", "tlora", "elastic-srtf")),
    ("throughput 1.2–1.8 ×", "tokens_per_s", ("mlora", "fifo", "elastic-srtf")),
    ("utilisation + 37 %", "utilisation", ("tlora", "fifo", "elastic-srtf")),
)
Run = dict[str, dict[str, str]]  # rows by policy


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def online_targets() -> str:
    return _table(_targets(_rows("small", "large")))


def online_held_out() -> str:
    return _table(_traces("", _rows("held-out")))


def online_large() -> str:
    return _table(_traces("", _rows("large")))


def online_queue() -> str:
    return _table(_queue(_rows("queue", "large")))


def online_ideas() -> str:
    return _table(_ideas(_rows("ideas")))


def online_throughput() -> str:
    return _table(_throughput(_rows("throughput")))


def online_rates() -> str:
    return "\n".join(rate_rows(PUBLISHED))


def online_decision() -> str:
    return "\n".join(decision_rows(PUBLISHED))


def online_claims() -> str:
    """Claims of the systems that are replaced, and what simulation gives against each baseline."""
    runs = _runs(_rows("claims"), "gpus", "memory_gib")
    lines = [
        "| claim of tLoRA | against | 1 GPU, 140 GiB | 8 GPUs, 140 GiB | 8 GPUs, 80 GiB |",
        "|---|---|---|---|---|",
    ]
    for claim, figure, policies in CLAIMS:
        for policy in policies:
            cells = [_gain(runs[cluster], policy, figure) for cluster in (("1", "140"), ("8", "140"), ("8", "80"))]
            lines.append(f"| {claim} | `{policy}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _gain(runs: Sequence[Run], policy: str, figure: str) -> str:
    """Geometric mean of our gain, least and most in brackets."""
    ratios = np.array(_over_ours(runs, policy, figure))
    gains = ratios if figure == "jct_mean_s" else 1 / ratios
    return f"{np.exp(np.log(gains).mean()):.2f} ({gains.min():.2f}–{gains.max():.2f})"


def _rows(*parts: str) -> list[dict[str, str]]:
    return [row for row in read(PUBLISHED / "rows.csv") if row["part"] in parts]


def _table(lines: Sequence[str]) -> str:
    return "\n".join(line for line in lines if line.startswith("|"))


def write_report(folder: Path) -> None:
    """Writes summary.md."""
    rows = read(folder / "rows.csv")
    parts = [
        "# The online scheduler against its targets\n",
        (folder / "conditions.txt").read_text(),
        *_targets([row for row in rows if row["part"] in ("small", "large")]),
        *_traces("Held-out traces", [row for row in rows if row["part"] == "held-out"]),
        *_traces("Own traces", [row for row in rows if row["part"] in ("small", "large")]),
        *_queue([row for row in rows if row["part"] in ("queue", "large")]),
        *_ideas([row for row in rows if row["part"] == "ideas"]),
        *_throughput([row for row in rows if row["part"] == "throughput"]),
        *_files(folder),
    ]
    (folder / "summary.md").write_text("\n".join(parts) + "\n", encoding="utf-8")


def _runs(rows: Iterable[dict[str, str]], *names: str) -> dict[tuple[str, ...], list[Run]]:
    """Runs with ours in them, by these columns."""
    runs: dict[tuple[str, ...], dict[tuple[str, ...], Run]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        run = tuple(row[name] for name in ("trace", "seed", "load", "gpus", "memory_gib"))
        policy, _, base = row["policy"].partition(", ")
        runs[tuple((row | {"base": base})[name] for name in names)][(*run, base)][policy] = row
    return {key: [run for run in runs.values() if "ours" in run] for key, runs in runs.items()}


def _over_ours(runs: Sequence[Run], policy: str, figure: str = "jct_mean_s") -> list[float]:
    return [float(run[policy][figure]) / float(run["ours"][figure]) for run in runs if policy in run]


def _cell(values: Sequence[float], target: float | None = None, *, at_most: bool = False) -> str:
    if not values:
        return "–"
    figure = max(values) if at_most else float(np.mean(values))
    missed = target is not None and (round(figure, 2) > target if at_most else round(figure, 2) < target)
    error = f" ± {np.std(values, ddof=1) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    spread = f"{min(values):.2f}–{max(values):.2f}"
    text = f"{figure:.2f}{error} ({spread})" if not at_most else f"{figure:.2f}"
    return f"**{text}**" if missed else text


def _targets(rows: Sequence[dict[str, str]]) -> list[str]:
    lines = [
        "\n## Mean completion time of others over ours\n",
        "Mean over traces and seeds ± its standard error, least and most in brackets; bold: below the target. "
        "The worst user is that of all runs.\n",
        "| GPUs | load | jobs | runs | elastic-srtf | srtf | backfill | p99, elastic-srtf | slowdown, most "
        "| bounds broken | worst user over fair | refused |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups = _runs(rows, "gpus", "load", "jobs")
    for gpus, load, jobs in sorted(groups, key=lambda key: (int(key[0]), float(key[1]))):
        runs, target = groups[gpus, load, jobs], TARGETS[int(gpus)]
        cells = [_cell(_over_ours(runs, name), target[name]) for name in OTHERS[:3]]
        worst, slow, refused = (
            [float(run["ours"][name]) for run in runs] for name in ("worst_user", "slowdown_max", "refusals")
        )
        cells += [_cell(_over_ours(runs, "elastic-srtf", "jct_p99_s"), 1.0), f"{max(slow):.2f}", _broken(runs)]
        cells += [_cell(worst, target["worst_user"], at_most=True), f"{sum(refused):.0f}"]
        lines.append(f"| {gpus} | {load} | {jobs} | {len(runs)} | {' | '.join(cells)} |")
    return lines


def _broken(runs: Sequence[Run]) -> str:
    """Jobs whose slowdown was above its bound."""
    return f"{sum(float(run['ours']['bounds_broken']) for run in runs):.0f}"


def _traces(title: str, rows: Sequence[dict[str, str]]) -> list[str]:
    groups = _runs(rows, "trace", "gpus")
    if not groups:
        return []
    lines = [
        f"\n## {title}\n",
        f"| trace | GPUs | runs | {' | '.join(OTHERS)} | p99, elastic-srtf | bounds broken | worst user |",
        "|---|" + "---|" * (len(OTHERS) + 5),
    ]
    for trace, gpus in sorted(groups, key=lambda key: (key[0], int(key[1]))):
        runs = groups[trace, gpus]
        cells = [_cell(_over_ours(runs, name)) for name in OTHERS]
        cells.append(_cell(_over_ours(runs, "elastic-srtf", "jct_p99_s")))
        cells.append(_broken(runs))
        cells.append(_cell([float(run["ours"]["worst_user"]) for run in runs], at_most=True))
        lines.append(f"| {trace} | {gpus} | {len(runs)} | {' | '.join(cells)} |")
    return lines


def _queue(rows: Sequence[dict[str, str]]) -> list[str]:
    groups = _runs(rows, "jobs")
    lines = [
        "\n## Longer queues\n",
        "64 GPUs, load 1.0: factors over first come, first served grow with the number of jobs.\n",
        "| jobs | runs | backfill | fifo | bounds broken |",
        "|---|---|---|---|---|",
    ]
    for (jobs,), runs in sorted(groups.items(), key=lambda item: int(item[0][0])):
        cells = (_cell(_over_ours(runs, name)) for name in ("backfill", "fifo"))
        lines.append(f"| {jobs} | {len(runs)} | {' | '.join(cells)} | {_broken(runs)} |")
    return lines if rows else []


def _ideas(rows: Sequence[dict[str, str]]) -> list[str]:
    groups = _runs(rows, "gpus")
    names = [name for name in dict.fromkeys(row["policy"] for row in rows) if name != "ours"]
    lines = ["\n## What each idea brings\n", "Mean completion time over that of the whole policy.\n"]
    lines += [f"| GPUs | runs | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for (gpus,), runs in groups.items():
        lines.append(f"| {gpus} | {len(runs)} | {' | '.join(_cell(_over_ours(runs, name)) for name in names)} |")
    return lines if rows else []


def _throughput(rows: Sequence[dict[str, str]]) -> list[str]:
    lines = [
        "\n## All jobs there at the start, one base\n",
        "Tokens of all jobs over the makespan, over FIFO's; steady: the same until half of the tokens are trained.\n",
        "| base | GiB | ours | steady | elastic-srtf | steady |",
        "|---|---|---|---|---|---|",
    ]
    for (base, memory), runs in _runs(rows, "base", "memory_gib").items():
        cells: list[str] = []
        for policy in ("ours", "elastic-srtf"):
            for figure in ("tokens_per_s", "steady_tokens_per_s"):
                values = [
                    float(run[policy][figure]) / float(run["fifo"][figure])
                    for run in runs
                    if policy in run and "fifo" in run
                ]
                ours = policy == "ours" and figure == "tokens_per_s"
                cells.append(_cell(values, TOGETHER.get((base, float(memory))) if ours else None))
        lines.append(f"| {base} | {memory} | {' | '.join(cells)} |")
    return lines if rows else []


def _files(folder: Path) -> list[str]:
    lines: list[str] = []
    if (folder / "rates.csv").exists():
        lines += ["\n## Predicted rates of groups, and plans\n", *rate_rows(folder)]
    if (folder / "decision.csv").exists():
        lines += ["\n## Decisions\n", *decision_rows(folder)]
    return lines


def rate_rows(folder: Path) -> list[str]:
    """Errors of the packing that counts for groups that train, and of the fluid model of the search."""
    rows = read(folder / "rates.csv")
    lines = ["| lengths | groups | quantity | mean | 95 % | most |", "|---|---|---|---|---|---|"]
    for data in dict.fromkeys(row["data"] for row in rows):
        some = [row for row in rows if row["data"] == data]
        errors = {
            "tokens/s, packed together": [float(row["error"]) for row in some],
            "slowdowns, packed together": [float(error) for row in some for error in row["slowdown_errors"].split()],
            "tokens/s, fluid": [float(row["searched_error"]) for row in some],
        }
        for name, values in errors.items():
            size = np.abs(values)
            figures = " | ".join(
                f"{100 * figure:.1f} %" for figure in (size.mean(), np.percentile(size, 95), size.max())
            )
            lines.append(f"| {data} | {len(some)} | {name} | {figures} |")
    return lines


def decision_rows(folder: Path) -> list[str]:
    """Counted work and CPU time of a decision."""
    rows = read(folder / "decision.csv")
    lines = [
        f"{rows[0]['running']} running and {rows[0]['waiting']} waiting jobs on {rows[0]['gpus']} GPUs. An addition is "
        "one of a loop in Python: how fast the core was.\n",
        "| caches | function calls | CPU time | an addition |",
        "|---|---|---|---|",
    ]
    for row in rows:
        addition = f"{row['addition_ns']} ns"
        lines.append(f"| warm | {int(row['warm_calls']):,} | {row['warm_ms']} ms | {addition} |")
        cold_ms = 1e3 * float(row["cold_s"])
        lines.append(f"| empty | {int(row['cold_calls']):,} | {cold_ms:.0f} ms | {addition} |")
    return lines
