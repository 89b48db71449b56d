"""Chooses by evaluations: the best step of each adapter, adapters that stop improving, and successive halving.

A decision is taken when an evaluation is read, which happens at the same slot in every run, and is kept in the progress
of the run. So a resumed run decides the same. The loop drains the pipeline at the next slot, and the plan is revised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from lorafusion_jax.config.schema import EarlyStopSettings
from lorafusion_jax.planning.turns import compared
from lorafusion_jax.report.format import loss_text
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.state import AdapterProgress, Progress


class Selection:
    """Takes the evaluations of a run and sets `AdapterProgress.stop`."""

    def __init__(self, job: Job, progress: Progress):
        self._job, self._progress = job, progress

    def evaluates_between(self, name: str, step: int) -> bool:
        """Whether an adapter is evaluated after this step, even if it is not its last."""
        every, adapter = self._job.config.train.eval_every_steps, self._progress.adapters[name]
        if str(step) in adapter.compared:  # which may be no share of its steps any more, if it ended there
            return True
        return bool(every and step % every == 0) or self._job.config.halving.compares_at(step, adapter.num_steps)

    def take(self, name: str, step: int, metrics: Mapping[str, float]) -> bool:
        """Counts an evaluation. Returns whether it is the adapter's best."""
        if step == 0:  # before training
            return False
        adapter, settings = self._progress.adapters[name], self._settings(name)
        value = metrics.get(settings.metric, math.nan)  # a ratio of nothing is left out
        is_best = _record(adapter, settings, step, value)
        if adapter.status == "running" and not adapter.stop and step < adapter.num_steps:
            adapter.stop = _lost_patience(adapter, settings, step)
        if self._job.config.halving.compares_at(step, adapter.num_steps):
            adapter.compared[str(step)] = value if math.isfinite(value) else None
        self.compare()
        return is_best

    def compare(self) -> None:
        """Compares the adapters that wait for nobody: after an evaluation, a failure or a change."""
        for group in self._groups():
            self._halve(group)

    def _settings(self, name: str) -> EarlyStopSettings:
        return self._job.config.adapter(name).early_stop

    def _groups(self) -> Iterator[list[AdapterProgress]]:
        if self._job.config.halving.is_on:
            for names in compared(self._job.config, self._job.prepared, self._progress.adapters):
                yield [self._progress.adapters[name] for name in names]

    def _halve(self, group: Sequence[AdapterProgress]) -> None:
        """Compares the adapters of a group at each step, of its own or of all, that all of them have reached.

        One that comes to a step later, added or after a pause, is compared with the results that were there.
        """
        halving = self._job.config.halving
        for mark in halving.marks(max(adapter.num_steps for adapter in group)):
            steps = {adapter.name: halving.step_of(mark, adapter.num_steps) for adapter in group}
            newest = max(adapter.passed for adapter in group)
            waits_for = [a for a in group if a.status == "running" and a.is_awaited and a.passed >= newest]
            if mark > newest and any(a.step < steps[a.name] <= a.num_steps for a in waits_for):
                return
            for adapter in group:
                adapter.late |= adapter.passed < mark <= newest
            compared = [a for a in group if str(steps[a.name]) in a.compared and (a.passed >= mark or _competes(a))]
            self._stop_worst(compared, steps, mark)

    def _stop_worst(self, compared: Sequence[AdapterProgress], steps: Mapping[str, int], mark: int) -> None:
        """Stops those of the worst that have not passed this comparison yet."""
        settings = self._settings(compared[0].name) if compared else EarlyStopSettings()
        keep = -(-len(compared) // self._job.config.halving.factor)
        results = {adapter.name: adapter.compared[str(steps[adapter.name])] for adapter in compared}
        ranked = sorted(compared, key=lambda adapter: settings.sort_key(results[adapter.name]))
        for position, adapter in enumerate(ranked, 1):
            if adapter.passed >= mark:
                continue
            step = steps[adapter.name]
            adapter.passed = mark
            ends = adapter.status == "running" and not adapter.extended and step < adapter.num_steps
            if position > keep and ends:
                result = f"{settings.metric} {_number(results[adapter.name])}"
                adapter.stop = (
                    f"halved at step {step} of {adapter.num_steps}: {result} is number {position} of {len(ranked)}"
                )


def _competes(adapter: AdapterProgress) -> bool:
    return adapter.status in ("running", "done") and not adapter.stop


def _record(adapter: AdapterProgress, settings: EarlyStopSettings, step: int, value: float) -> bool:
    """Updates the best result and the number of results that were no better."""
    counts = settings.is_better(value, adapter.best, settings.min_delta)
    is_best = settings.is_better(value, adapter.best)
    adapter.stale = 0 if counts else adapter.stale + 1
    if is_best:
        adapter.best_step, adapter.best = step, value
    return is_best


def _lost_patience(adapter: AdapterProgress, settings: EarlyStopSettings, step: int) -> str:
    """Why an adapter stops; empty if it goes on."""
    if settings.patience is None or adapter.stale < settings.patience:
        return ""
    than = "a finite one" if adapter.best is None else f"{_number(adapter.best)} of step {adapter.best_step}"
    times = "1 evaluation" if adapter.stale == 1 else f"{adapter.stale} evaluations"
    return f"at step {step} of {adapter.num_steps}: {settings.metric} no better than {than} in {times}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else loss_text(value)
