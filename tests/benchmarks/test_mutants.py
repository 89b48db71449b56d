"""The table of mutants fits the code: a mutant whose text has gone proves nothing."""

import ast

from benchmarks.mutants import ROOT, read_mutants

MUTANTS = read_mutants()


def test_the_code_holds_the_text_of_every_mutant_once():
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in {mutant.file for mutant in MUTANTS}}
    assert [mutant for mutant in MUTANTS if texts[mutant.file].count(mutant.old) != 1] == []
    for mutant in MUTANTS:
        assert mutant.old != mutant.new
        ast.parse(texts[mutant.file].replace(mutant.old, mutant.new))


def test_every_mutant_is_there_once_and_names_tests_that_exist():
    assert len({mutant[:3] for mutant in MUTANTS}) == len(MUTANTS)
    assert [mutant for mutant in MUTANTS if not (ROOT / mutant.tests).is_file()] == []
