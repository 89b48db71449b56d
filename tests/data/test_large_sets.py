"""Sets that do not fit into memory: read and tokenised in blocks, kept on disk, and equal to the same set in memory."""

from __future__ import annotations

import gc
import gzip
import hashlib
import io
import itertools
import json
import os
import subprocess
import sys
import textwrap
import tracemalloc
import types

import numpy as np
import pyarrow as pa
import pytest
from data_helpers import write_model
from pyarrow import csv as arrow_csv
from pyarrow import parquet

import lorafusion_jax.data.tokenized as tokenized
from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data import disk_arrays, row_blocks, sources
from lorafusion_jax.data.hold_out import hold_out
from lorafusion_jax.data.hub_blocks import read_table
from lorafusion_jax.data.json_blocks import json_blocks
from lorafusion_jax.data.row_files import parse_json
from lorafusion_jax.errors import LoraFusionError

ROWS = [{"prompt": f"number {n}?", "completion": "yes " * (n % 7 + 1)} for n in range(300)]
ARRAYS = ("tokens", "loss_mask", "offsets", "rows")


@pytest.fixture
def make_blocks_small(monkeypatch):
    def make():
        monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 2000)
        monkeypatch.setattr(sources, "BLOCK_BYTES", 2000)
        monkeypatch.setattr(disk_arrays, "MOST_IN_MEMORY", 1000)
        monkeypatch.setattr(disk_arrays, "BLOCK_NUMBERS", 100)

    return make


@pytest.fixture
def small_blocks(make_blocks_small):
    make_blocks_small()


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def written(folder, kind):
    path = folder / f"rows.{kind}"
    if kind == "csv":
        arrow_csv.write_csv(pa.Table.from_pylist(ROWS), path)
    elif kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=64)
    elif kind in ("json", "json.gz"):
        text = "\ufeff" + json.dumps({"version": [1, {"data": 2}], "data": ROWS} if kind == "json" else ROWS, indent=1)
        path.write_bytes(gzip.compress(text.encode()) if kind == "json.gz" else text.encode())
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines(ROWS).encode()))
    else:
        path.write_text("\ufeff" + lines(ROWS), encoding="utf-8")
    return path.name


@pytest.fixture
def load_file(tmp_path, tokenizer):
    def load(name):
        return tokenized.load_samples(
            name,
            settings=DataSettings(train=name),
            tokenizer=tokenizer,
            adapter="law",
            base_dir=tmp_path,
            cache_dir=tmp_path / "cache",
        )

    return load


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "parquet", "json", "json.gz"])
def test_blocks_give_the_set_that_memory_holds(load, load_file, tmp_path, make_blocks_small, kind, monkeypatch):
    whole = load(ROWS, name="whole.jsonl")
    assert not isinstance(whole.tokens, np.memmap)
    for entry in (tmp_path / "cache").iterdir():
        entry.unlink()
    make_blocks_small()
    counts = []
    original = tokenized._tokenize
    monkeypatch.setattr(tokenized, "_tokenize", lambda *args: counts.append(1) or original(*args))
    for _ in range(2):  # the second time from the cache
        large = load_file(written(tmp_path, kind))
        assert isinstance(large.tokens, np.memmap)
        for name in ARRAYS:
            assert np.array_equal(getattr(large, name), getattr(whole, name))
        assert large.digest == whole.digest
        assert np.array_equal(large.segment_tokens, whole.segment_tokens)
        assert (large.report.rows, large.report.longest) == (300, whole.report.longest)
    assert len(counts) > 2  # csv is shorter than JSON
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".set"]  # and nothing half written


def test_large_sets_are_held_out_like_small_ones(load, make_blocks_small):
    of_small = hold_out(load(ROWS), 0.2, "law")
    make_blocks_small()
    of_large = hold_out(load(ROWS, on_long="drop"), 0.2, "law")
    for ours, theirs in zip(of_large, of_small, strict=True):
        assert ours.digest == theirs.digest
        assert isinstance(ours.tokens, np.memmap)
        assert ours.report.loss_tokens == theirs.report.loss_tokens


def test_a_damaged_entry_of_a_large_set_is_made_anew(load, small_blocks, tmp_path):
    first = load(ROWS).digest
    (entry,) = (tmp_path / "cache").glob("*.set")
    (file,) = entry.glob("tokens*")
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)
    assert load(ROWS).digest == first


