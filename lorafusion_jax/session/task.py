"""An adapter that trains in a session: its data, its position and its schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol

import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.config.specs import adapter_spec, model_targets, tokenizer_file
from lorafusion_jax.data.assemble import (
    Piece,
    Weights,
    batch_loss_tokens,
    piece_of,
    pieces_of,
    sample_key,
    segment_weights,
)
from lorafusion_jax.data.prepare import AdapterData, Prepared
from lorafusion_jax.data.references import TRAIN, SetReferences, add_references, sets_of
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.objective.protocol import Chosen
from lorafusion_jax.optim.schedules import learning_rates
from lorafusion_jax.optim.step import Hyper, hyper
from lorafusion_jax.planning.training_plan import train_jobs
from scheduling import AdapterJob, SampleRef
from scheduling.window import Cursor

# preparing: its reference is being computed; leaving: it takes no more steps
Status = Literal["preparing", "running", "leaving", "paused", "done", "cancelled", "failed"]


@dataclass(slots=True, kw_only=True)
class AdapterProgress:
    """Progress of one adapter.

    Attributes:
        step: number of optimizer steps taken.
        num_steps: number of steps in the plan.
        reason: why it failed, was cancelled or was stopped early.
        stop: why it should be stopped early; empty if it should not.
        best_step, best: the step with the best held-out result so far, and the result.
        stale: evaluations in a row that were no better.
        compared: step of successive halving → result, None for one that is not finite.
        passed: the last comparison with others it took part in: a step, or under `halving.first_share` a number.
        late: whether it came to a comparison after the others; then nobody waits for it.
        extended: whether it goes on by request after an early stop; then no comparison stops it.
    """

    name: str
    num_steps: int
    step: int = 0
    status: Status = "running"
    reason: str = ""
    stop: str = ""
    best_step: int = 0
    best: float | None = None
    stale: int = 0
    compared: dict[str, float | None] = field(default_factory=dict)
    passed: int = 0
    late: bool = False
    extended: bool = False

    @property
    def stop_pending(self) -> bool:
        """Whether it should be stopped early and its plan does not stop it yet."""
        return bool(self.stop) and self.status == "running" and not self.reason

    @property
    def is_awaited(self) -> bool:
        """Whether the others of a comparison wait for it, if it is running: nobody waits for one that may not lose."""
        return not (self.stop or self.late or self.extended)

    @property
    def failure(self) -> str:
        """Why the adapter failed; empty if it did not."""
        return self.reason if self.status == "failed" else ""

    def pause(self) -> None:
        """Takes no steps until `resume`; a begun batch waits with its sums."""
        self.status = "paused"

    def resume(self) -> None:
        self.status = "running"

    def cancel(self, reason: str) -> None:
        """Takes no steps any more."""
        self.status, self.reason = "cancelled", reason

    def fail(self, reason: str) -> None:
        self.status, self.reason = "failed", reason

    def end_at(self, step: int, reason: str = "") -> None:
        """Ends after another step than planned."""
        self.num_steps, self.reason = step, reason
        self.status = "done" if self.step == step else "running"

    def extend(self, num_steps: int) -> None:
        """Goes on to more steps, also after the last one that was planned or after an early stop."""
        self.num_steps, self.status, self.extended = num_steps, "running", self.extended or bool(self.stop)
        self.stop, self.reason, self.stale = "", "", 0


class Source(Protocol):
    """Where the next rows of a task come from, and the numbers of its steps, which count from 1.

    `Samples` is known to its end. A source without an end has rows as they arrive: its cursor ends at the last of them.
    """

    @property
    def digest(self) -> str:
        """Of its rows and their order."""
        ...

    @property
    def sets(self) -> Mapping[str, TokenizedSet]:
        """Rows that are known from the start, by name (`TRAIN`, `EVAL`)."""
        return {}

    @property
    def owner(self) -> str:
        """Of a training client; empty for a job. Owners have turns, see `Turns`."""
        return ""

    @property
    def targets(self) -> int:
        """Size of the table of its rows in microbatches, see `RowTable`; 0: they need none."""
        return 0

    @property
    def judges_steps(self) -> bool:
        """Whether a refused step is told by `end_step` and later ones go on; then steps are issued one at a time."""
        return False

    def cursor(self, step: int) -> Cursor | None:
        """Returns the position after a step, for windows; None if there are no rows now."""
        ...

    def refresh(self, cursor: Cursor | None) -> Cursor | None:
        """Returns a position with the rows that have arrived since, before a window is planned."""
        return cursor

    def advance(self, cursor: Cursor) -> Cursor | None:
        """Is told the position after the slots that were issued. Returns that of the next window."""
        return cursor

    def closes(self, batch: int) -> bool:
        """Whether the optimizer steps after a batch of the cursor."""
        del batch  # unused
        return True

    def take_sums(self, *, exist: bool) -> None:
        """Is told whether the state that was loaded has sums of gradients that no step has used."""

    def end_step(self, step: int, norm: float, refused: str = "") -> None:
        """Is told the result of a step; `refused` says why it was not taken."""

    def pieces(self, samples: Sequence[SampleRef], place: int) -> list[Piece]:
        """Looks up rows, for the adapter in a place."""
        ...

    def hyper(self, step: int) -> Hyper: ...
    def num_loss_tokens(self, step: int) -> int:
        del step  # unused
        return 0

    def metrics(self, step: int) -> Mapping[str, float]:
        """Returns what is known of the rows of a step besides the metrics of the objective."""
        del step  # unused
        return {}

    def reweight(self, weight: float) -> None:
        """Changes the share of the session relative to others."""
        ...

    def take_references(self, references: SetReferences) -> None:
        """Is given what its reference says of its sets."""

    def close(self, why: str = "") -> None:
        """Ends it with its task."""


@dataclass(slots=True, kw_only=True)
class Samples(Source):
    """The samples of a job's adapter, in their order: a source that is known to its end.

    Attributes:
        job: the samples for the planner.
        rates: learning rate of each step.
        numbers: the others of each step, at a rate of 0.
        loss_tokens: number of loss tokens of each global batch.
        weights: factors of the mean over each global batch.
    """

    adapter: AdapterConfig
    data: AdapterData
    job: AdapterJob
    rates: np.ndarray
    numbers: Hyper
    loss_tokens: Sequence[int]
    weights: Sequence[Weights]

    @classmethod
    def of(cls, config: JobConfig, prepared: Prepared) -> Samples:
        """Builds the source of a job with one adapter."""
        (adapter,), (job,) = config.adapters, train_jobs(config, prepared)
        data = prepared.adapters[adapter.name]
        return cls(
            adapter=adapter,
            data=data,
            job=job,
            rates=step_rates(adapter, data),
            numbers=hyper(adapter.optim, 0.0),
            loss_tokens=batch_loss_tokens(data, adapter.global_samples).tolist(),
            weights=list(batch_weights(adapter, data, config.train.router_aux)),
        )

    @property
    def digest(self) -> str:
        return self.data.digest

    @property
    def sets(self) -> Mapping[str, TokenizedSet]:
        return sets_of(self.data)

    def cursor(self, step: int) -> Cursor:
        return Cursor(job=self.job, batch=step, segments=self.adapter.objective.chosen.num_segments)

    def pieces(self, samples: Sequence[SampleRef], place: int) -> list[Piece]:
        return pieces_of(samples, self.data, place, self.weights)

    def hyper(self, step: int) -> Hyper:
        return self.numbers._replace(lr=np.float32(self.rates[step - 1]))

    def num_loss_tokens(self, step: int) -> int:
        return self.loss_tokens[step - 1]

    def reweight(self, weight: float) -> None:
        self.job = replace(self.job, weight=weight)

    def take_references(self, references: SetReferences) -> None:
        self.data = add_references(self.data, references)


@dataclass(slots=True, kw_only=True)
class Rollouts(Samples):
    """The rows that an adapter samples itself, batch by batch: `RolloutData.batches` has those that are drawn."""

    clock: AdapterProgress

    @property
    def sets(self) -> Mapping[str, TokenizedSet]:
        return {TRAIN: self.data.train}  # with room for answers; held-out prompts are answered instead

    def pieces(self, samples: Sequence[SampleRef], place: int) -> list[Piece]:
        """Looks up rows.

        Raises:
            KeyError: their batch is not drawn. An adapter that has failed never draws it; its rows become padding.
        """
        if self.clock.status == "failed":
            return pieces_of(samples, self.data, place, self.weights)
        assert self.data.rollout is not None
        starts, pieces = self.data.batch_starts(self.adapter.global_samples), []
        for ref in samples:
            batch_samples = self.data.rollout.batches[ref.batch].samples
            weights = Weights(1.0, 1.0 / len(batch_samples), segment_weights(batch_samples))
            key = sample_key(*self.data.sample_at(ref.sample))
            pieces.append(piece_of(batch_samples, ref.sample - int(starts[ref.batch]), place, weights, key=key))
        return pieces

    def num_loss_tokens(self, step: int) -> int:
        return int(self._metrics(step).get("loss_tokens", 0))

    def metrics(self, step: int) -> Mapping[str, float]:
        return {name: value for name, value in self._metrics(step).items() if name != "loss_tokens"}

    def _metrics(self, step: int) -> Mapping[str, float]:
        assert self.data.rollout is not None
        batch = self.data.rollout.batches.get(step - 1)
        return {} if batch is None else batch.metrics


@dataclass(slots=True, kw_only=True)
class Task:
    """One adapter of a session.

    Attributes:
        config: job of this adapter alone; its base, batch capacity and mesh are those of the session.
        source: gives its rows.
        clock: its progress, which the session changes.
        references: what its reference says of its samples; None: there is none, or it is not computed yet.
        cursor: next samples for windows.
        chosen: its objective with its settings.
    """

    config: JobConfig
    spec: AdapterSpec
    source: Source
    clock: AdapterProgress
    references: SetReferences | None = None
    cursor: Cursor | None = field(init=False)
    chosen: Chosen = field(init=False)

    def __post_init__(self):
        self.chosen = self.adapter.objective.chosen
        self._rewind()
        if self.references is not None:
            self.source.take_references(self.references)

    @classmethod
    def of(
        cls,
        config: JobConfig,
        prepared: Prepared,
        references: SetReferences | None = None,
        clock: AdapterProgress | None = None,
    ) -> Task:
        """Builds the task of a job with one adapter.

        Args:
            clock: its progress (None: it starts).
        """
        (adapter,), source = config.adapters, Samples.of(config, prepared)
        clock = clock or AdapterProgress(name=adapter.name, num_steps=source.job.num_batches)
        if source.data.rollout is not None:
            source = Rollouts(**{entry.name: getattr(source, entry.name) for entry in fields(source)}, clock=clock)
        return cls(
            config=config,
            spec=adapter_spec(adapter, model_targets(config), tokenizer_file(config)),
            source=source,
            references=references,
            clock=clock,
        )

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def adapter(self) -> AdapterConfig:
        return self.config.adapters[0]

    @property
    def num_steps(self) -> int:
        return self.clock.num_steps

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self.clock.step

    @property
    def reason(self) -> str:
        """Why it has failed."""
        return self.clock.reason

    @property
    def status(self) -> Status:
        return self.clock.status

    @status.setter
    def status(self, status: Status) -> None:
        self.clock.status = status

    def take_references(self, references: SetReferences) -> None:
        """Adds what was computed of its samples; the task can train now."""
        self.references = references
        self.source.take_references(references)
        self._update_status()

    def reweight(self, weight: float) -> None:
        """Changes the share of the session relative to other adapters."""
        self.source.reweight(weight)
        self._change_job(weight=weight)

    def end_at(self, step: int, reason: str = "") -> None:
        """Ends after another step than planned, one to which nothing is issued beyond."""
        self.clock.end_at(step, reason)
        self._change_job(max_batches=max(step, 1))

    def _change_job(self, **changes: Any) -> None:
        if self.cursor is not None:
            self.cursor = replace(self.cursor, job=replace(self.cursor.job, **changes))

    def restart(self, step: int) -> None:
        """Sets the position after a step; samples of a begun batch run again."""
        self.clock.step = step
        self._rewind()
        self._update_status()

    def _rewind(self) -> None:
        self.cursor = self.source.cursor(self.step)

    def _update_status(self) -> None:
        self.status = "done" if self.step >= self.num_steps else "running"


def tasks_of(
    config: JobConfig, prepared: Prepared, clocks: Mapping[str, AdapterProgress] | None = None
) -> dict[str, Task]:
    """Returns the tasks of a job by name.

    Args:
        clocks: progress of those that have begun.
    """
    clocks = {} if clocks is None else clocks
    return {
        adapter.name: Task.of(
            config.model_copy(update={"adapters": (adapter,)}), prepared, clock=clocks.get(adapter.name)
        )
        for adapter in config.adapters
    }


def first_steps(adapter: AdapterConfig, data: AdapterData) -> int:
    """Returns the number of optimizer steps of an adapter before extensions."""
    return _steps(adapter, len(data.order if data.first is None else data.first))


def step_rates(adapter: AdapterConfig, data: AdapterData) -> np.ndarray:
    """Returns the learning rate of each step of an adapter, float32.

    Each extension has its own schedule, warm-up included, so a rate does not depend on when the extension was
    requested. A part that was ended early keeps the schedule of its planned length.
    """
    first = data.order if data.first is None else data.first
    planned = [len(first), *(part.samples for part in adapter.extended)]
    counts = np.diff([0, *data.cuts, len(data.order)])
    rates = [learning_rates(adapter.optim, _steps(adapter, samples)) for samples in planned]
    return np.concatenate(
        [of_part[: _steps(adapter, count)] for of_part, count in zip(rates, counts.tolist(), strict=True)]
    )


def _steps(adapter: AdapterConfig, samples: int) -> int:
    return -(-samples // adapter.global_samples)


def batch_weights(adapter: AdapterConfig, data: AdapterData, router_aux: float = 0.0) -> Iterator[Weights]:
    """Yields the weights of each of an adapter's global batches.

    Args:
        router_aux: factor of the routers' loss, which is a mean over the sequences of the batch.
    """
    tokens = batch_loss_tokens(data, adapter.global_samples).tolist()
    batches = np.split(data.order, data.batch_starts(adapter.global_samples)[1:])
    segments = data.train.segment_tokens.shape[1]
    for count, samples in zip(tokens, batches, strict=True):
        sequence = router_aux / (len(samples) * segments)
        if adapter.objective.chosen.of_samples:
            yield Weights(1.0, 1.0 / len(samples), segment_weights(data.train, samples), sequence)
        else:
            yield Weights(1.0 / count, sequence=sequence)
