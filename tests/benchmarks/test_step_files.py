"""A step of a plain run calls only what it needs."""

import pytest

from benchmarks.step_files import ROOT, files_of_a_step

NOT_NEEDED = ("rollouts", "references", "links", "distant_stage", "plugins", "optim/", "config/", "session/session")


@pytest.mark.nightly  # follows every call of a run
def test_a_step_touches_few_files():
    calls = files_of_a_step(ROOT / "examples" / "base")
    assert len(calls) <= 25
    assert [file for file in calls if any(part in file for part in NOT_NEEDED)] == []