def test_bad_rows_of_all_blocks_are_named_by_their_lines(load, small_blocks):
    rows = [*ROWS]
    rows[7], rows[250] = {"prompt": "a", "completion": ""}, {"prompt": "b"}
    three = lines(rows[:100]) + "{oops\n" + lines(rows[100:])
    with pytest.raises(LoraFusionError) as caught:
        load(three + "[]\n")  # more than one of a hundred
    (note,) = [note for note in load(three).report.notes if "data.left-out" in note]
    said = str(caught.value)
    assert "2 of 300 rows have no answer.\n  where: law.jsonl, lines 8, 252\n" in said  # once for all blocks
    assert "line 101" in said
    for line in (8, 101, 252):
        assert f"line {line}" in note


def test_notes_of_all_blocks_count_the_rows_of_the_source(load, small_blocks):
    odd = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}  # no end in any row
    (note,) = [note for note in load([odd] * 250, name="tokens.jsonl").report.notes if "data.no-end" in note]
    assert note.startswith("[data.no-end] 250 of 250 rows have learned tokens")
    assert "first line 1:" in note


@pytest.mark.parametrize(
    "text",
    [
        '[{"a": "\u00fc\u20ac\U0001f600\ufeff \\ud83d\\ude00 \\n]"},'
        ' {"b": [1, {"c": null}]},\n {"d": -1.5e-7, "e": NaN}]',
        ' {"x": 12345, "y": [true, []], "data": [ {} , {"a": {"b": {"c": "}]"}}} ] , "z": "end"}\n',
    ],
)
def test_a_list_is_parsed_the_same_wherever_its_blocks_end(text):
    expected = parse_json("a.json", text).values
    for size in range(1, 24):
        blocks = list(json_blocks("a.json", io.BytesIO(text.encode()), size))
        assert repr([row for rows in blocks for row in rows.values]) == repr(expected)
        assert [rows.first for rows in blocks] == list(
            itertools.accumulate((len(rows.values) for rows in blocks[:-1]), initial=0)
        )


@pytest.mark.parametrize(
    ("text", "code", "where", "why"),
    [
        ('[{"a": 1},\n{"a": oops}]', "data.bad-json", "line 2, row 1", "Expecting value"),
        ('[{"a": 1},\n{"a": 2},]', "data.bad-json", "line 2, row 2", "Expecting value"),
        ('[{"a": 1},\n{"b": {"a": 1, "a": 2}}]', "data.bad-json", "line 2, row 1", "'a' is there twice"),
        ('[{"a": 1}\n{"a": 2}]', "data.bad-json", "line 2", "Expecting ',' or ']'"),
        ('[{"a": 1},\n{"a": "no end', "data.bad-json", "line 2, row 1", "Unterminated string"),
        ('[{"a": 1}', "data.bad-json", "line 1", "Expecting ',' or ']'"),
        ('[{"a": 1}] [2]', "data.bad-json", "line 1", "end of the file"),
        ('[{"a": 1}, 2, {}, "x"]', "data.bad-row", "a.json, row", "row 1 is a number"),
        ('[{"a": 1}, {"\\ud800": 2}]', "data.bad-json", "a.json", "half a character"),
        ('{"a": [{}]}', "data.bad-row", "a.json", "an object"),
        ('{"data": [{}], "data": [{}]}', "data.bad-json", "line 1", "not two"),
        ('{"data": [{}] "b": 1}', "data.bad-json", "line 1", "Expecting ',' or '}'"),
        ('{"data": [{}], 5: 1}', "data.bad-json", "line 1", "property name"),
        ("17", "data.bad-row", "a.json", "a number"),
        ("[" * 100_000, "data.bad-json", "line 1, row 0", "nested too deeply"),
    ],
)
def test_errors_of_a_list_name_file_and_row(text, code, where, why):
    for size in (1, 5, 1000):
        with pytest.raises(LoraFusionError) as caught:
            for _ in json_blocks("a.json", io.BytesIO(text.encode()), size):
                pass
        problem = caught.value
        assert (problem.code, where in problem.where, why in problem.why) == (code, True, True), str(problem)


