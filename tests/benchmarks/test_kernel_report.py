"""The tables of the kernel benchmark only compare rows of one run and exclude failures."""

import csv
import dataclasses
import json

import pytest

from benchmarks.kernel_report import read, write
from pallas_kernels.cost import H200, LayerCost


def op(variant, time, **changes):
    row = {"shape": "8192x4096->14336", "variant": variant, "adapters": 1, "rank": 16, "rate": 0.1}
    return row | {"p20_us": time - 1, "p50_us": time, "p80_us": time + 1} | changes


def lines(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def table(file):
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_ratios_compare_rows_of_one_run(tmp_path):
    conditions = {"conditions": {"device": "NVIDIA H200", "jax": "0.11.2", "date": "2026-11-22"}}
    slow = lines(
        tmp_path / "slow.jsonl", conditions, op("frozen", 1000.0, rate=0.0), op("xla", 1500.0), op("xla_naive", 1400.0),
        op("pallas_mosaic_gpu", 1100.0), op("pallas_mosaic_gpu", 1300.0, adapters=4), {"name": "x", "error": "no time"},
    )  # fmt: skip
    quick = lines(tmp_path / "quick.jsonl", op("frozen", 500.0, rate=0.0), op("pallas_mosaic_gpu", 600.0))
    (written,) = write([slow, quick], tmp_path / "kernels")
    rows = [row for row in table(written) if row["variant"] == "pallas_mosaic_gpu"]
    assert [float(row["over_frozen"]) for row in rows] == pytest.approx([1.1, 1.3, 1.2])
    assert float(rows[0]["best_xla_over_this"]) == pytest.approx(1400 / 1100, abs=1e-4)
    assert rows[1]["best_xla_over_this"] == rows[2]["best_xla_over_this"] == ""  # no XLA form of that job in that run
    assert [row["jax"] for row in rows] == ["0.11.2", "0.11.2", ""]
    assert {row["file"] for row in rows} == {f"{tmp_path.name}/slow.jsonl", f"{tmp_path.name}/quick.jsonl"}
    assert (rows[0]["tokens"], rows[0]["in_features"], rows[0]["out_features"]) == ("8192", "4096", "14336")


def test_floors_exist_for_our_forms_and_measured_gpus_only(tmp_path):
    ops = [
        op(variant, 2000.0, rate=rate, adapters=adapters)
        for variant, rate, adapters in (
            ("frozen", 0.0, 1), ("frozen_default", 0.0, 1), ("pallas_mosaic_gpu", 0.1, 4),
            ("pallas_mosaic_gpu", 0.0, 1), ("default", 0.1, 4), ("pallas_triton", 0.1, 4),
            ("xla", 0.1, 4), ("xla_naive", 0.1, 1), ("ragged_dot", 0.1, 4),
        )
    ]  # fmt: skip
    card = {"conditions": {"device": "NVIDIA H200"}}
    other = {"conditions": {"device": "NVIDIA H100 80GB HBM3"}}
    files = [lines(tmp_path / "h200.jsonl", card, *ops), lines(tmp_path / "h100.jsonl", other, *ops)]
    files.append(lines(tmp_path / "unknown.jsonl", *ops))
    written, _ = write(files, tmp_path / "kernels")
    rows = table(written)
    assert {row["floor_us"] for row in rows if not row["file"].endswith("/h200.jsonl")} == {""}
    floors = [row["floor_us"] for row in rows if row["file"].endswith("/h200.jsonl")]
    plain = LayerCost(tokens=8192, in_features=4096, out_features=14336, rank=16)
    four = dataclasses.replace(plain, adapters=4, dropout=True).floor_s(H200)
    seconds = [plain.frozen_floor_s(H200)] * 2 + [four, plain.floor_s(H200), four, four]
    assert [float(floor) for floor in floors[:6]] == pytest.approx([1e6 * second for second in seconds], abs=0.05)
    assert floors[6:] == ["", "", ""]


def test_later_files_replace_rows_of_earlier_files(tmp_path):
    old = lines(
        tmp_path / "old.jsonl", op("frozen", 1000.0, rate=0.0), op("xla_naive", 1300.0), op("default", 1200.0),
        op("ragged_dot", 3000.0), op("default", 1500.0, shape="8192x5120->5120"),
    )  # fmt: skip
    new = lines(tmp_path / "new.jsonl", op("frozen", 900.0, rate=0.0), op("xla_naive", 1250.0), op("default", 990.0))
    ops, summary, *_ = write([old, new], tmp_path / "kernels")
    sources = {(row["in_features"], row["variant"]): (row["file"], row["over_frozen"]) for row in table(ops)}
    assert len(sources) == len(table(ops)) == 5
    assert sources["4096", "default"] == (f"{tmp_path.name}/new.jsonl", "1.1")
    assert sources["4096", "ragged_dot"] == (
        f"{tmp_path.name}/old.jsonl",
        "3.0",
    )  # measured beside the old frozen layer
    (line,) = table(summary)
    assert line["files"] == f"{tmp_path.name}/new.jsonl"  # the other shape has no frozen layer to compare with
    assert line["ragged_dot_over_this_mean"] == ""  # not of one run


def test_the_summary_is_of_the_default_over_all_shapes(tmp_path):
    single = [op("frozen", 1000.0, rate=0.0), op("xla_naive", 1300.0), op("xla", 1250.0), op("default", 1100.0)]
    four = [
        op(kind, time, adapters=4) for kind, time in (("xla_wide", 1440.0), ("ragged_dot", 2400.0), ("default", 1200.0))
    ]
    other = [row | {"shape": "8192x5120->5120", "p50_us": 2 * row["p50_us"]} for row in single[:3]]
    other.append(op("default", 2600.0, shape="8192x5120->5120"))
    files = [lines(tmp_path / "a.jsonl", *single, *four), lines(tmp_path / "b.jsonl", *other)]
    _, written = write(files, tmp_path / "kernels")
    alone, together = table(written)
    assert (alone["adapters"], alone["shapes"], together["adapters"], together["shapes"]) == ("1", "2", "4", "1")
    assert (float(alone["over_frozen_mean"]), float(alone["over_frozen_worst"])) == (1.2, 1.3)
    assert float(alone["plain_xla_over_this_mean"]) == pytest.approx((1300 / 1100 + 1) / 2, abs=1e-3)
    assert float(alone["best_xla_over_this_worst"]) == pytest.approx(2500 / 2600, abs=1e-3)
    assert alone["ragged_dot_over_this_mean"] == alone["over_one_adapter_mean"] == ""
    assert float(together["plain_xla_over_this_mean"]) == 1.2
    assert float(together["ragged_dot_over_this_mean"]) == 2.0
    assert float(together["over_one_adapter_worst"]) == pytest.approx(1200 / 1100, abs=1e-3)


def test_failures_plans_and_conditions_are_not_rows(tmp_path):
    others = ({"planned": ["a"], "group": "shape"}, {"name": "a", "error": "b"}, {"skipped": "no ncu"})
    file = lines(tmp_path / "ops.jsonl", {"conditions": {"device": "cpu"}}, *others, op("xla", 1.0))
    assert [(row["variant"], row["device"], row["file"]) for row in read(file)] == [
        ("xla", "cpu", f"{tmp_path.name}/ops.jsonl")
    ]


def layer(variant, time, **changes):
    row = {"part": "layer 8B", "variant": variant, "adapters": 4, "rate": 0.1, "tokens": 8192}
    return row | {"p20_us": time - 1, "p50_us": time, "p80_us": time + 1} | changes


@pytest.mark.parametrize("lost", ["ops", "layer"])
def test_tables_are_written_without_a_frozen_row(tmp_path, lost):
    """It may have failed, or have had no time left."""
    failed = {"name": "frozen", "error": "no time left"}
    ops = [failed if lost == "ops" else op("frozen", 500.0, rate=0.0), op("pallas_mosaic_gpu", 600.0, adapters=4)]
    layers = [failed if lost == "layer" else layer("frozen", 9.0, adapters=1, rate=0.0), layer("ours", 10.0)]
    files = [lines(tmp_path / "ops.jsonl", *ops), lines(tmp_path / "layer.jsonl", *layers)]
    written = write(files, tmp_path / "kernels")
    assert [file.name for file in written] == ["kernels_ops.csv", "kernels_layers.csv"]  # and no plot
