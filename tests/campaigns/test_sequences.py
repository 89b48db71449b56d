"""Random sequences of commands lose nothing and leave no run that cannot go on."""

from __future__ import annotations

import os

import pytest
import small_jobs
from campaigns.disk import Disk
from campaigns.quick_runs import quick_runs
from campaigns.sequences import NAMES, Sequence
from more_cases import nightly

FEW, MANY, A_TEST = 12, 2000, 50
ROWS = {"ask": 7, "law": 5, "med": 9, "tax": 6, "geo": 4}


@pytest.fixture(scope="module")
def prepared_home(tmp_path_factory, make_base):
    home = tmp_path_factory.mktemp("sequences")
    for name in NAMES:
        small_jobs.write_rows(home, name, ROWS[name], longest=6)
    small_jobs.write_rows(home, "held", 2, longest=4)
    make_base(home / "base")
    return home


@pytest.fixture(scope="module")
def disk():
    return Disk()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a kill ends all threads
@pytest.mark.parametrize(
    "seeds", [range(FEW), *(nightly(range(first, first + A_TEST)) for first in range(FEW, MANY, A_TEST))], ids=str
)
def test_nothing_is_lost(seeds, prepared_home, disk, tmp_path):
    with quick_runs():
        for seed in seeds:
            home = tmp_path / str(seed)
            home.mkdir()
            for file in prepared_home.glob("*.jsonl"):
                os.link(file, home / file.name)
            Sequence(home, prepared_home / "base", seed, disk).go()
