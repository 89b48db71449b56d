"""Plans of a stream without an end: windows of slots, from the position of each job.

A session of a service has no last slot. It plans the next slots from cursors, runs them, and plans again; jobs come and
go between windows. The cost of a window depends on its slots, not on the lengths of the jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice

from scheduling.errors import PlanError
from scheduling.packing.problem import Filling, Problem, make_problem, to_slots
from scheduling.packing.restarts import fill_in_shares
from scheduling.types import AdapterJob, Limits, SampleRef, Slot

PartRefs = tuple[SampleRef, ...]
NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Position of a job in its stream.

    Args:
        job: the job; all its samples fit into a microbatch of the session.
        batch: first batch with samples left.
        done: positions of this batch that have run.
        segments: of a sample.
    """

    job: AdapterJob
    batch: int = 0
    done: frozenset[int] = frozenset()
    segments: int = 1

    @property
    def is_finished(self) -> bool:
        return self.batch >= self.job.num_batches

    def left(self, batch: int) -> list[int]:
        """Positions of a batch, from `batch` on, that have not run."""
        positions = self.job.batch_positions(batch)
        return [at for at in positions if at not in self.done] if batch == self.batch else list(positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What a window must respect of the slots before it.

    Args:
        limits: capacities, stages and replicas of the session.
        served: slots that each job has received beyond the one with the fewest, each by its weight.
        idle: slots since the last slot of each job.
        ended: slots between the last slot of a job's latest complete batch and the window; 0 if it was the last slot.
        most_segments, most_adapters: places of a microbatch.
        reproducible: split each batch in one way whatever the company: the sums of a batch then have one order, and
            results do not depend on other jobs, bit for bit (with one replica). Packs less densely.
    """

    limits: Limits
    served: Mapping[str, float] = field(default_factory=dict[str, float])
    idle: Mapping[str, int] = field(default_factory=dict[str, int])
    ended: Mapping[str, int] = field(default_factory=dict[str, int])
    most_segments: int = 1_000_000
    most_adapters: int = 1_000_000
    reproducible: bool = False

    def ready(self, name: str) -> int:
        """First slot of the window in which the next batch of a job may begin."""
        return max(0, self.limits.num_stages - 1 - self.ended[name]) if name in self.ended else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The next slots of a stream.

    Attributes:
        slots: in the order of execution.
        ends: (slot, job, batch) of the batches that are complete after a slot, in order of slots.
        cursors: positions after the window, in the order given.
        tail: what the next window must respect.
    """

    slots: tuple[Slot, ...]
    ends: tuple[tuple[int, str, int], ...]
    cursors: tuple[Cursor, ...]
    tail: Tail

    @property
    def num_stages(self) -> int:
        return self.tail.limits.num_stages

    def batches_ending(self) -> tuple[tuple[int, str, int], ...]:
        """As that of a plan."""
        return self.ends

    @property
    def density(self) -> float:
        """Real tokens / room."""
        lengths = {cursor.job.name: cursor.job.sample_tokens for cursor in self.cursors}
        tokens = sum(lengths[ref.adapter][ref.sample] for slot in self.slots for ref in slot.samples)
        limits = self.tail.limits
        room = sum(slot.capacity_tokens or limits.capacity_tokens for slot in self.slots) * limits.data_parallel
        return tokens / room if room else 0.0


def plan_window(cursors: Sequence[Cursor], tail: Tail, horizon: int) -> Window:
    """Plans the next slots of a stream and verifies them against the tail.

    Jobs share the slots by their weights, to a few slots, as far as that leaves the machine busy: where another order
    holds over 5 % more tokens, slots go to whoever fills them, and a job that was passed over for a while goes first. A
    window ends after `horizon` slots, or where no samples are left. A batch may continue in the next window. The same
    input gives the same window.

    Args:
        cursors: of the jobs that run.
        tail: of the window before.
        horizon: number of slots; a few more where microbatches lack places for segments or adapters.

    Raises:
        PlanError: two jobs have one name, or `window.invalid`.

    >>> limits = Limits(capacity_tokens=1024, num_stages=1)
    >>> first = plan_window([Cursor(job=AdapterJob("law", [500] * 8, 4))], Tail(limits=limits), 3)
    >>> [len(slot.samples) for slot in first.slots], first.ends, first.cursors[0].batch
    ([2, 2, 2], ((1, 'law', 0),), 1)
    """
    if len({cursor.job.name for cursor in cursors}) < len(cursors):
        raise PlanError("plan.duplicate-name", "two jobs of a window have the same name")
    pools = [_pool(cursor, tail, horizon) for cursor in cursors]
    slots: tuple[Slot, ...] = ()
    if any(pools):
        ready = [0 if cursor.done else tail.ready(cursor.job.name) for cursor in cursors]
        plan = _plan_pieces if tail.reproducible else _plan_samples
        slots = plan(cursors, tail, pools, ready, horizon)
    segments = {cursor.job.name: cursor.segments for cursor in cursors}
    slots = tuple(part for slot in slots for part in _split(slot, tail, segments))
    window = advance(cursors, tail, slots)
    verify_window(window, cursors, tail)
    return window


def verify_window(window: Window, cursors: Sequence[Cursor], tail: Tail) -> None:
    """Checks a window against the positions and slots before it, independently of the planner.

    * Every sample is the next of its job's open batch and runs once.
    * A batch begins only after the one before is complete, and S slots after its last slot.
    * Microbatches keep capacity, places for segments and for adapters; an adapter's samples are contiguous.

    Raises:
        PlanError: `window.invalid`, with every violation in `problems`.
    """
    problems: list[str] = []
    states = {cursor.job.name: _Open(cursor, tail.ready(cursor.job.name)) for cursor in cursors}
    for index, slot in enumerate(window.slots):
        if len(slot.replicas) != tail.limits.data_parallel:
            problems.append(f"slot {index} has {len(slot.replicas)} microbatches, not {tail.limits.data_parallel}")
        for part in slot.replicas:
            problems += _part_problems(index, part, slot.capacity_tokens or tail.limits.capacity_tokens, states, tail)
        for ref in slot.samples:
            if ref.adapter in states:
                problems += states[ref.adapter].run(index, ref)
        for state in states.values():
            state.close(index, tail.limits.num_stages)
    ends = sorted(end for state in states.values() for end in state.ends)
    if ends != list(window.ends):
        problems.append("the batches that end differ from those of the samples")
    after = {cursor.job.name: (cursor.batch, cursor.done) for cursor in window.cursors}
    problems += [f"{n}: its next position is wrong" for n, s in states.items() if after.get(n) != (s.batch, s.done)]
    if problems:
        raise PlanError("window.invalid", f"the window breaks {len(problems)} rules", problems=tuple(problems))


def _plan_samples(
    cursors: Sequence[Cursor], tail: Tail, pools: Sequence[list[int]], ready: Sequence[int], horizon: int
) -> tuple[Slot, ...]:
    problem = make_problem([cursor.job for cursor in cursors], tail.limits, left=pools, ready=ready)
    return to_slots(problem, _fill(problem, tail, horizon))


def _fill(problem: Problem, tail: Tail, horizon: int) -> Filling:
    """Fills the slots of a window."""
    ahead = [-tail.served.get(job.name, 0.0) for job in problem.jobs]
    idle = [tail.idle.get(job.name, 0) for job in problem.jobs]
    return fill_in_shares(problem, ahead=ahead, idle=idle, most_slots=horizon)


def _plan_pieces(
    cursors: Sequence[Cursor], tail: Tail, pools: Sequence[list[int]], ready: Sequence[int], horizon: int
) -> tuple[Slot, ...]:
    """Plans pieces of batches like batches of one sample: pieces of a job are in different slots, in order."""
    jobs = [cursor.job for cursor in cursors]
    pieces = {cursor.job.name: _pieces(cursor, pool, tail) for cursor, pool in zip(cursors, pools, strict=True) if pool}
    stand_ins = [
        AdapterJob(job.name, [_tokens(job, piece) for piece in pieces[job.name]], 1, weight=job.weight)
        for job in jobs
        if job.name in pieces
    ]
    starts = [first for job, first in zip(jobs, ready, strict=True) if job.name in pieces]
    problem = make_problem(stand_ins, tail.limits, ready=starts)
    by_name = {job.name: job for job in jobs}

    def refs(part: PartRefs) -> PartRefs:
        return tuple(by_name[ref.adapter].ref(at) for ref in part for at in pieces[ref.adapter][ref.sample])

    slots = to_slots(problem, _fill(problem, tail, horizon))
    return tuple(replace(slot, replicas=tuple(map(refs, slot.replicas))) for slot in slots)


def _pieces(cursor: Cursor, pool: Sequence[int], tail: Tail) -> list[list[int]]:
    """Splits the batches of a pool into pieces that fit into a microbatch: longest first, into the first with room."""
    job, most = cursor.job, max(1, tail.most_segments // cursor.segments)
    room, positions = tail.limits.tiles * tail.limits.tile_tokens, set(pool)
    fitted: list[list[int]] = []
    for batch in sorted({job.batch_of(at) for at in pool}):
        pieces: list[list[int]] = []
        for at in sorted(job.batch_positions(batch), key=lambda at: -_tokens(job, [at])):
            fitting = (p for p in pieces if len(p) < most and _tokens(job, [*p, at]) <= room)
            if (piece := next(fitting, None)) is None:
                pieces.append([at])
            else:
                piece.append(at)
        fitted += [sorted(piece) for piece in pieces if positions.issuperset(piece)]
    return fitted


def _tokens(job: AdapterJob, positions: Iterable[int]) -> int:
    return sum(job.sample_tokens[at % len(job.sample_tokens)] for at in positions)


class _Open:
    """The open batch of a job while a window is checked."""

    def __init__(self, cursor: Cursor, ready: int):
        self.job, self.batch, self.segments = cursor.job, cursor.batch, cursor.segments
        self.done, self.positions = set(cursor.done), _positions(cursor)
        self.first = 0 if cursor.done else ready
        self.last = -1
        self.ends: list[tuple[int, str, int]] = []

    def run(self, slot: int, ref: SampleRef) -> list[str]:
        position = ref.epoch * len(self.job.sample_tokens) + ref.sample
        where = f"slot {slot}: {ref.adapter}, position {position}"
        if ref.batch != self.batch or position not in self.positions:
            return [f"{where} is not in the open batch {self.batch}"]
        problems = [f"{where} runs twice"] if position in self.done else []
        problems += [f"{where} runs before slot {self.first}"] if slot < self.first else []
        self.done.add(position)
        self.last = slot
        return problems

    def close(self, slot: int, stages: int) -> None:
        if self.batch < self.job.num_batches and len(self.done) == len(self.positions):
            self.ends.append((slot, self.job.name, self.batch))
            self.batch, self.done, self.first = self.batch + 1, set[int](), slot + stages
            self.positions = _positions(Cursor(job=self.job, batch=self.batch))


def _part_problems(slot: int, part: PartRefs, capacity: int, states: Mapping[str, _Open], tail: Tail) -> Iterable[str]:
    runs = [ref.adapter for at, ref in enumerate(part) if not at or part[at - 1].adapter != ref.adapter]
    unknown = sorted({name for name in runs if name not in states})
    if unknown:
        yield f"slot {slot} names {', '.join(unknown)}"
        return
    if len(set(runs)) < len(runs):
        yield f"slot {slot}: the samples of an adapter are not contiguous"
    tokens = dict.fromkeys(runs, 0)
    for ref in part:
        tokens[ref.adapter] += states[ref.adapter].job.sample_tokens[ref.sample]
    tile = tail.limits.tile_tokens
    rows = sum(-(-adapter_tokens // tile) * tile for adapter_tokens in tokens.values())
    if rows > capacity or capacity not in tail.limits.sizes:
        yield f"slot {slot}: {rows} rows in {capacity}"
    segments = sum(states[ref.adapter].segments for ref in part)
    if segments > tail.most_segments or len(tokens) > tail.most_adapters:
        yield f"slot {slot}: {segments} segments of {len(tokens)} adapters"


def _pool(cursor: Cursor, tail: Tail, horizon: int) -> list[int]:
    """Positions of the batches that a window of this many slots can reach."""
    lengths, room = cursor.job.sample_tokens, horizon * tail.limits.capacity_tokens * tail.limits.data_parallel
    pool: list[int] = []
    for batch in islice(range(cursor.batch, cursor.job.num_batches), horizon + 1):
        positions = cursor.left(batch)
        pool += positions
        room -= sum(lengths[at % len(lengths)] for at in positions)
        if room < 0:
            break
    return pool


def _split(slot: Slot, tail: Tail, segments: Mapping[str, int]) -> list[Slot]:
    """Splits a slot that has more segments or adapters than a microbatch has places."""
    cut = [list(_cut(part, tail, segments)) for part in slot.replicas]
    count = max(map(len, cut))
    if count <= 1:
        return [slot]
    return [replace(slot, replicas=tuple(parts[at] if at < len(parts) else () for parts in cut)) for at in range(count)]


def _cut(part: PartRefs, tail: Tail, segments: Mapping[str, int]) -> Iterable[PartRefs]:
    """Cuts the samples of a microbatch between adapters, and within one that has too many segments itself."""
    start = at = num_segments = adapters = 0
    for name, group in groupby(part, key=lambda ref: ref.adapter):
        count, per_sample = len(list(group)), segments[name]
        if at > start and (num_segments + count * per_sample > tail.most_segments or adapters == tail.most_adapters):
            yield part[start:at]
            start, num_segments, adapters = at, 0, 0
        at, num_segments, adapters = at + count, num_segments + count * per_sample, adapters + 1
        most = max(1, tail.most_segments // per_sample)  # samples, if this adapter has a microbatch for itself
        while num_segments > tail.most_segments and at - start > most:
            yield part[start : start + most]
            start, num_segments = start + most, num_segments - most * per_sample
    if start < at:
        yield part[start:at]


def advance(cursors: Sequence[Cursor], tail: Tail, slots: tuple[Slot, ...]) -> Window:
    """Builds the window of these slots: batches that end, and positions and tail after them."""
    after = {cursor.job.name: cursor for cursor in cursors}
    done_positions = {name: set(cursor.done) for name, cursor in after.items()}
    sizes = {name: len(_positions(cursor)) for name, cursor in after.items()}
    slots_ago = {name: ago + len(slots) for name, ago in tail.ended.items() if name in after}
    ends: list[tuple[int, str, int]] = []
    tokens = dict.fromkeys(after, 0)
    for index, slot in enumerate(slots):
        for ref in slot.samples:
            cursor = after[ref.adapter]
            done_positions[ref.adapter].add(ref.epoch * len(cursor.job.sample_tokens) + ref.sample)
            tokens[ref.adapter] += cursor.job.sample_tokens[ref.sample]
            if len(done_positions[ref.adapter]) == sizes[ref.adapter]:
                ends.append((index, ref.adapter, cursor.batch))
                slots_ago[ref.adapter] = len(slots) - 1 - index
                after[ref.adapter] = cursor = replace(cursor, batch=cursor.batch + 1)
                done_positions[ref.adapter], sizes[ref.adapter] = set(), len(_positions(cursor))
    after = {name: replace(cursor, done=frozenset(done_positions[name])) for name, cursor in after.items()}
    ends.sort()
    idle = {name: tail.idle.get(name, 0) + len(slots) for name in after}
    idle |= {ref.adapter: len(slots) - 1 - index for index, slot in enumerate(slots) for ref in slot.samples}
    tail = replace(tail, idle=idle, ended=slots_ago, served=_served(after.values(), tail, tokens))
    return Window(slots=slots, ends=tuple(ends), cursors=tuple(after.values()), tail=tail)


def _served(cursors: Iterable[Cursor], tail: Tail, tokens: Mapping[str, int]) -> dict[str, float]:
    """Returns `Tail.served` after a window, of the jobs that have samples left."""
    room = tail.limits.slot_tiles * tail.limits.tile_tokens
    served = {
        cursor.job.name: tail.served.get(cursor.job.name, 0.0) + tokens[cursor.job.name] / room / cursor.job.weight
        for cursor in cursors
        if not cursor.is_finished
    }
    least = min(served.values(), default=0.0)
    return {name: slots - least for name, slots in served.items()}


def _positions(cursor: Cursor) -> range:
    """Positions of the open batch."""
    return range(0) if cursor.is_finished else cursor.job.batch_positions(cursor.batch)
