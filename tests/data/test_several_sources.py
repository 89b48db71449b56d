"""Training data from lists, folders and globs, with weights, and rows that are tokens already."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from lorafusion_jax.config.data_sources import as_written
from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.read import Source
from lorafusion_jax.config.schema import AdapterConfig, BatchSettings, DataSettings
from lorafusion_jax.data import load_samples, row_blocks, sources
from lorafusion_jax.data.prepare import Mix, in_order, load_sources
from lorafusion_jax.data.sources import expand_source, read_rows
from lorafusion_jax.errors import DataError, LoraFusionError
from lorafusion_jax.report.data_notes import _notes_of_set

ROWS = [{"prompt": f"{number} + 1?", "completion": str(number + 1)} for number in range(20)]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def load_all(tmp_path, tokenizer):
    """load_all(data section) → AdapterData of an adapter with these sources."""

    def load(seed=3, epochs=1, max_steps=None, **section):
        adapter = AdapterConfig(name="law", data=DataSettings(**section), seed=seed, epochs=epochs, global_samples=4)

        def one(source):
            return load_samples(
                source,
                settings=adapter.data,
                tokenizer=tokenizer,
                adapter="law",
                base_dir=tmp_path,
                cache_dir=tmp_path / "cache",
            )

        samples, weights = load_sources(adapter.data.train, tmp_path, one)
        return in_order(adapter, samples, None, max_steps, weights)

    return load


def test_a_list_is_the_joined_file_bit_for_bit(load_all, tmp_path):
    write(tmp_path / "whole.jsonl", ROWS)
    write(tmp_path / "a.jsonl", ROWS[:7])
    write(tmp_path / "b.jsonl", ROWS[7:])
    joined, whole = load_all(train=["a.jsonl", "b.jsonl"], epochs=3), load_all(train="whole.jsonl", epochs=3)
    assert joined.digest == whole.digest
    assert [joined.sample_at(p) for p in range(60)] == [whole.sample_at(p) for p in range(60)]
    assert joined.train.report.rows == 20
    assert joined.train.rows.tolist() == [*range(7), *range(13)]  # of their files


def test_kinds_may_be_mixed_and_packed(load_all, tmp_path):
    write(tmp_path / "whole.jsonl", ROWS)
    table = pa.Table.from_pylist
    write(tmp_path / "mix" / "a.jsonl", ROWS[:4])
    (tmp_path / "mix" / "b.json").write_text(json.dumps(ROWS[4:8]))
    arrow_csv.write_csv(table(ROWS[8:12]), tmp_path / "mix" / "c.csv")
    parquet.write_table(table(ROWS[12:16]), tmp_path / "mix" / "d.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS[16:]).encode()
    half = len(lines) // 2 + lines[len(lines) // 2 :].index(b"\n") + 1
    (tmp_path / "mix" / "e.jsonl.gz").write_bytes(gzip.compress(lines[:half]))
    with pa.OSFile(str(tmp_path / "mix" / "f.jsonl.zst"), "wb") as file, pa.CompressedOutputStream(file, "zstd") as out:
        out.write(lines[half:])
    (tmp_path / "mix" / "README.md").write_text("not rows")
    (tmp_path / "mix" / ".hidden.jsonl").write_text("not rows")
    whole = load_all(train="whole.jsonl").digest
    assert load_all(train="mix").digest == whole
    assert load_all(train="mix/").digest == whole
    assert load_all(train=["mix/[ab].*", "mix/[c-z]*"]).digest == whole
    assert load_all(train=str(tmp_path / "mix")).digest == whole
    assert expand_source("mix", tmp_path) == [f"mix/{name}" for name in expand_names(tmp_path)]


def test_the_folder_of_a_job_is_no_pattern(tmp_path):
    folder = tmp_path / "jobs[1-2]*"
    write(folder / "mix" / "a[1].jsonl", ROWS[:2])
    write(folder / "mix" / "b.jsonl", ROWS[2:4])
    assert expand_source("mix/*.jsonl", folder) == ["mix/a[1].jsonl", "mix/b.jsonl"]
    assert expand_source("mix/a[1].jsonl", folder) == ["mix/a[1].jsonl"]
    assert expand_source(str(folder / "mix"), folder) == [
        str(folder / "mix" / name) for name in ("a[1].jsonl", "b.jsonl")
    ]


def expand_names(folder):
    return sorted(file.name for file in (folder / "mix").iterdir() if file.suffix != ".md" and file.name[0] != ".")


def test_weights_take_a_share_of_each_epoch_and_all_rows_in_turn(load_all, tmp_path):
    write(tmp_path / "a.jsonl", ROWS[:5])
    write(tmp_path / "b.jsonl", ROWS[5:15])
    data = load_all(train=["a.jsonl", {"path": "b.jsonl", "weight": 0.3}], epochs=10)
    assert data.epoch_samples == 8
    epochs = data.order.reshape(10, 8)
    assert all(sorted(epoch[epoch < 5]) == list(range(5)) for epoch in epochs)
    assert np.bincount(data.order).tolist() == [10] * 5 + [3] * 10
    twice = load_all(train=[{"path": "a.jsonl", "weight": 2}, {"path": "b.jsonl", "weight": 1e-6}], epochs=2)
    assert np.bincount(twice.order[:11])[:5].tolist() == [2] * 5
    assert twice.epoch_samples == 11
    occurrences = [twice.sample_at(position) for position in range(22)]
    assert len(set(occurrences)) == 22  # no dropout mask is drawn twice
    assert sorted(before for before, row in occurrences if row == 0) == [0, 1, 2, 3]


def test_the_order_is_fixed_by_seed_and_continues_where_it_was(load_all, tmp_path):
    write(tmp_path / "a.jsonl", ROWS[:5])
    write(tmp_path / "b.jsonl", ROWS[5:])
    sources = ["a.jsonl", {"path": "b.jsonl", "weight": 1.5}]
    longer, shorter = load_all(train=sources, epochs=3), load_all(train=sources, epochs=2)
    assert np.array_equal(longer.order[: len(shorter.order)], shorter.order)
    assert not np.array_equal(load_all(train=sources, epochs=2, seed=4).order, shorter.order)
    mix = Mix(parts=None, num_samples=9, weights=(1.0,), seed=5)
    assert np.array_equal(mix.epoch(2), np.random.default_rng((5, 2)).permutation(9))


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "1", True, 1001, [1], None])
def test_wrong_weights_are_refused(weight):
    job = {
        "base": {"model": "base"},
        "adapters": [{"name": "law", "data": {"train": ["a.jsonl", {"path": "b.jsonl", "weight": weight}]}}],
    }
    with pytest.raises(LoraFusionError, match=r"data\.train' must be a weight from 1e-06 to 1000, not"):
        parse_config(Source(path=__import__("pathlib").Path("jobs.yaml"), values=job))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([], "a list of 1 to 1024 files"),
        ([{"weight": 1}], "a table with path and weight"),
        ([{"path": "a.jsonl", "wieght": 1}], "a table with path and weight"),
        (["a.jsonl", "a.jsonl"], "a.jsonl stands there twice: give it a weight of 2"),
        ([["a.jsonl"]], "a table with path and weight"),
    ],
)
def test_other_lists_are_refused(value, text):
    with pytest.raises(ValueError, match=text):
        DataSettings(train=value)
    with pytest.raises(ValueError, match=text):
        DataSettings(train="b.jsonl", eval=value)


def test_held_out_files_have_no_weights():
    assert as_written(DataSettings(train="a", eval=["b", "c"]).eval) == ["b", "c"]
    with pytest.raises(ValueError, match="all held-out rows are evaluated once"):
        DataSettings(train="a", eval=[{"path": "b", "weight": 2}])


@pytest.mark.parametrize("train", ["a.jsonl", ["a.jsonl", {"path": "b/*.csv", "weight": 0.5}]])
def test_settings_are_written_as_they_were(train):
    settings = DataSettings(train=train)
    assert settings.model_dump(mode="json")["train"] == train
    assert DataSettings.model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize("source", ["empty", "nothing/*.jsonl", "missing.jsonl"])
def test_sources_without_files_are_named(tmp_path, source):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("x")
    with pytest.raises(LoraFusionError, match=r"data\.missing-file") as caught:
        [read_rows(file, tmp_path) for file in expand_source(source, tmp_path)]
    assert source in str(caught.value)


def test_every_lost_row_is_counted_and_named_with_its_file(load_all, tmp_path):
    write(tmp_path / "a.jsonl", ROWS)
    write(tmp_path / "b.jsonl", [*ROWS[:3], {"prompt": "q " * 40, "completion": "a"}])
    data = load_all(train=["a.jsonl", "b.jsonl"], on_long="drop", max_length=32)
    assert [report.too_long for report in data.train.report.files] == [(), (3,)]
    settings = DataSettings(train="a", on_long="drop", max_length=32)
    (note,) = _notes_of_set(data.train, settings, BatchSettings(tile_tokens=16), 1024)
    assert note.startswith("b.jsonl: 1 of 4 rows (25.0 %) exceed 32 tokens and are left out: row 3")


TOKENS = [
    {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "attention_mask": [1, 1, 1, 1]},
    {"input_ids": [9, 10, 0, 0], "labels": [-100, 10, -100, -100], "attention_mask": [1, 1, 0, 0]},
]


def test_rows_of_tokens_are_taken_as_they_are(load):
    samples = load(TOKENS)
    assert samples.report.format == "tokens"
    assert samples.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert samples.loss_mask.tolist() == [False, False, True, True, False, True]
    without_labels = load([{"input_ids": [5, 6, 7]}])
    assert without_labels.loss_mask.tolist() == [False, True, True]
    assert load(TOKENS, loss="all").loss_mask.tolist() == [False, True, True, True, False, True]
    named = load([{"ids": [5, 6]}], columns={"input_ids": "ids"}, format="tokens")
    assert named.tokens.tolist() == [5, 6]


def test_rows_of_tokens_are_cut_like_others(load):
    samples = load([{"input_ids": list(range(5, 25))}], max_length=8)
    assert samples.lengths.tolist() == [8]
    assert samples.report.cut == 1


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"input_ids": "5 6"}, "'input_ids' is not a list of whole numbers"),
        ({"input_ids": [5, True]}, "'input_ids' is not a list of whole numbers"),
        ({"input_ids": [5, -1]}, "'input_ids' has a number below 0"),
        ({"input_ids": [5, 6], "labels": [5]}, "'labels' has 1 entries, and 'input_ids' 2"),
        ({"input_ids": [5, 6], "labels": [-100, 7]}, "'labels' has 7 at position 1, where the token is 6"),
        ({"input_ids": [5, 6], "labels": [5, 6], "attention_mask": [1, 2]}, "'attention_mask' is not 2 times 0 or 1"),
        ({"input_ids": [5, 6], "labels": [5, 6], "attention_mask": [0, 0]}, "it has no token"),
    ],
)
def test_rows_that_are_no_tokens_are_named(load, row, why):
    with pytest.raises(LoraFusionError, match=r"data\.bad-tokens") as caught:
        load([*TOKENS, row])
    assert "law.jsonl, line 3" in str(caught.value)
    assert f"line 3: {why}" in str(caught.value)


SHOPS = [{"text": f"text {number}", "shop": shop} for number, shop in enumerate(["x", 7, "x", True, None, "7"])]


@pytest.mark.parametrize(("value", "numbers"), [("x", [0, 2]), (7, [1, 5]), ("true", [3]), (True, [3])])
def test_where_chooses_the_rows_of_a_value(load, value, numbers):
    samples, rows = load(SHOPS, where={"shop": value}), load([SHOPS[number] for number in numbers], name="own.jsonl")
    assert samples.rows.tolist() == numbers
    np.testing.assert_array_equal(samples.tokens, rows.tokens)
    assert (samples.report.rows, samples.report.notes) == (len(numbers), ())


def test_chosen_rows_keep_their_lines_in_large_files_too(load, monkeypatch):
    for module in (sources, row_blocks):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    with pytest.raises(LoraFusionError, match=r"law\.jsonl, line 3"):
        load([*SHOPS[:2], {"shop": "x", "text": ""}, *SHOPS[3:]], where={"shop": "x"}, on_bad="error")
    assert load(SHOPS, name="again.jsonl", where={"shop": "7"}).rows.tolist() == [1, 5]


@pytest.mark.parametrize(
    ("where", "why"), [({"shop": "y"}, "there are x, 7, true"), ({"town": "x"}, "no row has town")]
)
def test_values_that_no_row_has_are_an_error(load, where, why):
    with pytest.raises(DataError, match=r"data\.where") as raised:
        load(SHOPS, where=where)
    assert raised.value.why == why
