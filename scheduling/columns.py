"""The samples of a plan as columns, for whatever looks at all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from scheduling.types import AdapterJob, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleColumns:
    """All sample references of a plan, in the order of execution.

    Attributes:
        job: number of the job; -1: the plan has no job of this name.
    """

    job: np.ndarray
    epoch: np.ndarray
    batch: np.ndarray
    sample: np.ndarray
    slot: np.ndarray
    replica: np.ndarray

    @staticmethod
    def of(slots: Sequence[Slot], number_of: Mapping[str, int]) -> SampleColumns:
        """Reads slots.

        Args:
            number_of: number of the job of each name.
        """
        parts = [part for slot in slots for part in slot.replicas]
        sizes = [len(part) for part in parts]
        slot_of = [index for index, slot in enumerate(slots) for _ in slot.replicas]
        replica_of = [index for slot in slots for index in range(len(slot.replicas))]
        refs = list(chain.from_iterable(parts))
        adapters, epochs, batches, samples = zip(*refs, strict=True) if refs else ((), (), (), ())
        return SampleColumns(
            job=np.array([number_of.get(name, -1) for name in adapters], np.int64),
            epoch=np.array(epochs, np.int64),
            batch=np.array(batches, np.int64),
            sample=np.array(samples, np.int64),
            slot=np.repeat(np.array(slot_of, np.int64), sizes),
            replica=np.repeat(np.array(replica_of, np.int64), sizes),
        )

    def at(self, rows: np.ndarray) -> SampleColumns:
        """Some rows, by number or by mask."""
        return SampleColumns(
            job=self.job[rows],
            epoch=self.epoch[rows],
            batch=self.batch[rows],
            sample=self.sample[rows],
            slot=self.slot[rows],
            replica=self.replica[rows],
        )

    def tokens(self, jobs: Sequence[AdapterJob]) -> np.ndarray:
        """Tokens of each sample."""
        starts = np.cumsum([0, *(len(job.sample_tokens) for job in jobs)])
        lengths = np.array(list(chain.from_iterable(job.sample_tokens for job in jobs)), np.int64)
        return lengths[starts[self.job] + self.sample]

    def last_slots(self) -> LastSlots:
        """Returns the batches that have samples, and the last slot of each."""
        rows = self.at(self.job >= 0)
        num_batches = np.zeros(int(rows.job.max(initial=-1)) + 1, np.int64)
        np.maximum.at(num_batches, rows.job, rows.batch + 1)
        starts = np.cumsum(num_batches) - num_batches
        key = starts[rows.job] + rows.batch
        last = np.full(int(num_batches.sum()), -1)
        np.maximum.at(last, key, rows.slot)
        present = np.flatnonzero(last >= 0)
        job = np.searchsorted(starts, present, side="right") - 1
        samples = np.bincount(key, minlength=last.size)[present]
        return LastSlots(job=job, batch=present - starts[job], slot=last[present], samples=samples)


class LastSlots(NamedTuple):
    """The last slot of each batch, and how many of its samples are planned."""

    job: np.ndarray
    batch: np.ndarray
    slot: np.ndarray
    samples: np.ndarray


class Parts(NamedTuple):
    """The samples of one adapter in one microbatch: a row for each, in the order of execution."""

    job: np.ndarray
    slot: np.ndarray
    replica: np.ndarray
    tokens: np.ndarray
    squares: np.ndarray  # Σ length²

    @staticmethod
    def of(columns: SampleColumns, jobs: Sequence[AdapterJob]) -> Parts:
        """Adds up the samples of a valid plan, where those of an adapter follow each other."""
        if not columns.job.size:
            nothing = np.zeros(0, np.int64)
            return Parts(nothing, nothing, nothing, nothing, nothing)
        tokens = columns.tokens(jobs)
        changes = [np.diff(column) != 0 for column in (columns.job, columns.slot, columns.replica)]
        first = np.flatnonzero(np.r_[True, changes[0] | changes[1] | changes[2]])
        return Parts(
            job=columns.job[first],
            slot=columns.slot[first],
            replica=columns.replica[first],
            tokens=np.add.reduceat(tokens, first),
            squares=np.add.reduceat(tokens * tokens, first),
        )
