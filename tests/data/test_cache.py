import os

import numpy as np
import pytest

import lorafusion_jax.data.tokenized as tokenized
from lorafusion_jax.data import cache

ROWS = [{"prompt": "2+2?", "completion": "four"}, {"prompt": "3+3?", "completion": "six"}]


@pytest.fixture
def tokenised(monkeypatch):
    """Counts how often rows are really tokenised."""
    calls = []
    original = tokenized._tokenize
    monkeypatch.setattr(tokenized, "_tokenize", lambda *args: calls.append(1) or original(*args))
    return calls


def entries(tmp_path):
    return sorted((tmp_path / "cache").glob("*.tokens"))


def test_second_time_comes_from_the_cache_and_is_the_same(load, tokenised):
    first, second = load(ROWS), load(ROWS)
    assert len(tokenised) == 1
    assert first.report == second.report
    assert first.digest == second.digest
    assert np.array_equal(first.rows, second.rows)
    assert first.tokens.dtype == second.tokens.dtype


def test_a_copy_under_another_name_is_found(load, tokenised):
    load(ROWS)
    assert load(ROWS, name="copy.jsonl").report.source == "copy.jsonl"
    assert len(tokenised) == 1


@pytest.mark.parametrize(
    "change",
    [{"max_length": 12}, {"loss": "all"}, {"on_long": "drop"}, {"format": "prompt"}, {"columns": {"prompt": "prompt"}}],
)
def test_other_settings_are_another_entry(load, tokenised, change):
    load([*ROWS] * 20)
    load([*ROWS] * 20, **change)
    assert len(tokenised) == 2


def test_other_content_tokenizer_and_template_are_other_entries(load, tokenised, plain_tokenizer, marked_tokenizer):
    load(ROWS)
    load(ROWS[:1])
    load(ROWS, tokenizer=plain_tokenizer)
    load(ROWS, tokenizer=marked_tokenizer)
    assert len(tokenised) == 4


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_damaged_entry_is_made_anew(load, tokenised, tmp_path, damage):
    first = load(ROWS)
    [entry] = entries(tmp_path)
    content = entry.read_bytes()
    entry.write_bytes(content[: len(content) // 2] if damage is None else damage)
    assert load(ROWS).digest == first.digest
    assert len(tokenised) == 2
    assert load(ROWS).digest == first.digest
    assert len(tokenised) == 2


def test_flipped_bit_is_noticed(load, tokenised, tmp_path):
    first = load(ROWS)
    [entry] = entries(tmp_path)
    content = bytearray(entry.read_bytes())
    at = content.find(first.tokens.tobytes())
    content[at] ^= 1
    entry.write_bytes(content)
    assert load(ROWS).digest == first.digest
    assert len(tokenised) == 2


def test_errors_are_not_cached(load, tokenised):
    for _ in range(2):
        with pytest.raises(ValueError, match=r"data\.no-answer"):
            load([{"prompt": "a", "completion": ""}])
    assert len(tokenised) == 2


def test_unwritable_folder_costs_nothing_but_time(load, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert len(load(ROWS)) == 2


def test_nothing_half_written_stays(load, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert len(load(ROWS)) == 2
    assert list((tmp_path / "cache").iterdir()) == []


def test_oldest_entries_go_first(load, tmp_path, monkeypatch):
    load(ROWS)
    [old] = entries(tmp_path)
    monkeypatch.setattr(cache, "LARGEST_BYTES", old.stat().st_size + 10)
    load(ROWS[:1])
    assert old not in entries(tmp_path)
    assert len(entries(tmp_path)) == 1


def test_an_entry_that_is_read_goes_last(load, tmp_path, monkeypatch):
    load(ROWS)
    [read] = entries(tmp_path)
    load(ROWS[:1])
    [other] = set(entries(tmp_path)) - {read}
    for seconds, entry in enumerate((read, other)):
        os.utime(entry, (seconds, seconds))
    load(ROWS)
    monkeypatch.setattr(cache, "LARGEST_BYTES", read.stat().st_size * 5 // 2)
    load(ROWS[1:])
    assert read in entries(tmp_path)
    assert other not in entries(tmp_path)


def test_many_entries_do_not_list_the_folder_each(load, monkeypatch):
    """A thousand adapters store a thousand entries: the folder is listed at the first, and when much was added."""
    listed = []
    monkeypatch.setattr(cache, "_shrink", listed.append)
    monkeypatch.setattr(cache, "UNSEEN", {})
    for number in range(8):
        load([*ROWS] * (number + 1))
    assert len(listed) == 1
    monkeypatch.setattr(cache, "LARGEST_BYTES", 16)
    load(ROWS[1:])
    assert len(listed) == 2
