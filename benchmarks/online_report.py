"""Tables and plots of the online benchmark, from its rows."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

OTHERS = {"fifo": 3.0, "srtf": 1.1, "mlora": 1.5, "tlora": 1.1}  # target ratio of mean completion times
HOUR = 3600
WORST = {  # what, target, whether larger is better
    "utilisation": ("GPUs busy while jobs wait", 0.9, True),
    "slowdown_p99": ("slowdown of 99 % of the jobs, bound 1.3", 1.3, False),
    "slowdown_max": ("largest slowdown", 1.5, False),
    "longest_wait": ("longest wait for the first start, in isolated times of the job", 10.0, False),
    "fairness": ("Jain's index of work over fair share", 0.95, True),
}


def write_report(folder: Path) -> None:
    """Writes summary.md, and plots if matplotlib is installed."""
    rows = list(csv.DictReader((folder / "rows.csv").open()))
    parts = [
        "# The online scheduler against its targets\n",
        (folder / "conditions.txt").read_text(),
        *_targets(rows, folder / "decision.csv"),
        *_ratios(rows),
        *_promises(rows),
        *_throughput(rows, folder / "partners.csv"),
        *_ablation(rows),
        *_speed(rows),
        *_rates(folder / "rates.csv"),
    ]
    (folder / "summary.md").write_text("\n".join(parts) + "\n", encoding="utf-8")
    if find_spec("matplotlib"):
        _plot_loads(rows, folder / "loads.png")


def _targets(rows: Sequence[dict], decision: Path) -> list[str]:
    """Every target next to its figure; the worst run counts, except for ratios, which are means over runs."""
    table = [row for row in rows if row["part"] == "table" and float(row["load"]) == 1.0]
    found: list[tuple[str, float, float, bool]] = []  # what, target, figure, whether larger is better
    for name, least in OTHERS.items():
        pairs = _pairs(table, name, "jct_mean_s")
        found.append(
            (f"mean completion time of {name} over ours", least, np.mean([of / own for own, of in pairs]), True)
        )
    for base, least in (("llama-3.1-8b", 1.1), ("qwen2.5-32b", 1.4), ("llama-3.1-70b", 1.4)):
        pairs = _pairs([row for row in rows if row["part"] == "throughput"], "fifo", "tokens_per_s", f", {base}")
        gain = np.mean([own for own, _ in pairs]) / np.mean([of for _, of in pairs])
        found.append((f"tokens/s of {base}, all jobs at the start, over FIFO", least, gain, True))
    ours = {name: [float(row[name]) for row in table if row["policy"] == "ours"] for name in WORST}
    found += [(said, target, (min if more else max)(ours[name]), more) for name, (said, target, more) in WORST.items()]
    if decision.exists():
        row = next(csv.DictReader(decision.open()))
        said = f"milliseconds of a decision, {row['running']} jobs running and {row['waiting']} waiting"
        found.append((said, 20.0, float(row["decision_ms"]), False))
    seconds = [float(row["cpu_s"]) for row in rows if row["part"] == "speed"]
    found += [("CPU seconds to simulate 10 000 jobs on 256 GPUs", 60.0, value, False) for value in seconds]
    lines = ["\n## Targets, at a load of 1.0\n", "| what | target | figure | |", "|---|---|---|---|"]
    for what, target, figure, more in found:
        met = figure >= target if more else figure <= target
        said = "met" if met else "**missed**"
        lines.append(f"| {what} | {'≥' if more else '≤'} {target:g} | {figure:.3g} | {said} |")
    return lines


def _pairs(rows: Sequence[dict], other: str, figure: str, suffix: str = "") -> list[tuple[float, float]]:
    """(ours, other) of a figure in every run that has both."""
    runs: dict[tuple, dict[str, float]] = defaultdict(dict)
    for row in rows:
        runs[row["trace"], row["seed"]][row["policy"]] = float(row[figure])
    names = f"ours{suffix}", f"{other}{suffix}"
    return [(of[names[0]], of[names[1]]) for of in runs.values() if of.keys() >= set(names)]


def _ratios(rows: Sequence[dict]) -> list[str]:
    """Ratio of mean completion times, others over ours, by run; mean over seeds."""
    found: dict[tuple, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["part"] == "table":
            found[float(row["load"]), row["trace"], row["seed"]][row["policy"]] = float(row["jct_mean_s"])
    lines = [
        "\n## Mean completion time of others over ours\n",
        "2 000 jobs of five bases, 64 GPUs; mean over seeds, lowest and highest in brackets.\n",
        f"| load | trace | seeds | ours | {' | '.join(f'{name} (≥ {least})' for name, least in OTHERS.items())} "
        "| packing |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for load in sorted({key[0] for key in found}):
        everywhere: dict[str, list[float]] = defaultdict(list)
        for trace in sorted({key[1] for key in found if key[0] == load}):
            runs = [of for key, of in found.items() if key[:2] == (load, trace) and "ours" in of]
            ratios = {name: [of[name] / of["ours"] for of in runs if name in of] for name in (*OTHERS, "packing")}
            for name, values in ratios.items():
                everywhere[name] += values
            if runs:
                ours = np.mean([of["ours"] for of in runs]) / HOUR
                lines.append(f"| {load:g} | {trace} | {len(runs)} | {ours:.2f} h | {_cells(ratios)} |")
        lines.append(f"| {load:g} | **all** | | | {_cells(everywhere)} |")
    return lines


def _cells(ratios: dict[str, list[float]]) -> str:
    return " | ".join(
        f"{np.mean(values):.2f} ({min(values):.2f}–{max(values):.2f})" if values else "–" for values in ratios.values()
    )


def _promises(rows: Sequence[dict]) -> list[str]:
    lines = [
        "\n## What jobs and users see\n",
        "| load | policy | busy while jobs wait | slots full | slowdown p99 | max | longest wait / time alone | "
        "Jain's index | preemptions per job |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for load in sorted({float(row["load"]) for row in rows if row["part"] == "table"}):
        for policy in ("ours", *OTHERS, "packing"):
            runs = [r for r in rows if r["part"] == "table" and float(r["load"]) == load and r["policy"] == policy]
            if runs:
                of = {
                    name: [float(run[name]) for run in runs]
                    for name in runs[0]
                    if name not in ("part", "trace", "policy")
                }
                lines.append(
                    f"| {load:g} | {policy} | {np.mean(of['utilisation']):.3f} | {np.mean(of['density']):.2f} "
                    f"| {np.max(of['slowdown_p99']):.2f} | {max(of['slowdown_max']):.2f} "
                    f"| {max(of['longest_wait']):.1f} "
                    f"| {np.mean(of['fairness']):.3f} (least {min(of['fairness']):.3f}) "
                    f"| {np.mean(of['preemptions']) / 2000:.2f} |"
                )
    return lines


def _throughput(rows: Sequence[dict], partners: Path) -> list[str]:
    found: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for row in rows:
        if row["part"] == "throughput":
            policy, base = row["policy"].split(", ")
            found[base, row["seed"]][policy] = row
    if not found:
        return []
    lines = [
        "\n## All jobs there at the start, one base\n",
        "Tokens of all jobs over the makespan, and slots that are full. Last: what grouping could win if every job had "
        "the best of 160 random sets of partners, and nothing stopped or ended; in brackets without bounds.\n",
        "| base | seeds | ours, tokens/s | FIFO | ratio | slots full: ours | FIFO | 1 / FIFO's | partners |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    best = {row["base"]: row for row in csv.DictReader(partners.open())} if partners.exists() else {}
    for base in dict.fromkeys(key[0] for key in found):
        runs = [of for key, of in found.items() if key[0] == base and len(of) == 2]
        if runs:
            ours, fifo = (np.mean([float(of[name]["tokens_per_s"]) for of in runs]) for name in ("ours", "fifo"))
            full, alone = (np.mean([float(of[name]["density"]) for of in runs]) for name in ("ours", "fifo"))
            lines.append(
                f"| {base} | {len(runs)} | {ours:,.0f} | {fifo:,.0f} | {ours / fifo:.2f} | {full:.2f} | {alone:.2f} "
                f"| {1 / alone:.2f} | {_partners(best.get(base))} |"
            )
    return lines


def _partners(row: dict | None) -> str:
    return f"{float(row['gain']):.2f} ({float(row['gain_without_bounds']):.2f})" if row else "–"


def _ablation(rows: Sequence[dict]) -> list[str]:
    found = [row for row in rows if row["part"] == "ablation"]
    traces = list(dict.fromkeys(row["trace"] for row in found))
    if not found:
        return []
    lines = [
        "\n## What each idea brings\n",
        "Mean completion time over that of the whole policy; 1 000 jobs, load 1.0, seed 0.\n",
        f"| | {' | '.join(traces)} | longest wait | Jain's index |",
        "|---|" + "---|" * (len(traces) + 2),
    ]
    whole = {row["trace"]: float(row["jct_mean_s"]) for row in found if row["policy"] == "ours"}
    for policy in dict.fromkeys(row["policy"] for row in found):
        runs = {row["trace"]: row for row in found if row["policy"] == policy}
        ratios = (
            f"{float(runs[trace]['jct_mean_s']) / whole[trace]:.2f}" if trace in runs else "–" for trace in traces
        )
        wait = max(float(run["longest_wait"]) for run in runs.values())
        fair = np.mean([float(run["fairness"]) for run in runs.values()])
        lines.append(f"| {policy} | {' | '.join(ratios)} | {wait:.1f} | {fair:.3f} |")
    return lines


def _speed(rows: Sequence[dict]) -> list[str]:
    return [
        f"\n## Speed\n\n{int(row['jobs']):,} jobs on {row['gpus']} GPUs: {float(row['cpu_s']):.0f} s of one core."
        for row in rows
        if row["part"] == "speed"
    ]


def _rates(path: Path) -> list[str]:
    if not path.exists():
        return []
    rows = list(csv.DictReader(path.open()))
    all_errors = np.abs([float(row["error"]) for row in rows])
    own = np.abs([float(row["own_error_worst"]) for row in rows])
    return [
        "\n## The rate model and full plans\n",
        f"{len(rows)} random groups: tokens per second differ by {all_errors.mean():.1%} in the mean, "
        f"{all_errors.max():.1%} in the worst; of each group's worst-predicted member by {own.mean():.1%} and "
        f"{own.max():.1%}.",
    ]


def _plot_loads(rows: Sequence[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = [row for row in rows if row["part"] == "loads"]
    if not found:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for policy in dict.fromkeys(row["policy"] for row in found):
        runs = sorted((row for row in found if row["policy"] == policy), key=lambda row: float(row["load"]))
        loads = [float(row["load"]) for row in runs]
        left.plot(loads, [float(row["jct_mean_s"]) / HOUR for row in runs], marker="o", label=policy)
        right.plot(loads, [float(row["jct_p99_s"]) / HOUR for row in runs], marker="o", label=policy)
    for axes, title in ((left, "mean"), (right, "p99")):
        axes.set(xlabel="load", ylabel=f"{title} completion time, hours", ylim=(0, None))
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    figure.savefig(path, dpi=120)
