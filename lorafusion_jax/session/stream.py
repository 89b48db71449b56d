"""A stream: the calls of a training client as a source of rows that has no end.

A global batch ends where an `OptimStep` stands among the calls. Calls that wait are planned together, so many small
ones fill a microbatch; a session that is reproducible plans each call alone, because sums then have one order whenever
the calls arrive.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.read import source_of
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.specs import adapter_spec, model_targets
from lorafusion_jax.data.assemble import Piece, target_size
from lorafusion_jax.errors import CallError, ServerCallError
from lorafusion_jax.objective.rows import TARGETS, RowNumbers, row_losses
from lorafusion_jax.optim.step import Hyper
from lorafusion_jax.session.calls import (
    Call,
    Capacity,
    ForwardBackward,
    OptimStep,
    RowsResult,
    StepDone,
    check_step,
    read_rows,
)
from lorafusion_jax.session.task import AdapterProgress, Source, Task
from scheduling import AdapterJob, SampleRef
from scheduling.window import Cursor

NO_END = 1 << 62  # steps of a stream
DIGEST = "calls"  # of the data of every stream: a state does not depend on the calls that made it


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """A row of a call.

    Attributes:
        call: where it belongs.
        several: whether the client gave targets of shape [N, K].
        entered: whether it is in a slot that was issued.
    """

    call: Waiting
    number: int
    tokens: np.ndarray
    numbers: RowNumbers
    several: bool
    entered: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    """A call without a result.

    Attributes:
        entries: its rows.
        logprobs: of its rows so far, by number, [N, K].
    """

    call: Call
    future: Future[Any]
    entries: list[Entry] = field(default_factory=list)
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def adds(self) -> bool:
        """Whether it adds gradients."""
        return isinstance(self.call, ForwardBackward) and not self.call.forward_only

    @property
    def looks(self) -> bool:
        """Whether it computes log-probabilities alone."""
        return isinstance(self.call, ForwardBackward) and self.call.forward_only

    def give(self, entry: Entry, logprobs: np.ndarray) -> None:
        """Takes the log-probabilities of a row; the last of them completes the call."""
        self.logprobs[entry.number] = logprobs[: len(entry.tokens), : entry.numbers.targets.shape[1]]
        if len(self.logprobs) == len(self.entries):
            settle(self.future, self._result())

    def _result(self) -> RowsResult:
        assert isinstance(self.call, ForwardBackward)
        outputs, total = [], 0.0
        for entry in self.entries:
            logprobs_NK = self.logprobs[entry.number]
            losses_NK = row_losses(entry.numbers, logprobs_NK)
            total += float(losses_NK.sum())
            output = {"logprobs": logprobs_NK}
            if self.call.loss == "cross_entropy":
                output["elementwise_loss"] = losses_NK.astype(np.float32)
            outputs.append(output if entry.several else {name: array[:, 0] for name, array in output.items()})
        return RowsResult(outputs=outputs, metrics={"loss:sum": total})


class Stream(Source):
    """The calls of one training client, in order. `submit` and `close` may be called in any thread.

    A call that fails adds nothing, and later calls run.

    Args:
        name: of the adapter.
        capacity: what rows must fit into.
        owner: whose turns it shares with the owner's other adapters; the adapter's own if left out.
        calls_alone: plan each call alone.

    Attributes:
        has_sums: whether gradients were added that no step has used.
        wake: called after a call was added, in the thread of `submit`.
    """

    def __init__(self, name: str, capacity: Capacity, *, owner: str = "", calls_alone: bool = False):
        self._name, self._capacity, self._owner, self._calls_alone = name, capacity, owner or name, calls_alone
        self._calls: deque[Waiting] = deque()  # in order; the first may be issued in part
        self._steps: deque[Waiting] = deque()  # those among them, and of those issued, that are steps without a result
        self._issued: set[Waiting] = set()
        self._planned: list[Entry] = []  # rows of the last cursor
        self._ends: dict[int, Waiting] = {}  # batch of the last cursor → its step
        self._lock = threading.RLock()  # a result may come while a call is noted
        self._closed = ""
        self._weight, self._targets, self._has_news = 1.0, 1, False
        self.has_sums = False
        self.wake: Callable[[], None] = lambda: None

    def submit(self, call: Call) -> Future[Any]:
        """Adds a call. Never waits. Its result, or its `CallError`, comes in the future."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # nothing that is added is cancelled
        waiting = Waiting(call=call, future=future)
        try:
            if isinstance(call, ForwardBackward):
                waiting.entries = self._entries(call, waiting)
            elif isinstance(call, OptimStep):
                check_step(call)
        except CallError as problem:
            settle(future, problem)
            return future
        with self._lock:
            if not self._closed:
                self._calls.append(waiting)
                self._steps.extend([waiting] if isinstance(call, OptimStep) else [])
                self._targets = max([self._targets, *(entry.numbers.targets.shape[1] for entry in waiting.entries)])
                self._has_news = True
        if self._closed:
            settle(future, _closed(self._closed))
        else:
            self.wake()
        return future

    def _entries(self, call: ForwardBackward, waiting: Waiting) -> list[Entry]:
        rows = zip(call.rows, read_rows(call, self._capacity), strict=True)
        return [
            Entry(
                call=waiting,
                number=number,
                tokens=tokens,
                numbers=numbers,
                several=np.ndim(row.inputs[TARGETS]) == 2,
            )
            for number, (row, (tokens, numbers)) in enumerate(rows)
        ]

    @property
    def has_news(self) -> bool:
        """Whether calls were added since the last `cursor`."""
        return self._has_news

    @property
    def has_calls(self) -> bool:
        """Whether some calls are not issued."""
        return bool(self._calls)

    def close(self, why: str = "") -> None:
        """Fails all calls without a result, and those to come."""
        why = why or "its client was closed"
        with self._lock:
            self._closed = self._closed or why
            open_calls = [*self._calls, *self._issued]
            self._calls.clear()
            self._steps.clear()
        for call in open_calls:
            settle(call.future, _closed(why))

    # The source of windows.

    @property
    def digest(self) -> str:
        return DIGEST

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def targets(self) -> int:
        return target_size(self._targets)

    def cursor(self, step: int) -> Cursor | None:
        """Returns the position of the rows that may run now; None if there are none."""
        del step  # unused: rows are those that were not issued
        with self._lock:
            self._has_news = False
            batches = list(self._batches())
        self._ends = {number: step_call for number, (_, step_call) in enumerate(batches) if step_call is not None}
        return self._cursor_of([entries for entries, _ in batches])

    def look(self) -> Cursor | None:
        """Like `cursor`, of the rows at the front that only have log-probabilities."""
        with self._lock:
            calls = list(itertools.takewhile(lambda call: call.looks, self._calls))
        self._ends = {}
        if self._calls_alone:
            return self._cursor_of([call.entries for call in calls])
        entries = [entry for call in calls for entry in call.entries if not entry.entered]
        return self._cursor_of([entries] if entries else [])

    def _batches(self) -> Iterator[tuple[list[Entry], Waiting | None]]:
        """Yields rows that are planned together, and the step that follows them."""
        entries: list[Entry] = []
        for call in self._calls:
            if call.adds:
                if self._calls_alone and entries:
                    yield entries, None
                    entries = []
                # A call that is planned alone is split in one way, whatever of it has entered.
                entries += [entry for entry in call.entries if self._calls_alone or not entry.entered]
            elif isinstance(call.call, OptimStep) and entries:
                yield entries, call
                entries = []
            else:
                break
        if entries:
            yield entries, None

    def _cursor_of(self, batches: Sequence[Sequence[Entry]]) -> Cursor | None:
        self._planned = [entry for entries in batches for entry in entries]
        if not self._planned:
            return None
        job = AdapterJob(
            self._name,
            [len(entry.tokens) for entry in self._planned],
            global_batch=max(map(len, batches)),
            weight=self._weight,
            cuts=tuple(itertools.accumulate(len(entries) for entries in batches[:-1])),
        )
        return Cursor(job=job, done=frozenset(at for at, entry in enumerate(self._planned) if entry.entered))

    def refresh(self, cursor: Cursor | None) -> Cursor | None:
        del cursor  # unused
        return self.cursor(0)

    def advance(self, cursor: Cursor) -> None:
        """Notes what was issued: the rows before a position, and the steps of the batches that are complete."""
        for batch in range(cursor.batch + 1):
            is_complete = batch < cursor.batch
            for at in cursor.job.batch_positions(batch) if is_complete else sorted(cursor.done):
                entry = self._planned[at]
                self.has_sums |= not entry.entered and entry.call.adds and bool(entry.numbers.learned.any())
                entry.entered = True
            if is_complete and batch in self._ends:
                self.has_sums = False
        steps = {call for batch, call in self._ends.items() if batch < cursor.batch}
        with self._lock:
            while self._calls and (self._calls[0] in steps or _has_entered(self._calls[0])):
                self._note(self._calls.popleft())
        self._planned, self._ends = [], {}

    def take_first(self) -> Waiting | None:
        """Takes the first call if it is no `ForwardBackward`: all before it is issued."""
        with self._lock:
            if not self._calls or isinstance(self._calls[0].call, ForwardBackward):
                return None
            self._note(call := self._calls.popleft())
            return call

    def issued_before(self, call: Waiting) -> list[Future[Any]]:
        """Returns the results to come of calls that were issued before the last one."""
        with self._lock:
            return [other.future for other in self._issued if other is not call]

    def _note(self, call: Waiting) -> None:
        if not call.future.done():
            self._issued.add(call)
            call.future.add_done_callback(lambda _: self._drop(call))

    def _drop(self, call: Waiting) -> None:
        with self._lock:
            self._issued.discard(call)

    def closes(self, batch: int) -> bool:
        return batch in self._ends

    def entry(self, ref: SampleRef) -> Entry:
        """Returns a row of the last cursor."""
        return self._planned[ref.sample]

    def pieces(self, samples: Sequence[SampleRef], place: int) -> list[Piece]:
        entries = [self.entry(ref) for ref in samples]
        return [
            Piece(place, entry.tokens, np.zeros(len(entry.tokens), bool), 0.0, key=0, row=entry.numbers)
            for entry in entries
        ]

    def reweight(self, weight: float) -> None:
        self._weight = weight

    # Its steps, of which one is issued at a time.

    @property
    def judges_steps(self) -> bool:
        return True

    def hyper(self, step: int) -> Hyper:
        del step  # unused: a step that is refused is not counted
        call = self._steps[0].call
        assert isinstance(call, OptimStep)
        options = {"b1": call.beta1, "b2": call.beta2, "eps": call.eps}
        return Hyper(
            lr=np.float32(call.learning_rate),
            weight_decay=np.float32(call.weight_decay),
            clip=np.float32(call.grad_clip_norm if call.grad_clip_norm > 0 else np.inf),
            options={name: np.float32(value) for name, value in options.items()},
            lr_ratios={},
        )

    def take_sums(self, *, exist: bool) -> None:
        self.has_sums = exist

    def end_step(self, step: int, norm: float, refused: str = "") -> None:
        lr = float(self.hyper(step).lr)
        call = self._steps.popleft()
        if refused:
            settle(
                call.future,
                CallError(
                    "call.not-finite",
                    f"the step was refused: {refused}.",
                    why="the sum of the calls before it is not finite; it is dropped, and the weights are as before",
                    fix="look for infinite ratios of probabilities, or take a smaller learning rate",
                ),
            )
            return
        metrics = {"grad_norm:mean": norm, "learning_rate:mean": lr, "step:max": float(step)}
        settle(call.future, StepDone(step=step, metrics=metrics))


