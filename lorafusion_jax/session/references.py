"""Computes what the references of adapters say of their samples: one forward pass over each set, before it is trained.

Each set is packed alone, so the result does not depend on the other adapters of the job.
R replicas · T packed tokens
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.references import ReferenceWeights, reference_of
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.config.stack import stack_of, without_places
from lorafusion_jax.data.assemble import Microbatch, num_segments
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.references import STATES, SetReferences, sets_of
from lorafusion_jax.data.sample_table import State
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.objective.protocol import DIVERGENCE
from lorafusion_jax.peft.folder import Arrays, read_described
from lorafusion_jax.report.format import count
from lorafusion_jax.session.assembler import Assembler, Replicas, Shape, refs_of_set, teacher_state
from lorafusion_jax.session.base import stages_for
from lorafusion_jax.session.distant_stage import AnyStage, local_stages
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.first_weights import starting_weights, starts_from_base
from lorafusion_jax.session.move import to_local, to_stage, transfer
from lorafusion_jax.session.processes import is_alone
from lorafusion_jax.session.stage import Stage
from scheduling import SampleRef

BASE_ALONE = -1  # place of rows without an adapter


def unchanged(rows: Microbatch) -> Microbatch:
    """Describes no adapters in places: there are none."""
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPass:
    """A forward pass over one set of samples of an adapter, under the adapter's reference.

    Args:
        adapter: its name.
        key: of the set, `TRAIN` or `EVAL`.
        samples: the set.
        slots: the set, packed.
        shape: of its microbatches.
        tile_tokens: rows of a tile.
        stages: that hold the reference.
        position: of the reference on the stages; -1: the base alone.
        state: width and dtype of states, if they are the result.
        describe: adds what microbatches say of adapters in places, see `PlaceTable.describe`.
        of_ends: states of the last token of each sample, instead of those that predict learned tokens.
    """

    adapter: str
    key: str
    samples: TokenizedSet
    slots: Sequence[Replicas]
    shape: Shape
    tile_tokens: int
    stages: Sequence[AnyStage]
    position: int
    state: State | None
    describe: Callable[[Microbatch], Microbatch]
    of_ends: bool = False

    @classmethod
    def alone(cls, config: JobConfig, key: str, samples: TokenizedSet, **reference: Any) -> SetPass:
        """Returns the pass of a job with one adapter, in microbatches of the smallest shape for it.

        Args:
            reference: the other fields.
        """
        (adapter,) = config.adapters
        slots = refs_of_set(config, adapter.name, samples, config.batch.largest)
        width = 1 if samples.segment_lengths is None else samples.segment_lengths.shape[1]
        most_segments = max(len(part) for replicas in slots for part in replicas) * width
        shape = Shape(capacity_tokens=config.batch.largest, segments=num_segments(most_segments), adapters=1)
        return cls(
            adapter=adapter.name,
            key=key,
            samples=samples,
            slots=slots,
            shape=shape,
            tile_tokens=config.batch.tile_tokens,
            **reference,
        )

    @property
    def result_key(self) -> str:
        """Key of the result among the adapter's `SetReferences`."""
        return self.key if self.state is None else f"{self.key}{STATES}"

    def run(self, executor: Executor) -> Generator[None, None, np.ndarray]:
        """Issues a microbatch at each step of the generator. Collective over processes.

        Returns:
            log p of the learned tokens [T], the states that predict them [learned tokens, D], or those of the last
            token of each sample [samples, D].
        """
        samples, state, links = self.samples, self.state, executor.links
        has_result = links.is_local(len(self.stages) - 1)
        count = len(samples) if self.of_ends else int(samples.loss_mask.sum())
        shape = samples.tokens.shape if state is None else (count, state.width)
        result = np.zeros(shape, np.float32 if state is None else state.dtype)
        in_flight: deque[tuple[Replicas, Future[Array]]] = deque()

        def read_oldest() -> None:
            replicas, values = in_flight.popleft()
            if not has_result:  # they are on another process
                return
            for part, row in zip(replicas, to_local(values.result()), strict=True):
                rows_of = _last_rows(samples, part) if self.of_ends else _learned_rows(samples, part, state is not None)
                for positions, rows in rows_of:
                    result[positions] = row[rows]

        for replicas in self.slots:
            if len(in_flight) > len(self.stages):
                read_oldest()
            rows = self._microbatch(replicas)
            in_flight.append((replicas, executor.run_forward(self._of_stage, rows, [self.adapter], self.stages)))
            yield
        while in_flight:
            read_oldest()
        return links.share({stage: {"result": result} for stage in links.local})[-1]["result"]

    def compile(self) -> None:
        """Runs the first microbatch once. Waits; may run in any thread if other work uses other stages."""
        for replicas in self.slots[:1]:
            rows, x = self._microbatch(replicas), None
            for stage in local_stages(self.stages).values():
                x = self._of_stage(stage, to_stage(rows, stage.mesh), None if x is None else transfer(x, stage.mesh))
            jax.block_until_ready(x)

    def _of_stage(self, stage: Stage, rows: Microbatch, x: Array | None) -> Array:
        return stage.token_logprobs(rows, x) if self.state is None else stage.states(rows, x)

    def _microbatch(self, replicas: Replicas) -> Microbatch:
        local_replicas = next(iter(local_stages(self.stages).values())).mesh.local_replicas
        assembler = Assembler(self.tile_tokens, local_replicas, {})
        return self.describe(assembler.without_objective(self.shape, replicas, self.samples, self.position))


