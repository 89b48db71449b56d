"""Lines of commits that a text names are summed, those of others are not."""

import subprocess

from benchmarks.net_lines import net_lines


def test_only_named_commits_count(tmp_path):
    def commit(message: str, **files: str | None) -> None:
        for name, text in files.items():
            file = tmp_path / "tests" / name
            file.parent.mkdir(exist_ok=True)
            file.unlink() if text is None else file.write_text(text)
        for command in (("add", "-A"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", message)):
            subprocess.run(["git", "-C", str(tmp_path), *command], check=True)

    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    commit("Begin", first="1\n2\n3\n", second="1\n")
    commit("Shorten\n\nOne house: told twice.", first="1\n", second=None)
    commit("Add\n\nOne house: more.", third="1\n2\n")
    lines, files = net_lines(tmp_path, "One house")
    assert (lines, files) == ({"tests": -1}, {"tests": 0})
    assert net_lines(tmp_path, "Nothing") == ({}, {})
