"""Executes events on stages: the caller issues them in one order, and a thread per stage dispatches them.

A device queues at most 32 programs; then dispatch blocks. With one thread for all stages, a full queue of one stage
delays the others: two stages of a 32B model on H200s were idle 11 to 14 % of the time. The input of an event is the
future of an event issued earlier, so there are no deadlocks.

Before the first slot, stages compile what they run, side by side, by running it on microbatches without samples.

Several processes must dispatch programs with collectives across processes in the same order. Otherwise they deadlock (a
run of two stages on two processes of CPU devices did). Each process then has one thread for all its stages.

Stages may be in other processes. All processes issue the same events in the same order. Each runs those of its stages,
and receives what its stages need of the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.session.ahead import Ahead
from lorafusion_jax.session.distant_stage import (
    AnyStage,
    DistantStage,
    RowsShape,
    lanes_of,
    local_stages,
    receive_activations,
)
from lorafusion_jax.session.dry_runs import compile_steps, time_passes, try_evaluation
from lorafusion_jax.session.failures import FailedEvent, is_of_devices, place_of, stage_failed
from lorafusion_jax.session.links import Link, Links
from lorafusion_jax.session.move import first_of, to_stage
from lorafusion_jax.session.parts import Carried
from lorafusion_jax.session.processes import is_alone
from lorafusion_jax.session.spans import Spans
from lorafusion_jax.session.stage import Stage
from scheduling.pipeline import Event

AHEAD = 1  # slots queued beyond those in the pipeline: devices need not wait for the host, and memory is bounded


# A copy of one number: the arrays themselves may be donated while the spans still wait for them.
@jax.jit
def _first_number(array: Array) -> Array:
    return array[(..., *[0] * array.ndim)]


def _shapes(rows: Microbatch) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(rows)]


@dataclass(slots=True, kw_only=True)
class _InFlight:
    """A microbatch between its admission and the end of its last backward pass.

    Attributes:
        batches: its arrays on the devices of each local stage; the last one's forward pass drops them.
        rows: decides the shape of what stages of other processes pass on; None if there are none.
        adapters: for error messages.
        inputs: (kind, stage) → what an event needs from the stage before it.
        output: result of the last stage's forward pass, in its process.
        done: result of its last event; None until that is issued.
    """

    batches: dict[int, Any]
    rows: RowsShape | None
    adapters: Sequence[str] = ()
    inputs: dict[tuple[str, int], Future[Carried]] = field(default_factory=dict)
    output: Future[Any] | None = None
    done: Future[Carried] | None = None


class Executor:
    """Runs the events of a plan.

    Methods return at once unless their docstring says that they wait. Stages belong to their threads while events are
    in flight: call `wait_dispatched` before you access them from outside.

    Args:
        stages: in order.
        spans: records when each event ran.

    Attributes:
        links: the ways between stages.
        local_stages: those of this process, by number.
        describe: adds what microbatches say of adapters in places, see `PlaceTable.describe`.
    """

    def __init__(self, stages: Sequence[AnyStage], spans: Spans | None = None):
        self.stages, self._spans = tuple(stages), spans
        self.local_stages = local_stages(stages)
        self.links = Links([stage.mesh for stage in stages])
        self._ordered = not is_alone() and any(stage.mesh.spans_processes for stage in self.local_stages.values())
        self._lanes = lanes_of(self.stages, ordered=self._ordered)
        self._in_flight: dict[int, _InFlight] = {}  # by slot
        self._issued: deque[int] = deque()  # slots in flight whose events have all been issued, in this order
        self._completed: list[int] = []  # finished slots that `completed_slots` has not returned yet
        self._logprobs: dict[int, Array] = {}  # of finished slots with clients' rows
        self._failure: FailedEvent | None = None  # the first failure; later work is not run
        self._failing = threading.Lock()
        self._warm: list[list[tuple[int, ...]]] = []  # shapes of the microbatches that programs were compiled for
        self.describe: Callable[[Microbatch], Microbatch] = lambda rows: rows

    @property
    def local_replicas(self) -> list[int]:
        """Replicas whose microbatches this process provides."""
        return next(iter(self.local_stages.values())).mesh.local_replicas

    def replace_stages(self, stages: Sequence[AnyStage]) -> None:
        """Replaces the stages, on the same devices. No event may be in flight."""
        assert not self._in_flight
        assert len(stages) == len(self.stages)
        self.stages, self.local_stages, self._warm = tuple(stages), local_stages(stages), []

    def warm_up(
        self,
        rows: Sequence[Microbatch],
        held_out: Sequence[Microbatch] = (),
        on_progress: Callable[[Sequence[str]], None] = lambda left: None,
        ahead: Ahead | None = None,
    ) -> dict[str, tuple[float, float]]:
        """Compiles what all stages run, see `compile_stages`. Does nothing if programs for these shapes are compiled.

        Args:
            rows: padding only, [replicas of this process, ...]; one of each capacity.
            held_out: the same of an evaluation.
            on_progress: called with what still compiles, whenever that changes.
            ahead: processes that compile programs of layers meanwhile.

        Returns:
            What was compiled → start and end by `time.perf_counter`.
        """
        if self.is_warm(rows):
            return {}
        times = compile_stages(
            self.local_stages,
            len(self.stages),
            list(map(self.describe, rows)),
            list(map(self.describe, held_out)),
            in_turn=self._ordered,
            blaming=self.blaming,
            on_progress=on_progress,
            ahead=Ahead() if ahead is None else ahead,
        )
        self._warm += map(_shapes, rows)
        return times

    def is_warm(self, rows: Sequence[Microbatch]) -> bool:
        """Whether what microbatches of these shapes run is compiled."""
        return all(_shapes(microbatch) in self._warm for microbatch in rows)

    def admit(self, slot: int, rows: Microbatch) -> None:
        """Puts a microbatch on the devices. Waits until there is room for it in the queue.

        Args:
            slot: slot of the plan.
            rows: [replicas of this process, ...].
        """
        # Before the rows go to the devices: those of a slot that cannot run yet would only take memory there.
        while len(self._issued) > AHEAD:
            self._wait_oldest()
        batches, rows = {}, self.describe(rows)
        for index, stage in self.local_stages.items():
            with self.blaming(index, slot):
                batches[index] = to_stage(rows, stage.mesh)
        self._in_flight[slot] = _InFlight(batches=batches, rows=RowsShape.of(rows) if self.links.apart else None)

    def issue(self, event: Event, adapters: Sequence[str] = ()) -> None:
        """Issues a forward or backward pass on its stage.

        Args:
            event: see `scheduling.pipeline`.
            adapters: adapters of its slot, for error messages.

        Raises:
            RunError: `train.out-of-memory`, `train.process-lost` or `train.stage-failed`, of this or an earlier event.
        """
        if self._failure is not None:
            with self.blaming(None, None):
                # By `blaming`, so that whoever issues next gets the error of the event that failed.
                raise self._failure
        flight = self._in_flight[event.slot]
        flight.adapters = adapters
        target = event.stage + (1 if event.kind == "forward" else -1)
        # Drawn here, in the order of events, which all processes share; their stages' threads have no common order.
        link = self.links.link(event.stage, target) if 0 <= target < len(self.stages) else None
        input_future = flight.inputs.pop((event.kind, event.stage), None)
        work: Callable[[], Carried] | None = None
        if event.stage in self.local_stages:
            run = self._forward if event.kind == "forward" else self._backward
            work = partial(run, event, flight, input_future, link)
        elif link is not None:
            # Another process runs this event, and a stage of ours needs the result; otherwise there is no link.
            assert flight.rows is not None
            work = partial(receive_activations, self.stages[target], flight.rows, link)
        if work is not None:
            result_future = self.submit(event.stage, event.slot, adapters, work)
            if link is not None:
                flight.inputs[event.kind, target] = result_future
            if event.kind == "backward" and event.stage in self.local_stages:
                # Replaced by each lower stage: backward passes go down, so the last one issued here ends last.
                flight.done = result_future
            if event.kind == "forward" and event.stage == len(self.stages) - 1 and event.stage in self.local_stages:
                flight.output = result_future
        # The last event of a slot, in processes without the first stage, too: they all walk the same events.
        if event.kind == "backward" and not event.stage:
            self._issued.append(event.slot)

    def read[T](self, work: Callable[[Stage], T]) -> list[Future[T]]:
        """Reads from every stage of this process, after all work issued so far."""
        return [self.submit(index, None, (), partial(work, stage)) for index, stage in self.local_stages.items()]

    def read_all[T](self, work: Callable[[Stage], T]) -> list[T]:
        """Returns what `read` promises, by stage. Waits for it."""
        return [future.result() for future in self.read(work)]

    def wait_dispatched(self) -> None:
        """Waits until all work is dispatched. Then the stages' arrays may be read; reading waits for their values."""
        for index in range(len(self.stages)):  # those of other processes, too: their results have been asked for then
            with self.blaming(index, None):
                self.submit(index, None, (), lambda: None).result()

    @contextmanager
    def blaming(self, stage: int | None, slot: int | None, adapters: Sequence[str] = ()) -> Iterator[None]:
        """Turns exceptions of jax in the body into one error.

        A failed program raises where its result is used next, and the spans know which event failed first. Without
        spans, the error names the stage, slot and adapters given here.

        Raises:
            RunError: `train.out-of-memory`, `train.process-lost` or `train.stage-failed`.
            Exception: any other exception of a stage's thread, unchanged.
        """
        try:
            yield
        except Exception as problem:
            if not isinstance(problem, FailedEvent) and not is_of_devices(problem):
                raise
            for lane in set(self._lanes):
                # No thread may still run events when the spans are asked which one failed first.
                lane.shutdown(wait=True, cancel_futures=True)
            if isinstance(problem, FailedEvent):
                stage, slot, adapters = problem.stage, problem.slot, problem.adapters
            first = None if self._spans is None else self._spans.first_failure()
            if first is not None:
                stage, slot = first.stage, first.slot
                flight = self._in_flight.get(first.slot)
                adapters = first.adapters or (adapters if flight is None else flight.adapters)
            cause = problem.problem if isinstance(problem, FailedEvent) else problem
            if not is_of_devices(cause):
                cause.add_note(f"raised{place_of(stage, slot, adapters)}; lorafusion resume RUN continues from before")
                raise cause from None
            raise stage_failed(
                cause, stage, slot, adapters, remat=next((part.remat for part in self.stages), None)
            ) from cause

    def completed_slots(self) -> list[int]:
        """Returns the slots that were found to be done since the last call, in order."""
        slots, self._completed = self._completed, []
        return slots

    def take_logprobs(self, slot: int) -> Array | None:
        """Returns log-probabilities of clients' rows of a finished slot, [R, T, K], once; None if it has none."""
        return self._logprobs.pop(slot, None)

    def close(self) -> None:
        """Ends the threads of the stages after the work that was issued."""
        for lane in set(self._lanes):
            lane.shutdown(wait=True)

    def wait_all(self) -> None:
        """Waits until all issued work is done."""
        while self._issued:
            self._wait_oldest()

    def evaluate(self, rows: Microbatch, adapters: Sequence[str] = ()) -> Future[dict[str, Array]]:
        """Issues a held-out microbatch. Returns sums of loss and metrics of each adapter, [A]."""
        last, result = len(self.stages) - 1, self.run_forward(Stage.evaluate, self.describe(rows), adapters)
        if not self.links.apart:
            return result
        announcement = self.links.announcement(last)

        def share() -> Any:
            stage = self.stages[last]
            if isinstance(stage, DistantStage):
                return announcement.receive(stage.totals_like())
            return announcement.send(result.result())

        return self.submit(last, None, adapters, share)

    def run_forward(
        self,
        run: Callable[[Stage, Microbatch, Array | None], Any],
        rows: Microbatch,
        adapters: Sequence[str] = (),
        stages: Sequence[AnyStage] | None = None,
    ) -> Future[Any]:
        """Issues a pass without gradients through all stages, e.g. `Stage.token_logprobs`.

        Args:
            stages: others on the same devices, whose time counts apart (None: those of the session).

        Returns:
            The result of the last stage, on the process that holds it.
        """
        pass_stages = self.stages if stages is None else stages
        local = local_stages(pass_stages)

        def run_stage(index: int, before: Future[Any] | None, link: Link | None) -> Any:
            stage, x = local[index], None if before is None else before.result()
            began = time.perf_counter()
            result = run(stage, to_stage(rows, stage.mesh), x)
            if self._spans is not None and stages is not None and index == 0:
                self._spans.follow_pass(began, result)
            return result if link is None else link.send(result)

        output: Future[Any] | None = None
        for index in range(len(pass_stages)):
            link = self.links.link(index, index + 1) if index + 1 < len(pass_stages) else None
            if index in local:
                output = self.submit(index, None, adapters, partial(run_stage, index, output, link))
            elif link is not None:
                receive = partial(receive_activations, pass_stages[index + 1], RowsShape.of(rows), link)
                output = self.submit(index, None, adapters, receive)
        assert output is not None
        return output

    def _wait_oldest(self) -> None:
        slot = self._issued[0]
        flight = self._in_flight[slot]
        assert flight.done is not None
        with self.blaming(None, slot, flight.adapters):
            jax.block_until_ready(flight.done.result())
        self._issued.popleft()
        del self._in_flight[slot]
        self._completed.append(slot)
        output = None if flight.output is None else flight.output.result()
        if isinstance(output, tuple):  # (losses, log-probabilities), see `Stage.forward`
            self._logprobs[slot] = output[1]

    def submit[T](self, stage: int, slot: int | None, adapters: Sequence[str], work: Callable[[], T]) -> Future[T]:
        """Runs work on a stage's thread, after all work issued before."""

        def run() -> T:
            if self._failure is not None:
                raise self._failure
            try:
                return work()
            except Exception as problem:  # an error of jax or a bug; either way later work cannot run
                # Stages may fail at the same time on their threads, and all must report the same failure.
                with self._failing:
                    self._failure = self._failure or FailedEvent(problem, stage, slot, adapters)
                raise self._failure from problem

        return self._lanes[stage].submit(run)

    def _forward(self, event: Event, flight: _InFlight, needed: Future[Carried] | None, link: Link | None) -> Carried:
        x = None if needed is None else needed.result()
        with self.record_event(event, needed=self._arriving(event.stage - 1, x)) as record:
            batch = flight.batches[event.stage]
            if event.stage == max(self.local_stages):
                flight.batches = {}  # frees the device memory of all stages' copies once they are used
            result = self.local_stages[event.stage].forward(event.slot, batch, x)
            record(first_of(result))
            return result if link is None else link.send(result)

    def _backward(self, event: Event, flight: _InFlight, needed: Future[Carried] | None, link: Link | None) -> Carried:
        del flight
        dy = None if needed is None else needed.result()
        with self.record_event(event, needed=self._arriving(event.stage + 1, dy)) as record:
            dx = self.local_stages[event.stage].backward(event.slot, dy)
            record(first_of(dx))
            return dx if link is None else link.send(dx)

    def _arriving(self, source: int, arrays: Carried | None) -> Array | None:
        """Returns something that is ready when arrays of another process have arrived. They may be donated."""
        return None if arrays is None or source in self.local_stages else _first_number(first_of(arrays))

    @contextmanager
    def record_event(
        self, event: Event, *, stepping: bool = False, needed: Array | None = None
    ) -> Iterator[Callable[[Array], None]]:
        """Yields a function that records the event's result for the spans.

        Args:
            needed: ready when the input of the event is, if the spans do not know it.
        """
        issued = None if self._spans is None else self._spans.issued(event, stepping=stepping)
        results: list[Array] = []
        yield results.append
        if self._spans is not None and issued is not None:
            self._spans.follow(issued, *results, needed=needed)


