"""Job files and finished runs for the tests of the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_helpers import Job, Outcome, make_job, snapshot

from lorafusion_jax.cli.main import run


@pytest.fixture(autouse=True)
def _quick(kept_programs):
    """Every test here runs programs of a tiny model."""


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """The programs of a module are those of the next one: nearly all train one job."""


@pytest.fixture
def lorafusion(capsys) -> Callable[..., Outcome]:
    """Runs the command line inside this process."""

    def call(*arguments) -> Outcome:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return Outcome(code=code, out=shown.out, err=shown.err)

    return call


@pytest.fixture
def job(tmp_path, tiny_base) -> Job:
    return make_job(tmp_path, tiny_base)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, tiny_base, kept_programs) -> Iterator[tuple[Job, Path]]:
    """A job and its finished run; nobody changes them."""
    job = make_job(tmp_path_factory.mktemp("finished"), tiny_base)
    out = job.folder / "run"
    assert run(["train", str(job.path), "--out", str(out)]) == 0
    before = snapshot(job.folder)
    yield job, out
    assert snapshot(job.folder) == before, "a test changed the shared run"
