"""Progress of a run, which is with the pipeline's arrays the content of a checkpoint, and how a run ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lorafusion_jax.errors import CheckpointError, LoraFusionError
from lorafusion_jax.report.events import RunFinished, RunStopped
from lorafusion_jax.session.task import AdapterProgress
from scheduling import Plan

# Format of a checkpoint: of its states, and of the fields below. 2 and 4 have one tree of arrays. The first files of 2
# said `replicas`, which were all devices of a stage, and its later ones have the fields of 5 (3 was never written). 6
# says who came late to a comparison of halving, and who was extended after an early stop.
FORM, READ = 6, (2, 4, 5, 6)
OTHER_VERSION = "resume the run with the version of lorafusion-jax that wrote it; its files are as they were written"


@dataclass(slots=True, kw_only=True)
class Progress:
    """Everything besides arrays that a resumed run needs to continue bitwise.

    Attributes:
        slot: number of slots done.
        plan: digest of the plan.
        stage_devices: number of devices of a stage; partial gradient sums are per device.
    """

    adapters: dict[str, AdapterProgress]
    stage_devices: int = 1
    slot: int = 0
    plan: str = ""
    seconds: float = 0.0

    @property
    def unwritten(self) -> list[AdapterProgress]:
        """Adapters that took their last step but whose folder could not be written."""
        return [
            adapter
            for adapter in self.adapters.values()
            if adapter.status == "failed" and adapter.step == adapter.num_steps
        ]

    @property
    def not_awaited(self) -> list[str]:
        """Adapters for which no comparison of halving waits."""
        return [name for name, adapter in self.adapters.items() if not adapter.is_awaited]

    def drop(self, stopped: Iterable[tuple[str, int]]) -> list[AdapterProgress]:
        """Marks running adapters that the plan stops as failed, and returns them."""
        dropped = [
            (adapter, slot)
            for adapter, slot in ((self.adapters.get(name), slot) for name, slot in stopped)
            if adapter is not None and adapter.status == "running"  # an adapter that joins later is dropped then
        ]
        for adapter, slot in dropped:
            adapter.fail(f"dropped by hand at slot {slot}")
        return [adapter for adapter, _ in dropped]

    @staticmethod
    def first(steps: Mapping[str, int], *, stage_devices: int, plan: str) -> Progress:
        """Returns the progress at the start of a run.

        Args:
            steps: number of steps of each adapter.
        """
        adapters = {name: AdapterProgress(name=name, num_steps=count) for name, count in steps.items()}
        return Progress(adapters=adapters, stage_devices=stage_devices, plan=plan)

    def position(self) -> dict[str, Any]:
        """Returns the progress as a checkpoint stores it."""
        return {"form": FORM} | asdict(self)

    @staticmethod
    def of(position: dict[str, Any]) -> Progress:
        """Inverse of `position`.

        Raises:
            CheckpointError: `run.later-version`, another version wrote it: its format or its fields are not known.
        """
        form = position.get("form")
        if form not in READ:
            raise CheckpointError(
                "run.later-version",
                f"checkpoint {position.get('slot')} has format {form}; this version reads {', '.join(map(str, READ))}.",
                fix=OTHER_VERSION,
            )
        fields = {key: value for key, value in position.items() if key != "form"}
        if form == 2 and "replicas" in fields:
            fields["stage_devices"] = fields.pop("replicas")
        try:
            adapters = {name: AdapterProgress(**row) for name, row in fields["adapters"].items()}
            return Progress(**(fields | {"adapters": adapters}))
        except (KeyError, TypeError, AttributeError) as problem:
            raise CheckpointError(
                "run.later-version",
                f"checkpoint {position.get('slot')} has other fields than this version knows.",
                why=str(problem),
                fix=OTHER_VERSION,
            ) from None


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
