"""The report page of runs that draws itself in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lorafusion_jax.api.shown import Page
from lorafusion_jax.api.status import run_numbers
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.report.page.build import ReportedRun, report_page


@dataclass(frozen=True, slots=True)
class ReportView(Page):
    """The page of `lorafusion report`; every access reads the run folders again.

    Args:
        folders: run folders, shown over each other.
    """

    folders: tuple[Path, ...]
    height = 900

    def _page(self) -> str:
        return report_page([ReportedRun(folder=folder, numbers=run_numbers(folder)) for folder in self.folders])


def make_report(runs: Sequence[str | Path]) -> ReportView:
    """Compares runs on one page, as `lorafusion report` does.

    Args:
        runs: run folders.

    Raises:
        CheckpointError: a folder holds no run.
    """
    for run in runs:
        RunFolder(Path(run)).read_record()
    return ReportView(tuple(Path(run) for run in runs))
