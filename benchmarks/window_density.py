"""How full are the windows of a live session, against an offline plan of the same rows?

    python -m benchmarks.window_density --out benchmarks/results/window_density_DATE    # a minute on a CPU

Jobs have log-normal lengths like those of `place_starts.py` and `live.py`. Each row is a mix of batch sizes over
several draws: mean and standard error of the density of six windows of 48 slots, and of an offline plan of the rows
that they ran; the least quotient of both; processor seconds of a window. All but the seconds is counted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.csv_rows import append_row
from benchmarks.measured_code import write_measured
from scheduling import AdapterJob, make_plan
from scheduling.types import Limits
from scheduling.window import Cursor, Tail, plan_window

MIXES = ((4, 8, 16), (8, 8, 8), (4, 8), (4, 8, 16, 4), (4, 8, 16, 32, 4, 8), (4, 8, 16, 4, 8, 16, 4, 8))
CAPACITY, TILE, SLOTS, WINDOWS, ROWS = 8192, 128, 48, 6, 4000
MEAN, SPREAD, LONGEST = 700, 560, 2800
MOST_ADAPTERS, TOKENS_OF_A_SEGMENT = 8, 256  # of a live session


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=8)
    options = parser.parse_args()
    write_measured(options.out)
    for stages in (1, 4):
        for mix in MIXES:
            row = measure(mix, stages, options.draws)
            append_row(options.out / "density.csv", row)
            print(row, flush=True)
    return 0


def measure(mix: tuple[int, ...], stages: int, draws: int) -> dict[str, object]:
    live, offline, seconds = zip(*(draw_densities(mix, stages, seed) for seed in range(draws)), strict=True)
    return {
        "batches": " ".join(map(str, mix)),
        "stages": stages,
        "draws": draws,
        "windows": round(statistics.mean(live), 4),
        "windows_se": round(statistics.stdev(live) / math.sqrt(draws), 4),
        "offline": round(statistics.mean(offline), 4),
        "least_quotient": round(min(a / b for a, b in zip(live, offline, strict=True)), 4),
        "window_s": round(statistics.mean(seconds), 3),
    }


def draw_densities(mix: tuple[int, ...], stages: int, seed: int) -> tuple[float, float, float]:
    """Density of the windows and of an offline plan of the whole batches that they ran, and seconds of a window."""
    draw, variance = np.random.default_rng(seed), math.log(1 + (SPREAD / MEAN) ** 2)
    lengths = [
        np.clip(draw.lognormal(math.log(MEAN) - variance / 2, variance**0.5, ROWS).astype(int), 32, LONGEST).tolist()
        for _ in mix
    ]
    jobs = [AdapterJob(f"job-{at}", rows, size) for at, (rows, size) in enumerate(zip(lengths, mix, strict=True))]
    limits = Limits(capacity_tokens=CAPACITY, num_stages=stages, data_parallel=1, tile_tokens=TILE)
    tail = Tail(limits=limits, most_segments=CAPACITY // TOKENS_OF_A_SEGMENT, most_adapters=MOST_ADAPTERS)
    cursors, tokens, slots, began = [Cursor(job=job) for job in jobs], 0, 0, time.process_time()
    for _ in range(WINDOWS):
        window = plan_window(cursors, tail, SLOTS)
        cursors, tail = list(window.cursors), window.tail
        slots += len(window.slots)
        tokens += sum(lengths[int(ref.adapter[4:])][ref.sample] for slot in window.slots for ref in slot.samples)
    seconds = (time.process_time() - began) / WINDOWS
    ran = [
        AdapterJob(cursor.job.name, rows[: max(1, cursor.batch) * size], size)
        for cursor, rows, size in zip(cursors, lengths, mix, strict=True)
    ]
    offline = make_plan(ran, capacity_tokens=CAPACITY, num_stages=stages, tile_tokens=TILE)
    return tokens / slots / CAPACITY, offline.density, seconds


if __name__ == "__main__":
    raise SystemExit(main())