class Table:
    """A data set of a hub: its rows exist while they are read."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return (ROWS[number % 300] | {"id": number, "none": None} for number in range(self.count))


def peak_of_blocks(raw):
    """Most bytes of Python objects while the rows of a source are read, and their number.

    The fewest of three times: threads that earlier tests have left, and garbage in circles, only add to them.
    """
    peaks, count = [], 0
    for _ in range(3):
        gc.collect()
        tracemalloc.start()
        count = sum(len(rows.values) for rows in sources.row_blocks(raw))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return min(peaks), count


@pytest.mark.parametrize("kind", ["json", "hub"])
def test_memory_holds_a_block_however_long_a_set_is(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 20_000)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 20_000)
    hub = types.ModuleType("datasets")
    hub.load_dataset = lambda name, split: Table(int(name))
    monkeypatch.setitem(sys.modules, "datasets", hub)
    peaks = []
    for count in (2000, 16_000):
        name = f"hf:{count}"
        if kind == "json":
            name = f"{count}.json"
            (tmp_path / name).write_text(json.dumps(list(Table(count))))
        raw = sources.open_source(name, tmp_path)
        assert raw.content is None
        peak, rows = peak_of_blocks(raw)
        assert rows == count
        peaks.append(peak)
    assert peaks[1] < 1.2 * peaks[0] < 1_000_000


def test_a_set_of_a_hub_is_the_same_in_blocks(load, load_file, make_blocks_small, monkeypatch):
    whole = load(list(Table(300)), name="whole.jsonl")
    make_blocks_small()
    hub = types.ModuleType("datasets")
    hub.load_dataset = lambda name, split: Table(300)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    large = load_file("hf:org/set")
    rows = list(Table(300))
    assert read_table(Table(300)) == (None, hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest())
    assert isinstance(large.tokens, np.memmap)
    assert all(np.array_equal(getattr(large, name), getattr(whole, name)) for name in ARRAYS)


def test_a_disk_without_room_is_an_error_that_says_so(load, small_blocks, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(LoraFusionError, match=r"data\.no-space"):
        load(ROWS)


SIZES = {"small": 100 << 20, "large": 300 << 20}
PEAK = """
    import json, sys
    from pathlib import Path
    from lorafusion_jax.config.schema import AdapterConfig, DataSettings
    from lorafusion_jax.data import load_samples, load_tokenizer
    from lorafusion_jax.data.hold_out import hold_out
    from lorafusion_jax.data.prepare import in_order

    def peak():
        return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1024

    folder, tokenizer = Path(sys.argv[1]), load_tokenizer(Path(sys.argv[2]))
    settings = DataSettings(train="rows.jsonl", max_length=2048)
    numbers = {"start": {"peak": peak()}}
    for name in ("small", "large"):
        samples = load_samples(
            f"{name}.jsonl",
            settings=settings,
            tokenizer=tokenizer,
            adapter="law",
            base_dir=folder,
            cache_dir=folder / "cache",
        )
        train, held = hold_out(samples, 0.1, "law")
        data = in_order(AdapterConfig(name="law", data=settings), train, held, None)
        assert data.digest and train.segment_tokens.sum() > 0
        numbers[name] = {"peak": peak(), "tokens": len(samples.tokens)}
    print(json.dumps(numbers))
"""


@pytest.mark.nightly
def test_peak_memory_does_not_grow_with_the_file(tmp_path, tokenizer):
    """Token rows of 100 and of 300 MB, of 27 and 80 million tokens: as Python lists they would take gigabytes."""
    draw = np.random.default_rng(0)
    rows = [json.dumps({"input_ids": draw.integers(0, 60, 1000).tolist()}) + "\n" for _ in range(200)]
    for name, size in SIZES.items():
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            number = 0
            while file.tell() < size:
                begin = f"[{number % 50}, {number // 50 % 50}, {number // 2500}, "
                file.write(rows[number % 200].replace("[", begin, 1))
                number += 1
    command = [sys.executable, "-c", textwrap.dedent(PEAK), str(tmp_path), str(write_model(tmp_path / "model"))]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "xdg")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    numbers = json.loads(done.stdout)
    print(numbers)
    assert numbers["large"]["tokens"] > 75e6
    assert (
        numbers["small"]["peak"] - numbers["start"]["peak"] < 350
    )  # MB: a block, its tokens, and a hash of each sample
    assert numbers["large"]["peak"] - numbers["small"]["peak"] < 50
