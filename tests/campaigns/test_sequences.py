"""Random sequences of commands lose nothing and leave no run that cannot go on."""

from __future__ import annotations

import pytest
from campaigns.disk import Disk
from campaigns.quick_runs import quick_runs
from campaigns.sequences import Sequence, link_rows, prepare_rows
from more_cases import nightly

FEW, MANY, A_TEST = 6, 2000, 50
ONCE_LOST = [
    1013,  # dropped before the run's first checkpoint
    789,  # dropped while it finished its batch
    942,  # finished at an earlier step than that of a folder which a kill had left
    620,  # the event of its end was damaged
    251,  # config.yaml was cut to settings that can be read
]


@pytest.fixture(scope="module")
def prepared_home(tmp_path_factory, make_base):
    home = tmp_path_factory.mktemp("sequences")
    prepare_rows(home)
    make_base(home / "base")
    return home


@pytest.fixture(scope="module")
def disk():
    return Disk()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a kill ends all threads
@pytest.mark.parametrize(
    "seeds",
    [
        range(FEW),
        *([seed] for seed in ONCE_LOST),
        *(nightly(range(first, first + A_TEST)) for first in range(FEW, MANY, A_TEST)),
    ],
    ids=str,
)
def test_nothing_is_lost(seeds, prepared_home, disk, tmp_path):
    with quick_runs():
        for seed in seeds:
            home = tmp_path / str(seed)
            home.mkdir()
            link_rows(prepared_home, home)
            Sequence(home, prepared_home / "base", seed, disk).go()
