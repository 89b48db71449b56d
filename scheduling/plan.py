"""The plan: slots of samples, with the jobs and limits that they were planned for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scheduling.columns import Parts, SampleColumns
from scheduling.serialize import SETTINGS, PlanContent, content_from_json, content_lines, lines_digest, lines_to_json
from scheduling.types import AdapterJob, Layout, Limits, Slot


@dataclass(frozen=True, kw_only=True)  # no __slots__: cached properties live in __dict__
class Plan:
    """Which sample runs in which slot. It holds its jobs, so it can be simulated and drawn without other input.

    Args:
        jobs: all jobs of the plan, in the order given.
        slots: in the order of execution.
        capacity_tokens: the largest capacity of a microbatch.
        lower_bound: no plan for these jobs can have fewer slots.
        stopped: (adapter, slot) pairs. A cancelled or paused adapter has no samples from that slot on.
        earlier: layouts that the run used before it moved to this number of stages and replicas, in order.
        smaller: other capacities that a slot may have, ascending.
    """

    jobs: tuple[AdapterJob, ...]
    slots: tuple[Slot, ...]
    capacity_tokens: int
    num_stages: int
    data_parallel: int = 1
    tile_tokens: int = 128
    seed: int = 0
    lower_bound: int = 0
    stopped: tuple[tuple[str, int], ...] = ()
    earlier: tuple[Layout, ...] = ()
    smaller: tuple[int, ...] = ()

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    @property
    def limits(self) -> Limits:
        return Limits(
            capacity_tokens=self.capacity_tokens,
            num_stages=self.num_stages,
            data_parallel=self.data_parallel,
            tile_tokens=self.tile_tokens,
            smaller=self.smaller,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """All capacities that a slot may have, ascending."""
        return (*self.smaller, self.capacity_tokens)

    @cached_property
    def slot_capacities(self) -> tuple[int, ...]:
        """The capacity of each slot."""
        return tuple(slot.capacity_tokens or self.capacity_tokens for slot in self.slots)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of the run, in order; more than one only if the run has moved."""
        return (*self.earlier, Layout(self.num_slots, self.num_stages, self.data_parallel))

    def layouts_before(self, slot: int) -> tuple[Layout, ...]:
        """The layouts of the slots before `slot`."""
        layouts = [layout._replace(end=min(layout.end, slot)) for layout in self.layouts]
        starts = [0, *(layout.end for layout in layouts)]
        return tuple(layout for start, layout in zip(starts, layouts, strict=False) if start < layout.end)

    @cached_property
    def slots_of_size(self) -> dict[int, int]:
        """Slots of each capacity that are no no-ops, by capacity, ascending."""
        sizes = (size for slot, size in zip(self.slots, self.slot_capacities, strict=True) if not slot.is_noop)
        return dict(sorted(Counter(sizes).items()))

    @cached_property
    def num_noops(self) -> int:
        return sum(slot.is_noop for slot in self.slots)

    @cached_property
    def job_of(self) -> dict[str, AdapterJob]:
        return {job.name: job for job in self.jobs}

    @cached_property
    def tokens(self) -> int:
        """Real tokens in all slots, without padding."""
        return int(self.parts.tokens.sum())

    @cached_property
    def columns(self) -> SampleColumns:
        """All its samples."""
        return SampleColumns.of(self.slots, {job.name: number for number, job in enumerate(self.jobs)})

    @cached_property
    def parts(self) -> Parts:
        """What each adapter has in each microbatch."""
        return Parts.of(self.columns, self.jobs)

    @cached_property
    def slot_adapters(self) -> list[tuple[str, ...]]:
        """The adapters of each slot, in the order of their first samples."""
        names: list[dict[str, None]] = [{} for _ in self.slots]
        jobs: list[int] = self.parts.job.tolist()
        slots: list[int] = self.parts.slot.tolist()
        for job, slot in zip(jobs, slots, strict=True):
            names[slot][self.jobs[job].name] = None
        return [tuple(of_slot) for of_slot in names]

    @property
    def density(self) -> float:
        """Real tokens / room."""
        return self.tokens / self.room if self.room else 0.0

    @property
    def room(self) -> int:
        """Tokens that the slots can hold: Σ replicas · capacity."""
        starts = [0, *(layout.end for layout in self.earlier)]
        return sum(
            sum(self.slot_capacities[start : layout.end]) * layout.data_parallel
            for start, layout in zip(starts, self.layouts, strict=True)
        )

    @property
    def gap(self) -> float:
        """Upper bound on the distance to the shortest plan: slots / lower bound - 1."""
        return self.num_slots / self.lower_bound - 1 if self.lower_bound else 0.0

    def batches_ending(self) -> Iterator[tuple[int, str, int]]:
        """Yields (slot, adapter, batch) for each batch that is complete after that slot, in order of slots.

        Incomplete batches of stopped adapters are not listed.
        """
        yield from self._batches_ending

    @cached_property
    def _batches_ending(self) -> list[tuple[int, str, int]]:
        names = [job.name for job in self.jobs]
        sizes = {(name, batch): size for name, _ in self.stopped for batch, size in self.job_of[name].batch_sizes()}
        last = self.columns.last_slots()
        rank = np.argsort(np.argsort(np.array(names, object)))  # of the names
        order = np.lexsort((last.batch, rank[last.job], last.slot))
        jobs, batches, slots, counts = ([int(number) for number in column[order].tolist()] for column in last)
        return [
            (slot, names[job], batch)
            for job, batch, slot, count in zip(jobs, batches, slots, counts, strict=True)
            if sizes.get((names[job], batch), count) == count
        ]

    @cached_property
    def digest(self) -> str:
        """sha256 of the content. Equal digests mean equal plans."""
        return lines_digest(content_lines(self._content()))

    def to_json(self) -> str:
        """Writes the plan as readable JSON: one line per slot, with schema version, digest and statistics."""
        lines = content_lines(self._content())
        self.__dict__.setdefault("digest", lines_digest(lines))  # of a million samples the lines take a second
        statistics = {
            "slots": self.num_slots,
            "noops": self.num_noops,
            "tokens": self.tokens,
            "density": round(self.density, 6),
            "gap": round(self.gap, 6),
        }
        return lines_to_json(lines, self.digest, statistics)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads the output of `to_json`. The round trip is exact.

        Raises:
            PlanError: invalid JSON, another schema version, or a digest that does not match the content.
        """
        content = content_from_json(text)
        return Plan(
            jobs=content.jobs,
            slots=content.slots,
            stopped=content.stopped,
            earlier=content.earlier,
            smaller=content.smaller,
            **content.settings,
        )

    def _content(self) -> PlanContent:
        settings = {name: getattr(self, name) for name in SETTINGS}
        return PlanContent(settings, self.jobs, self.slots, self.stopped, self.earlier, self.smaller)
