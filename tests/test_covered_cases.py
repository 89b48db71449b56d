"""Cases of the nightly run are covered: the case that does it exists and is of every run."""

from covered_cases import TESTS, read_cases, read_covering


def exists(case: str) -> bool:
    file, _, test = case.partition("::")
    path = TESTS / file
    return path.is_file() and (not test or f"def {test.partition('[')[0]}(" in path.read_text(encoding="utf-8"))


def test_both_exist_and_what_covers_is_not_covered_itself():
    cases, covering = read_cases(), read_covering()
    assert [case for case in sorted({*cases, *covering}) if not exists(case)] == []
    assert sorted(cases.keys() & covering) == []
    assert [case for case in sorted(covering) if case.partition("::")[0] in cases] == []


def test_what_covers_is_of_every_run(request):
    """In the files of this run, unless cases were chosen by name."""
    options = request.config.option
    if options.keyword or any("::" in argument for argument in request.config.args):
        return
    selected = {
        f"{item.path.relative_to(TESTS).as_posix()}::{item.nodeid.partition('::')[2]}" for item in request.session.items
    }
    names = selected | {case.partition("[")[0] for case in selected}
    files = {case.partition("::")[0] for case in selected}
    covering = {case for case in read_covering() if case.partition("::")[0] in files}
    assert sorted(covering - names) == []
