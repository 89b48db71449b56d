"""The end-to-end benchmark on a CPU: runs, table and plot."""

from __future__ import annotations

import csv
import json
import os
from argparse import Namespace
from pathlib import Path

import pytest
from forked_commands import Command
from more_cases import nightly

from benchmarks.end_to_end import VARIANTS, Bench, grown
from benchmarks.end_to_end_plot import comparable, draw, groups_of
from benchmarks.end_to_end_report import COLUMNS, from_perfetto, without_repeated_peaks
from lorafusion_jax.config.schema import MeshSettings
from scheduling import Timeline
from scheduling.comparison import host_wait_s

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BOTH = ("ours", "mlora")
SMALL = {"model": "tiny", "adapters": 2, "capacity": 256}
TWO_TARGETS = """
from functools import partial
from benchmarks import end_to_end
end_to_end.LoraSettings = partial(end_to_end.LoraSettings, targets=("q_proj", "down_proj"))  # seven compile for longer
end_to_end.main()
"""


@pytest.fixture(scope="module", params=[(("ours",), 1, 8), nightly(((*BOTH, "single_xla"), 2, 6))], ids=str)
def case(request):
    """(variants, stages, slots); a layer for each stage. Jobs have whole batches: on one stage two slots too few."""
    return request.param


@pytest.fixture(scope="module")
def folder(case, tmp_path_factory):
    (variants, stages, slots), out = case, tmp_path_factory.mktemp("end_to_end")
    sizes = SMALL | {"layers": stages, "stages": stages, "slots": slots}
    small = " ".join(f"--{name} {value}" for name, value in sizes.items()) + " --no-profile"
    command = Command(
        ["-c", TWO_TARGETS, *small.split(), "--variants", *variants, "--out", str(out)],
        os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    _, err = command.communicate()
    assert command.returncode == 0, err
    return out


@pytest.fixture
def rows(folder):
    return {row["variant"]: row for row in map(json.loads, (folder / "end_to_end.jsonl").read_text().splitlines())}


def test_a_row_per_variant_with_its_conditions(rows, case):
    variants, stages, _ = case
    assert tuple(rows) == variants
    for row in rows.values():
        assert "error" not in row
        assert {"device", "jax", "jaxlib", "date", "run"} <= row.keys()
        assert row["peak_gb"] is None  # a CPU does not count it
        assert row["mesh"] == {"stages": stages, "data": 1, "fsdp": 1}
        assert len(row["bubbles"]) == len(row["host_wait_s"]) == stages
        assert all(0 <= wait < row["seconds"] for wait in row["host_wait_s"])


def test_rates_count_tokens_in_the_slots(rows):
    for row in rows.values():
        tokens = row["useful_tokens_per_s"] * row["seconds"]
        assert row["slots"] >= 6
        assert 0.2 < tokens / (row["slots"] * row["capacity_tokens"]) <= 1


def test_joint_training_has_the_highest_density(tmp_path):
    """Times of a busy CPU say nothing, the plans do."""
    rest = {"layers": 2, "stages": 2, "data": 1, "batch": 8, "set": [], "layers_per_stage": None, "out": tmp_path}
    rest["objective"] = "sft"
    bench, mesh = Bench(Namespace(**SMALL, **rest)), MeshSettings(stages=2)
    plans = {name: bench.planned(VARIANTS[name], "mix", mesh, 6)[-1] for name in (*BOTH, "single_xla")}
    density = {
        name: sum(p.tokens for p in adapter_plans) / sum(p.room for p in adapter_plans)
        for name, adapter_plans in plans.items()
    }
    noops = {name: sum(p.num_noops for p in adapter_plans) for name, adapter_plans in plans.items()}
    assert density["ours"] >= density["mlora"] > density["single_xla"]
    assert noops["ours"] < noops["single_xla"]


def test_table_plot_and_traces_are_written(folder, rows):
    with (folder / "end_to_end.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert tuple(table[0]) == COLUMNS
    assert [float(line["useful_tokens_per_s"]) for line in table] == [r["useful_tokens_per_s"] for r in rows.values()]
    assert json.loads(table[0]["mesh"]) == rows["ours"]["mesh"]
    assert (folder / "end_to_end.png").stat().st_size > 10_000
    for name in rows.keys() & set(BOTH):  # adapters one after another are several runs
        kept = Timeline.from_json((folder / f"timeline_tiny_{name}_mix.json").read_text())
        trace = json.loads((folder / f"end_to_end_timeline_tiny_{name}_mix.perfetto.json").read_text())
        read = from_perfetto(trace)
        assert (read.num_stages, len(read.host)) == (kept.num_stages, len(kept.host))
        assert read.busy_s == pytest.approx(kept.busy_s, abs=1e-6)
        assert host_wait_s(read) == pytest.approx(host_wait_s(kept), abs=1e-6)


def test_peaks_of_earlier_variants_are_not_repeated():
    assert grown([0.0, 3.0], [50.0, 3.0]) == [50.0, None]
    assert grown([50.0, 3.0], [50.0, 3.0]) is None
    process = {"run": "first", "model": "32b", "mesh": {"stages": 2, "data": 1, "fsdp": 1}}
    other = process | {"run": "second", "peak_gb": [5.0, 4.0]}
    rows = [process | {"peak_gb": peaks} for peaks in ([5.0, 4.0], [5.0, 4.0], [6.0, 4.0], None)]
    kept = [row["peak_gb"] for row in without_repeated_peaks([*rows, other])]
    assert kept == [[5.0, 4.0], None, [6.0, None], None, [5.0, 4.0]]


def row(variant, tokens, run, *, slots=50, batch=8, **mesh):
    fields = {"model": "8b", "workload": "mix", "variant": variant, "useful_tokens_per_s": tokens, "run": run}
    fields |= {"slots": slots, "global_batch": batch, "device": "NVIDIA H200"}
    return fields | {"mesh": {"stages": 1, "data": 1, "fsdp": 1} | mesh}


def test_the_plot_takes_the_newest_rows_in_any_order(tmp_path):
    rows = [
        row("ours", 4, "2026-11-22, sixth"),
        row("ours", 3, "2026-11-22, sixth, mix"),  # as new and as long, but beside a baseline
        row("single", 2, "2026-11-22, sixth, mix"),
        row("ours", 9, "2026-11-22, third", slots=99),
        row("ours", 8, "2026-11-21 23:59:59"),
        row("ours", 7, "2026-11-23 08:00:00", data=4),  # other GPUs than published
        row("ours", 6, "2026-11-23 08:00:00", batch=16),
    ]
    for order in (rows, rows[::-1], rows[3:] + rows[:3]):
        bars = groups_of(comparable(order, "8b"), "8b")["mix"]
        assert [(bar.name, bar.tokens_per_s) for bar in bars if not bar.published] == [("single", 2), ("ours", 3)]
        assert [(bar.name, bar.tokens_per_s, bar.device) for bar in bars if bar.published] == [
            ("one adapter at a time", 10744, "H100-80GB"),
            ("LoRAFusion", 14404, "H100-80GB"),
        ]
    later = [*rows, row("ours", 5, "2026-11-22 23:00:00")]  # by its time after all that are numbered
    assert groups_of(comparable(later, "8b"), "8b")["mix"][1].tokens_per_s == 5
    draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()


def test_rows_that_no_plot_shows_draw_none(tmp_path):
    draw([row("ours_nf4", 5, "2026-11-23 08:00:00")], tmp_path / "plot.png")
    assert not (tmp_path / "plot.png").exists()


def test_published_baselines_are_complete():
    file = RESULTS / "end_to_end_h200_2026-11-22h" / "end_to_end.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    published = {
        model: {bar.name: bar.tokens_per_s for bar in groups_of(comparable(rows, model), model)["mix"] if bar.published}
        for model in ("32b", "70b")
    }
    names = ("Megatron FSDP", "Megatron PP", "mLoRA schedule", "LoRAFusion")
    assert published["32b"] == dict(zip(names, (3544, 3122, 4100, 5121), strict=True))
    assert published["70b"] == dict(zip(names, (3142, 2491, 3746, 5115), strict=True))
