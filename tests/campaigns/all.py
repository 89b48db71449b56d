"""All campaigns of thousands of cases, side by side on the cores of one machine.

    PYTHONPATH=tests python -m campaigns.all --cores 14 --seconds 520 --out FOLDER
    PYTHONPATH=tests python -m campaigns.all --only sequences --seeds 1012 2000 --shard 1/4 --out FOLDER

| campaign | a case |
|---|---|
| `sequences` | a random sequence of commands, kills, signals and one damaged file |
| `kills_of_changes` | SIGKILL before some calls of a run that begins, is extended, moves, loses adapters or gets some |
| `several_processes` | the same of a run of two processes, which one process resumes |
| `write_errors` | some errors of a disk, of five, each at one call of these, once or from then on |
| `exports` | the same kills and errors of `lorafusion export`, also with `--merge` |
| `hostile` | damaged and strange input of every reader, with limits of processor time and memory |

Every case is a forked process, and whichever campaign has used the least processor time is next. After `--seconds` no
case begins, and those under way end, which takes half a minute at most. FOLDER gets `rows.jsonl`, a row as soon as a
case ends, and `summary.csv`. Cases with a row are not made again: the same command with the same FOLDER goes on. The
exit code is 1 if anything was lost.

Needs what the package needs, pytest, hypothesis, beartype, and a C compiler for disk_calls.c, or `--library` with what
it was compiled to. Devices are simulated on the CPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # whatever the machine has, cases need none of it

import jax
import orbax.checkpoint  # noqa: F401  imported here once for all cases
from campaigns.cases import LOST, Campaign, Pool, Rows, shards
from campaigns.disk_calls import preload, source_digest
from campaigns.exports import Exports
from campaigns.hostile import Hostile
from campaigns.kills_of_changes import KillsOfChanges
from campaigns.sequences import Sequences
from campaigns.several_processes import SeveralProcesses
from campaigns.write_errors import WriteErrors

import lorafusion_jax.training  # noqa: F401
from benchmarks.conditions import conditions
from benchmarks.csv_rows import write_rows

CAMPAIGNS: dict[str, Callable[[argparse.Namespace], Campaign]] = {
    "sequences": lambda options: Sequences(range(*options.seeds)),
    "kills_of_changes": lambda options: KillsOfChanges(),
    "several_processes": lambda options: SeveralProcesses(),
    "write_errors": lambda options: WriteErrors(),
    "exports": lambda options: Exports(),
    "hostile": lambda options: Hostile(),
}


def main() -> int:
    began, options = time.monotonic(), _options()
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="campaigns-", dir=options.work))
    preload(options.library.resolve(), "campaigns.all")
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_compilation_cache_dir", str(work / "programs"))  # all processes share it
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_disable_most_optimizations", True)
    rows = Rows(options.out / "rows.jsonl")
    pool = Pool(rows, work, options.cores)
    try:
        campaigns = {name: CAMPAIGNS[name](options) for name in options.only}
        homes = {name: work / name for name in campaigns}
        pool.prepare(list(campaigns.values()), homes)
        print(f"prepared after {time.monotonic() - began:.0f} s", flush=True)
        cases = {
            name: list(shards(campaign.cases(homes[name]), *options.shard)) for name, campaign in campaigns.items()
        }
        pool.run(cases, began + options.seconds)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for name in cases:
        made = len({case for campaign, case in rows.done if campaign == name})
        print(f"{name}: {made} of {len(cases[name])} cases")
    write_summary(rows, options.out / "summary.csv")
    print(f"{len(rows.rows)} rows, {len(rows.lost)} lost, {time.monotonic() - began:.0f} s")
    return int(bool(rows.lost))


def write_summary(rows: Rows, file: Path) -> None:
    """A line for each part of a campaign; only at the end, as a process that has started a device cannot be forked.

    A run makes some calls more at one time than at another, so a late kill or error may meet none: it does not count.
    """
    parts = defaultdict(list)
    for row in rows.rows:
        if row.get("failed", 1) or row["result"] == LOST:
            parts[row["campaign"], row.get("part", "")].append(row)
    facts = conditions()
    lines = [
        {
            "campaign": campaign,
            "part": part,
            "cases": sum(row.get("inputs", 1) for row in group),
            "lost": sum(row["result"] == LOST for row in group),
            "most_cpu_s": max(row["cpu_s"] for row in group),
            "most_mb": max(row["peak_mb"] for row in group),
        }
        | facts
        for (campaign, part), group in sorted(parts.items())
    ]
    for line in lines:
        print("  ".join(str(value) for value in list(line.values())[:6]))
    if lines:
        write_rows(file, lines)


def _options() -> argparse.Namespace:
    memory = Path("/dev/shm")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="cases that run side by side")
    parser.add_argument("--seconds", type=float, default=10**9, help="after which no case begins")
    parser.add_argument("--only", nargs="+", choices=list(CAMPAIGNS), default=list(CAMPAIGNS))
    parser.add_argument("--seeds", nargs=2, type=int, default=[0, 2000], help="of sequences: first, and end")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="every N-th case from the I-th on")
    parser.add_argument("--work", type=Path, default=memory if memory.is_dir() else None, help="for temporary files")
    library = Path(tempfile.gettempdir()) / f"disk_calls-{os.getuid()}" / f"{source_digest()}.so"
    parser.add_argument("--library", type=Path, default=library, help="compiled disk_calls.c")
    return parser.parse_args()


def _shard(text: str) -> tuple[int, int]:
    number, count = (int(part) for part in text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return number, count


if __name__ == "__main__":
    sys.exit(main())
