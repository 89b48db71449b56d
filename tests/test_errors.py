"""Errors: readable, complete, and picklable."""

import json
import pickle
import sys

import pytest

from lorafusion_jax.errors import ConfigError, DataError, ErrorList, install_line, raise_all


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


def test_a_sentence_that_ends_already_gets_no_full_stop():
    error = ConfigError(
        "a.b", "it is 'lwa'; did you mean 'law'?.", fix="did you mean 'law'?.\n  old-?.jsonl is a glob."
    )
    assert error.what == "it is 'lwa'; did you mean 'law'?"
    assert error.fix == "did you mean 'law'?\n  old-?.jsonl is a glob."
    error = DataError("a.b", "law: no file.. ../data is there, and .. is not.", why="it was 'moved.'. Wait ...")
    assert error.what == "law: no file. ../data is there, and .. is not."
    assert error.why == "it was 'moved.'. Wait ..."


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


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (None, 'pip install "datasets>=3" "huggingface-hub>=0.26"'),
        ({"url": "file:///tmp/a.whl", "archive_info": {}}, 'pip install "lorafusion-jax[hf] @ file:///tmp/a.whl"'),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            'pip install "lorafusion-jax[hf] @ git+https://host/a.git@ab12"',
        ),
    ],
)
def test_extras_are_installed_from_where_the_package_came(tmp_path, monkeypatch, origin, line):
    info = tmp_path / "lorafusion_jax-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: lorafusion-jax\nVersion: 1\nRequires-Dist: jax\n"
        "Requires-Dist: wandb; extra == 'wandb'\n"
        "Requires-Dist: datasets>=3 ; extra == 'hf'\nRequires-Dist: huggingface-hub>=0.26; extra == \"hf\"\n"
    )
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert install_line("hf", tmp_path) == line
    (tmp_path / "pyproject.toml").touch()
    assert install_line("hf", tmp_path) == f'pip install -e "{tmp_path}[hf]"'


def test_members_of_a_sweep_share_the_text_of_an_error():
    """`error` is a name, too, and what only looks like one keeps its own text."""
    members = [DataError("data.long", f"{name}: too long.", where="rows.jsonl", fix="cut") for name in ("error", "b.2")]
    others = [DataError("data.long", "c: too long.", where="others.jsonl", fix="cut"), ConfigError("a.b", "x: or y")]
    text = str(ErrorList([*members, *others]))
    assert text.startswith("error[data.long] error, b.2: too long.\n  where: rows.jsonl\n  fix: cut\n")
    assert text.count("too long") == 2
    assert text.endswith("error[a.b] x: or y")
    many = [DataError("data.long", f"m{i}: too long.") for i in range(16)]
    assert str(ErrorList(many)) == "error[data.long] m0, m1, m2, m3, m4, m5 and 10 more: too long."