def stream_task(
    config: JobConfig,
    name: str,
    capacity: Capacity,
    *,
    rank: int,
    alpha: float = 32.0,
    seed: int = 0,
    targets: str | list[str] = "all-linear",
    owner: str = "",
    calls_alone: bool = False,
) -> Task:
    """Returns the task of a training client; see `Session.new_stream`.

    Args:
        config: of the session.
        alpha: the low-rank product is scaled by alpha / rank.
        targets: projections.
        owner: see `Stream`.

    Raises:
        ConfigError, ErrorList: the adapter is invalid.
    """
    lora = {"rank": rank, "alpha": alpha, "dropout": 0.0, "targets": targets}
    # Its program clips; each step says by which norm.
    entry = {"name": name, "data": {"train": "-"}, "lora": lora, "optim": {"clip": 1.0}, "seed": seed}
    parsed = parse_config(source_of({"base": {"model": config.base.model}, "adapters": [entry]}))
    job = config.model_copy(update={"adapters": parsed.adapters})
    return Task(
        config=job,
        spec=adapter_spec(job.adapters[0], model_targets(job)),
        source=Stream(name, capacity, owner=owner, calls_alone=calls_alone),
        clock=AdapterProgress(name=name, num_steps=NO_END),
    )


def settle(future: Future[Any], value: Any) -> None:
    """Completes a future, unless it is complete."""
    try:
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)
    except InvalidStateError:
        pass


def _has_entered(call: Waiting) -> bool:
    return bool(call.entries) and all(entry.entered for entry in call.entries)


def _closed(why: str) -> CallError:
    return ServerCallError("call.closed", "the call has no result.", why=why)
