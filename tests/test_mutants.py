"""The list of mutants (mutation/mutants.py) is of this program: `make mutants` itself takes too long for a test."""

import ast
from collections import Counter

from mutants import TESTS, read_mutants
from program import ROOT

MUTANTS = read_mutants()


def test_a_mutant_changes_nothing_or_what_is_not_there():
    sources = {file: (ROOT / file).read_text() for file in {mutant.file for mutant in MUTANTS}}
    unchanged = {file: ast.dump(ast.parse(source)) for file, source in sources.items()}
    for mutant in MUTANTS:
        changed = mutant.mutate(sources[mutant.file])  # raises unless its lines are there exactly once
        assert ast.dump(ast.parse(changed)) != unchanged[mutant.file], mutant
        assert mutant.reason, mutant
    assert [name for name, count in Counter(map(str, MUTANTS)).items() if count > 1] == []
    assert len(MUTANTS) >= 150


def test_a_mutant_names_tests_that_are_not_there():
    for mutant in MUTANTS:
        assert mutant.tests, mutant
        for name in mutant.tests:
            file, _, test = name.partition("::")
            test = test.partition("[")[0]
            assert not test or f"def {test}(" in (TESTS / file).read_text(), f"{mutant}: {name}"
