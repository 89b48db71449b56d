"""How a run ended: its result, or why it stopped before the end of its plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.report.events import RunFinished, RunStopped
from lorafusion_jax.training.state import AdapterProgress
from scheduling import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a run.

    Attributes:
        seconds: time spent in slots, over all processes of the run.
        had_finished: the run had finished before, and nothing was left to do.
    """

    folder: Path
    adapters: dict[str, AdapterProgress]
    seconds: float
    plan: Plan
    had_finished: bool = False

    @property
    def exit_code(self) -> int:
        failed = [adapter.status == "failed" for adapter in self.adapters.values()]
        return 0 if not any(failed) else 1 if all(failed) else 3

    def event(
        self, peak_bytes: int | None = None, *, evaluation_s: float | None = None, saving_s: float | None = None
    ) -> RunFinished:
        """Returns the event that reports this result."""
        return RunFinished(
            slot=len(self.plan.slots),
            exit_code=self.exit_code,
            seconds=round(self.seconds, 3),
            peak_bytes=peak_bytes,
            evaluation_s=evaluation_s,
            saving_s=saving_s,
        )


def stop_event(problem: BaseException, slot: int) -> RunStopped:
    """Returns the event that records why training stopped early."""
    code = problem.code if isinstance(problem, LoraFusionError) else type(problem).__name__
    return RunStopped(slot=slot, code=code, what=_summary(problem))


def _summary(problem: BaseException) -> str:
    """Describes in one line why training stopped."""
    if isinstance(problem, LoraFusionError):
        return problem.what
    if isinstance(problem, KeyboardInterrupt):  # a second signal, or one before the first microbatch
        return "at once, by a signal"
    return str(problem).partition("\n")[0][:300] or type(problem).__name__
