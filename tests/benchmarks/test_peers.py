"""Peers get the same samples as ours in microbatches that hold them, and the table counts useful tokens only."""

import csv
import json

import numpy as np

from benchmarks.peers.packing import full_steps, global_batches, pack, padded
from benchmarks.peers.report import report
from benchmarks.workloads import WORKLOADS, sample_lengths


def test_every_sample_is_in_one_microbatch():
    batches = global_batches("mix", batch=8, count=20)
    ours = sample_lengths(np.random.default_rng(WORKLOADS.index("mix")), "mix", 0, 160, 1, 4096)
    assert [length for batch in batches for length in batch] == ours
    for batch in batches:
        bins = pack(batch, 8192)
        assert sorted(length for held in bins for length in held) == sorted(batch)
        assert max(map(sum, bins)) <= 8192
        assert [length for held in padded(batch, 3) for length in held] == batch


def test_full_microbatches_are_full():
    steps = full_steps(global_batches("mix", batch=8, count=20), 8192)
    assert len(steps) > 15
    assert all(0.9 * 8192 <= sum(held) <= 8192 for (held,) in steps)


def test_the_table_has_each_program_over_the_floor_of_its_batch(tmp_path):
    ours = [
        {"variant": "frozen", "global_batch": 8, "useful_tokens_per_s": 1000.0, "density": 1.0},
        {"variant": "ours", "global_batch": 8, "useful_tokens_per_s": 900.0, "density": 0.9, "peak_gb": 51.0},
    ]
    peers = [
        {"variant": "packed", "global_batch": 8, "error": "out of memory"},
        {"variant": "default", "global_batch": 8, "useful_tokens_per_s": 200.0, "processed": 800, "seconds": 2.0},
    ]
    for name, rows in (("end_to_end", ours), ("peers", peers)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report(tmp_path)
    with (tmp_path / "peers.csv").open() as file:
        lines = {line["variant"]: line for line in csv.DictReader(file)}
    assert list(lines) == ["frozen", "ours", "default"]
    assert (lines["ours"]["over_floor"], lines["ours"]["processed_tokens_per_s"]) == ("0.9", "1000")
    assert (lines["default"]["over_floor"], lines["default"]["processed_tokens_per_s"]) == ("0.2", "400")
    assert (tmp_path / "peers.png").stat().st_size > 0
