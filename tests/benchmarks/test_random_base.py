"""Benchmarks of one machine share a random base, which is written once."""

import pytest

from benchmarks import random_base
from benchmarks.short_tiles import useful_share


def test_a_base_is_written_once_and_only_of_one_shape(tmp_path, monkeypatch):
    written = []

    def write(folder, shape, layers):
        written.append(layers)
        folder.mkdir()
        (folder / "config.json").write_text(f'{{"hidden_size": {shape["hidden_size"]}, "num_hidden_layers": {layers}}}')
        (folder / random_base.INDEX).write_text("{}")

    monkeypatch.setattr(random_base, "write_base", write)
    for _ in range(2):
        folder = random_base.random_base(tmp_path / "new" / "base", small=True)
    assert written == [random_base.SMALL["num_layers"]]
    assert (folder / "tokenizer.json").is_file()
    with pytest.raises(ValueError, match="another shape"):
        random_base.random_base(folder, small=False)


def test_a_base_that_was_cut_off_is_written_again(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()  # without the index, which is written last
    monkeypatch.setattr(random_base, "write_base", lambda folder, *_: (folder / random_base.INDEX).write_text("{}"))
    with pytest.raises(FileNotFoundError, match="config"):
        random_base.random_base(tmp_path / "base", small=True)
    assert (tmp_path / "base" / random_base.INDEX).exists()


def test_shorter_tiles_waste_fewer_rows():
    assert 0.82 < useful_share(128) < 0.84
    assert useful_share(128) < useful_share(64) < useful_share(32) < useful_share(16) < 1
