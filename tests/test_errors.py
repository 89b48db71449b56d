"""Errors: readable, complete, and picklable."""

import pickle

import pytest

from lorafusion_jax.errors import ConfigError, DataError, ErrorList, raise_all


def test_an_error_says_what_where_why_and_what_to_do():
    text = str(
        DataError(
            "data.empty-loss",
            "med: no token to learn.",
            where="med.jsonl, row 3",
            why="it is cut",
            fix="data.max_length: 512",
        )
    )
    assert text.splitlines() == [
        "error[data.empty-loss] med: no token to learn.",
        "  where: med.jsonl, row 3",
        "  because it is cut",
        "  fix: data.max_length: 512",
    ]


def test_error_lists_show_all_and_have_the_gravest_exit_code():
    with pytest.raises(ErrorList) as caught:
        raise_all([ConfigError("a.b", "one."), DataError("c.d", "two.")])
    assert "one." in str(caught.value)
    assert "two." in str(caught.value)
    assert caught.value.exit_code == 2


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(DataError("a.b", "what.", where="here", fix="that")))
    assert (error.code, error.where, error.fix) == ("a.b", "here", "that")
    several = pickle.loads(pickle.dumps(ErrorList([error, error])))
    assert len(several.errors) == 2