type Progress = Callable[[Sequence[str]], None]  # called with what still compiles
type Blaming = Callable[[int, None], AbstractContextManager[None]]  # see `Executor.blaming`


def compile_stages(
    stages: Mapping[int, Stage],
    num_stages: int,
    rows: Sequence[Microbatch],
    held_out: Sequence[Microbatch],
    *,
    in_turn: bool,
    blaming: Blaming,
    on_progress: Progress,
    ahead: Ahead,
) -> dict[str, tuple[float, float]]:
    """Runs an empty microbatch of each capacity, every kind of step, and an evaluation of each size on each stage.

    A microbatch without samples adds zero to every sum, and steps run on copies, so nothing changes.

    Args:
        stages: those of this process, by number.
        num_stages: of all processes.
        in_turn: all stages have to dispatch in one order.
        ahead: processes that compile programs of layers meanwhile.

    Returns:
        What was compiled → start and end by `time.perf_counter`.
    """
    work: dict[str, tuple[int, Callable[[], None]]] = {}
    for index, stage in stages.items():
        work[f"stage {index}"] = index, partial(_run_training, stage, num_stages, rows, partial(ahead.wait, index))
        if held_out:
            evaluate = partial(_run_evaluation, stage, held_out, partial(ahead.wait, index))
            work[f"evaluation of stage {index}"] = index, evaluate
    times: dict[str, tuple[float, float]] = {}
    with ThreadPoolExecutor(1 if in_turn else len(work), "compile") as threads:
        running = {threads.submit(_time_work, compile_part): name for name, (_, compile_part) in work.items()}
        programs_left = dict.fromkeys(work)
        on_progress(list(programs_left))
        for future in as_completed(running):
            name = running[future]
            with blaming(work[name][0], None):
                times[name] = future.result()
            del programs_left[name]
            on_progress(list(programs_left))
    return times


def _run_training(stage: Stage, num_stages: int, rows: Sequence[Microbatch], wait_for: Callable[..., None]) -> None:
    for microbatch in rows:  # in turn: the sums of a stage go from one pass to the next
        time_passes(stage, to_stage(microbatch, stage.mesh), partial(wait_for, "backward"))
    compile_steps(stage, num_stages)


def _run_evaluation(stage: Stage, rows: Sequence[Microbatch], wait_for: Callable[..., None]) -> None:
    wait_for("evaluate")
    for microbatch in rows:
        try_evaluation(stage, to_stage(microbatch, stage.mesh))


def _time_work(work: Callable[[], None]) -> tuple[float, float]:
    began = time.perf_counter()
    work()
    return began, time.perf_counter()
