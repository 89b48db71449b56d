"""Figures of docs/pages/reliability.md, from the newest rows of damage.py, kills.py, sick_adapters.py, soak.py,
joins.py, verify_sweeps.py, fuzzing.py and all.py, and from the golden file of TRL's templates.

python -m campaigns.reliability_table    # prints the table
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TEMPLATES = ROOT / "tests" / "data" / "golden" / "trl.json"
ACTIONS = ("pause", "continue", "cancel", "finish", "extend", "weight", "add", "SIGKILL", "SIGTERM")
SIDE_BY_SIDE = {
    "sequences": "more such sequences, with a seed each",
    "kills_of_changes": "SIGKILL before any call of a run that begins or changes, also before writes and syncs",
    "several_processes": "the same of the first of two processes, resumed by one, and kills of either",
    "write_errors": "ENOSPC, EIO, EROFS, EDQUOT or EACCES at a call of these, once or from then on",
    "exports": "the same kills and errors of `lorafusion export`, also with `--merge`",
    "hostile": "hostile inputs, fuzzed and by hand",
}
_DATED = re.compile(r"\d{4}-\d{2}-\d{2}[a-z]?$")


def table() -> str:
    """The table in Markdown."""
    killed = (_kills(), _changes(), _exports(), _sequences(), _side_by_side())
    parts = (_damage(), _resumed(), *killed, _sick(), _verified(), _fuzzing(), _templates(), _soak(), _joins())
    return "\n".join(["| what | attempts | result |", "|---|---|---|", *chain.from_iterable(parts)]) + "\n"


def is_good(row: Mapping[str, object]) -> bool:
    """Whether a killed run lost nothing: it ended bitwise as it should, and a signal was heard."""
    text = {key: str(value) for key, value in row.items()}
    if text["kind"] in ("SIGTERM", "SIGINT") and (text["code"] not in ("0", "130") or not text["acknowledged_s"]):
        return False
    same = text["bitwise"] == "True" and text["resumed"] == "0"
    return same and not text["leftovers"] and text["traceback"] == "False"


def _rows(name: str) -> list[dict[str, str]]:
    """All rows of the newest folder of a benchmark; none where it was never run."""
    folders = sorted(folder for folder in RESULTS.glob(f"{name}_cpu_*") if _DATED.search(folder.name))
    lines: list[dict[str, str]] = []
    for file in sorted(folders[-1].glob("*.csv")) if folders else ():
        with file.open(encoding="utf-8") as stream:
            lines += csv.DictReader(stream)
    return lines


def _damage() -> Iterator[str]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for row in _rows("damage"):
        if row["folder"] == "resumed run":
            continue
        counts[row["folder"], row["damage"], row["result"]] += int(row["count"])
    kinds = {"flip": "single-bit flips", "cut": "cut files"}
    for folder, damage in sorted({key[:2] for key in counts}, reverse=True):
        named, harmless, missed = (counts[folder, damage, result] for result in ("named", "harmless", "MISSED"))
        total = named + harmless + missed
        result = f"{named:,} named, {harmless} harmless, {missed} missed"
        yield f"| {kinds[damage]}, {folder} folder | {total:,} | {result} |"


def _resumed() -> Iterator[str]:
    counts: Counter[str] = Counter()
    for row in _rows("damage"):
        if row["folder"] == "resumed run":
            counts["MISSED" if row["result"].startswith("MISSED") else row["result"]] += int(row["count"])
    if counts:
        named, refused = counts["named, same adapters"], counts["refused by name"]
        result = f"{named} named and repaired, {refused} refused by name, {counts['same adapters']} not needed"
        yield f"| flips and cuts, then `resume` | {counts.total():,} | {result}, {counts['MISSED']} missed |"


def _kills() -> Iterator[str]:
    names = {
        "SIGKILL": "SIGKILL at random instants",
        "call": "SIGKILL before a rename, fsync, unlink, mkdir or link of a run",
        "SIGTERM": "SIGTERM at random instants",
        "SIGINT": "SIGINT at random instants",
    }
    rows = _rows("kills")
    for kind, text in names.items():
        matching = [row for row in rows if row["kind"] == kind and not _came_too_late(row)]
        if matching:
            good = sum(is_good(row) for row in matching)
            heard = [float(row["acknowledged_s"]) for row in matching if row["acknowledged_s"]]
            after = f", acknowledged after {max(heard):.2f} s at most" if heard else ""
            yield f"| {text} | {len(matching):,} | {good:,} resumed bitwise, nothing left over{after} |"


def _changes() -> Iterator[str]:
    """Kills before system calls of a resume that changes the run."""
    counts = Counter(row["result"] for row in _rows("kills_of_changes"))
    if counts:
        what = "SIGKILL before a call while adapters join, are extended, are dropped or the run moves"
        yield f"| {what} | {counts.total():,} | {counts['whole']:,} resumed to the undisturbed end |"


def _sequences() -> Iterator[str]:
    rows = _rows("sequences")
    if rows:
        total, lost = (sum(int(row[key]) for row in rows) for key in ("sequences", "lost"))
        what = "random sequences of commands, kills, signals and one damaged file, without devices"
        yield f"| {what} | {total:,} | {total - lost:,} lost nothing and could go on |"


def _side_by_side() -> Iterator[str]:
    """What `campaigns.all` made: hostile inputs with their largest cost, and what its other campaigns lost."""
    campaigns: dict[str, list[dict[str, str]]] = {}
    for row in _rows("all"):
        campaigns.setdefault(row["campaign"], []).append(row)
    for campaign, what in SIDE_BY_SIDE.items():
        if parts := campaigns.get(campaign):
            total, lost = (sum(int(row[key]) for row in parts) for key in ("cases", "lost"))
            result = f"{total - lost:,} lost nothing"
            if campaign == "hostile":
                seconds, size = (max(float(row[key]) for row in parts) for key in ("most_cpu_s", "most_mb"))
                result = f"{lost} traces; at most {seconds:.1f} s of the processor and {size:.0f} MB for one"
            yield f"| {what} | {total:,} | {result} |"


def _exports() -> Iterator[str]:
    for kind in ("export", "export --merge"):
        matching = [row for row in _rows("kills") if row["kind"] == kind and row["code"] != "0"]
        if matching:
            good = sum(is_good(row) for row in matching)
            yield f"| the same, of `lorafusion {kind}` | {len(matching)} | {good} never half, complete when repeated |"


def _came_too_late(row: dict[str, str]) -> bool:
    """Whether the run had ended before it was killed."""
    return row["kind"] in ("SIGKILL", "call") and row["code"] == "0"


def _sick() -> Iterator[str]:
    counts = Counter((row["mesh"], row["others"]) for row in _rows("sick_adapters"))
    for mesh in sorted({mesh for mesh, _ in counts}):
        total = counts[mesh, "bitwise"] + counts[mesh, "DIFFER"]
        yield f"| one sick adapter of three, {mesh} | {total:,} | {counts[mesh, 'bitwise']:,} with the others bitwise |"


def _verified() -> Iterator[str]:
    """Joint and separate training compared by `lorafusion verify`: honest sweeps, and faults in the joint one."""
    rows = _rows("verify_sweeps")
    for dtype in ("float32", "bfloat16"):
        shares = [float(row["of_bound"]) for row in rows if row["case"].startswith(f"{dtype}-")]
        alarms = sum(share > 1 for share in shares)
        result = f"{alarms} false alarms, at most {max(shares):.2f} of the bound"
        yield f"| `verify` of random sweeps, {dtype} | {len(shares)} | {result} |"
    shares = [float(row["of_bound"]) for row in rows if row["kind"] == "planted fault"]
    caught = sum(share > 1 for share in shares)
    result = f"{caught} found, at least {min(shares):.0f} times the bound"
    yield f"| `verify` of planted faults, float32 | {len(shares)} | {result} |"


def _fuzzing() -> Iterator[str]:
    for row in _rows("fuzzing"):
        yield f"| fuzzing: {row['kind']} | {int(row['cases']):,} | {row['result']} |"


def _templates() -> Iterator[str]:
    golden = json.loads(TEMPLATES.read_text(encoding="utf-8"))
    rows = [row for case in golden["cases"].values() for row in case["rows"].values()]
    counts = Counter(row[kind] for row in rows for kind in ("ours", "ours, unmarked") if kind in row)
    equal = counts["equal"] + counts["equal text"]
    result = (
        f"{equal:,} equal, {counts['equal but for line ends']} but for line ends, "
        f"{counts['equal but for the prompt']} but for words of the prompt, "
        f"{counts['different mask']} with another mask, {counts['different text']} with another text; "
        f"refused: {counts['refused by both']} by both, {counts['refused by transformers']} by transformers, "
        f"{counts['drop a call']} by us as a call would be lost, {counts['refused by us']} by us else"
    )
    versions = ", ".join(f"{name} {version}" for name, version in golden["versions"].items())
    size = f"{len(golden['cases'])} templates × {len(next(iter(golden['cases'].values()))['rows'])} conversations"
    yield f"| chat templates of TRL, with and without generation blocks ({versions}) | {size} | {result} |"


def _soak() -> Iterator[str]:
    for row in _rows("soak"):
        if "slots" not in row:
            continue
        asked = ", ".join(f"{row[key]} × {key}" for key in ACTIONS if row[key] != "0")
        what = f"{row['adapters']} adapters, {int(row['slots']):,} slots, {int(row['steps']):,} steps; {asked}"
        yield f"| soak | {what} | {row['missing']} things not accounted for; {_memory()} |"


def _joins() -> Iterator[str]:
    sizes = [float(row["resident_mb"]) for row in _rows("joins") if "joined" in row]
    if sizes:
        result = f"{sizes[0]:,.0f} MB after the first, {sizes[-1]:,.0f} MB after the last, at most {max(sizes):,.0f} MB"
        yield f"| adapters that join one process, one after another | {len(sizes)} | {result} |"


def _memory() -> str:
    """Growth of a process over its longest sitting, from when all its programs are there."""
    sittings: dict[str, list[tuple[int, float]]] = {}
    for row in _rows("soak"):
        if "resident_mb" in row:
            sittings.setdefault(row["sitting"], []).append((int(row["slot"]), float(row["resident_mb"])))
    longest = max(sittings.values(), key=lambda samples: samples[-1][0] - samples[0][0])
    samples = [(slot, size) for slot, size in longest if slot and size]
    middle = (samples[0][0] + samples[-1][0]) / 2
    first, last = (max(size for slot, size in samples if slot <= most) for most in (middle, samples[-1][0]))
    sitting = f"memory of the longest sitting, slots {samples[0][0]:,} to {samples[-1][0]:,}"
    return f"{sitting}: at most {first:,.0f} MB in its first half, {last:,.0f} MB in all"


if __name__ == "__main__":
    print(table())