type References = Mapping[str, SetReferences]  # by adapter


class ReferenceQueue:
    """Computes references between slots, a microbatch at a time, in order of arrival.

    Entries are adapters that wait in their places, by name, and requests to add adapters to a run.
    """

    def __init__(self, executor: Executor):
        self._executor = executor
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, name: str) -> bool:
        return name in self._waiting

    def add(self, name: str, passes: Iterable[SetPass], take: Callable[[References | None], None]) -> None:
        """Adds an entry.

        Args:
            passes: over the sets of its adapters.
            take: called with the references when they are complete, or with None if they are no longer needed.
        """
        self._waiting[name] = _Waiting(steps=run_passes(passes, self._executor), take=take)

    def compute(self, passes: Iterable[SetPass], on_progress: Callable[[str], None]) -> References:
        """Computes references at once, before those that wait. Waits.

        Args:
            on_progress: called with what is computed.
        """
        return finish(run_passes(passes, self._executor, on_progress))

    def step(self) -> bool:
        """Issues one microbatch. Returns whether an entry has its references now."""
        name = next(iter(self._waiting), None)
        if name is None:
            return False
        try:
            next(self._waiting[name].steps)
        except StopIteration as done:
            self._waiting.pop(name).take(done.value)
            return True
        return False

    def complete(self, name: str) -> None:
        """Computes the rest of an entry at once. Waits."""
        waiting = self._waiting.pop(name)
        waiting.take(finish(waiting.steps))

    def drop(self, name: str) -> None:
        """Forgets an entry, if there is one."""
        if (waiting := self._waiting.pop(name, None)) is not None:
            waiting.steps.close()
            waiting.take(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """An entry of a `ReferenceQueue`."""

    steps: Generator[None, None, dict[str, SetReferences]]
    take: Callable[[References | None], None]


def reference_passes(
    config: JobConfig,
    prepared: Prepared,
    stages: Sequence[AnyStage],
    names: Sequence[str],
    describe: Callable[[Microbatch], Microbatch] = unchanged,
) -> Iterator[SetPass]:
    """Yields the passes that compute the references of some adapters.

    Args:
        config: of the adapters on the stages. Those that are references must be at their first step.
        describe: see `SetPass`; of the stages.

    Raises:
        CheckpointError: a folder cannot be read or belongs to another base.
    """
    places, adapters = stack_of(config).index, [adapter.name for adapter in config.adapters]
    for name in names:
        reference = reference_of(config.adapter(name), adapters)
        assert reference is not None
        teacher_stages, position, describes = list(stages), BASE_ALONE, describe
        if reference.kind == "adapter":
            position = places[reference.name]
        elif reference.kind == "folder":
            teacher_stages, position = _stages_of_folder(config, config.adapter(name), stages, reference), 0
            describes = unchanged
        teacher_config = config.model_copy(update={"adapters": (config.adapter(name),)})
        state = teacher_state(teacher_config)
        for key, samples in sets_of(prepared.adapters[name]).items():
            yield SetPass.alone(
                teacher_config, key, samples, stages=teacher_stages, position=position, state=state, describe=describes
            )


def open_passes(
    stages: Sequence[AnyStage],
    config: JobConfig,
    prepared: Prepared,
    names: Sequence[str],
    weights: Mapping[int, Arrays],
) -> list[SetPass]:
    """Makes the passes of adapters that are about to join, on stages of their own; see `Session.open_passes`."""
    config = without_places(config)
    pass_stages = stages_for(stages, config)
    local = list(local_stages(pass_stages).values())
    parts, specs = local[0].parts, [spec for _, spec in local[0].occupied]
    lora = starting_weights(parts.leaves, specs, weights)
    for stage in local:
        stage.take_weights(lora)
        for index, spec in enumerate(specs):
            if index not in weights and starts_from_base(spec):
                stage.start_from_base(index)
    passes = list(reference_passes(config, prepared, pass_stages, names))
    for pass_of_set in passes if is_alone() else ():
        pass_of_set.compile()
    return passes


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReference:
    """The reference of an adapter that samples its rows.

    Attributes:
        stages: that hold it, where `is_base` not those that train.
    """

    stages: Sequence[AnyStage]
    is_base: bool

    def pass_over(
        self, config: JobConfig, samples: TokenizedSet, describe: Callable[[Microbatch], Microbatch]
    ) -> SetPass:
        """Returns the pass over a batch.

        Args:
            config: with the adapter alone.
            describe: of the stages that train.
        """
        position, describes = (BASE_ALONE, describe) if self.is_base else (0, unchanged)
        return pass_over_batch(config, samples, stages=self.stages, position=position, describe=describes)


def pass_over_batch(
    config: JobConfig,
    samples: TokenizedSet,
    *,
    stages: Sequence[AnyStage],
    position: int,
    describe: Callable[[Microbatch], Microbatch] = unchanged,
    state: State | None = None,
) -> SetPass:
    """Returns a pass over a batch, in microbatches of one shape for all batches of its size.

    Args:
        config: with the adapter alone.
        state: of the last tokens; None: log p of the learned tokens are the result.
    """
    name, segments = config.adapters[0].name, num_segments(len(samples))
    return SetPass(
        adapter=name,
        key="batch",
        samples=samples,
        slots=refs_of_set(config, name, samples, config.batch.largest),
        shape=Shape(capacity_tokens=config.batch.largest, segments=segments, adapters=1),
        tile_tokens=config.batch.tile_tokens,
        stages=stages,
        position=position,
        state=state,
        describe=describe,
        of_ends=state is not None,
    )


def rollout_reference(config: JobConfig, stages: Sequence[AnyStage]) -> RolloutReference:
    """Opens the reference of an adapter that samples its rows: the base, where it starts as the base, or a folder.

    Args:
        config: with the adapter alone.

    Raises:
        CheckpointError: as `reference_passes` has them.
    """
    (adapter,) = config.adapters
    reference = reference_of(adapter, [adapter.name])
    assert reference is not None
    if reference.kind == "adapter" and adapter.lora.init_from is not None:
        reference = ReferenceWeights("folder", adapter.lora.init_from)
    if reference.kind != "folder":
        return RolloutReference(stages=stages, is_base=True)
    return RolloutReference(stages=_stages_of_folder(config, adapter, stages, reference), is_base=False)


def run_passes(
    passes: Iterable[SetPass], executor: Executor, on_progress: Callable[[str], None] = lambda text: None
) -> Generator[None, None, dict[str, SetReferences]]:
    """Runs passes one after another, a microbatch at each step of the generator.

    Args:
        on_progress: called with what is computed.

    Returns:
        The references of each adapter.
    """
    references: dict[str, SetReferences] = {}
    for pass_of_set in passes:
        name, tokens = pass_of_set.adapter, count(len(pass_of_set.samples.tokens))
        on_progress(f"computing the reference of {name}, {tokens} tokens")
        values = yield from pass_of_set.run(executor)
        references[name] = {**references.get(name, {}), pass_of_set.result_key: values}
    return references


def finish[T](steps: Generator[None, None, T]) -> T:
    """Runs a generator to its end. Returns its result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value


def read_reference_folder(config: JobConfig, reference: ReferenceWeights) -> tuple[AdapterSpec, Arrays]:
    """Reads the PEFT folder of a reference.

    Raises:
        CheckpointError, ErrorList: see `read_described`; `reference.tokens`, a teacher has trainable tokens.
    """
    described, arrays = read_described(Path(config.directory) / reference.name)
    compares = any(DIVERGENCE in adapter.objective.chosen.needs for adapter in config.adapters)
    if compares and described.spec.tokens is not None:
        raise CheckpointError(
            "reference.tokens",
            f"the reference {reference.name} has trainable tokens.",
            why="a teacher's distribution over the vocabulary is that of the base's head",
        )
    return described.spec, arrays


def _stages_of_folder(
    config: JobConfig, adapter: AdapterConfig, stages: Sequence[AnyStage], reference: ReferenceWeights
) -> list[AnyStage]:
    """Returns stages on the same base whose only adapter is that of a PEFT folder."""
    return stages_with(config, adapter, stages, *read_reference_folder(config, reference))


def stages_with(
    config: JobConfig, adapter: AdapterConfig, stages: Sequence[AnyStage], spec: AdapterSpec, arrays: Arrays
) -> list[AnyStage]:
    """Returns stages on the same base whose only adapter has these weights."""
    folder_config = without_places(config.model_copy(update={"adapters": (adapter,)}))
    folder_stages = stages_for(stages, folder_config, [spec])
    local = list(local_stages(folder_stages).values())
    lora = starting_weights(local[0].parts.leaves, [spec], {0: arrays})
    for stage in local:
        stage.take_weights(lora)
    return folder_stages


def _learned_rows(
    samples: TokenizedSet, part: Sequence[SampleRef], of_learned: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the learned tokens of each sample of a microbatch, in the set, and the rows that predict them.

    Args:
        of_learned: number the tokens among the learned ones of the set.
    """
    end = 0
    for ref in part:
        _, learned = samples.sample(ref.sample)
        (tokens,) = np.nonzero(learned)
        begin = samples.learned_before[ref.sample] if of_learned else samples.offsets[ref.sample]
        yield int(begin) + (np.arange(len(tokens)) if of_learned else tokens), end + tokens - 1
        end += len(learned)


def _last_rows(samples: TokenizedSet, part: Sequence[SampleRef]) -> Iterator[tuple[int, int]]:
    """Yields each sample of a microbatch and the row of its last token."""
    end = 0
    for ref in part:
        end += int(samples.lengths[ref.sample])
        yield ref.sample, end - 1
