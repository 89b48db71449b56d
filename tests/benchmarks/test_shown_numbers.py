"""Numbers that README and docs show are made by `make tables`, or stated with where they are from."""

import pytest

from benchmarks import shown_numbers
from benchmarks.figures import pattern
from benchmarks.shown_numbers import ROOT, documents, stated, unmade


@pytest.mark.parametrize("document", documents())
def test_numbers_are_made_or_stated(document):
    rows = list(unmade(document, (ROOT / document).read_text(encoding="utf-8")))
    assert rows == [], "make them (benchmarks/figures.py), or say where they are from (data/stated_numbers.csv)"


def test_every_stated_number_is_shown():
    texts = {document: (ROOT / document).read_text(encoding="utf-8") for document in documents()}
    assert [entry for entry in stated() if not pattern(entry.text).search(texts[entry.document])] == []
    assert all(entry.source for entry in stated())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("It takes 12.5 ms and 4 to 9 % more.", ["12.5 ms", "4 to 9 %"]),
        ("of 1 024\ntokens/s 1.31", ["1.31"]),
        ("a peak of 43 GB; `took 3 s`", ["43 GB"]),
        ("errors of 2e-6, with jax 0.12 and dropout 0.1, 8 adapters", ["2e-6"]),
        ("```\n7 s\n```\n1.2 ×", ["1.2 ×"]),
        ("<!-- table: sizes -->\n| 3.5 ms |\n<!-- end of table -->\n12 k", ["12 k"]),
    ],
)
def test_what_counts_as_a_number(text, shown, monkeypatch):
    monkeypatch.setattr(shown_numbers, "FIGURES", ())
    assert [number for _, number in unmade("a.md", text)] == shown
