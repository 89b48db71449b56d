"""Lookup tables of a plan for the loop."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.session.batches import Batches
from lorafusion_jax.session.session import Session
from lorafusion_jax.training.job import Job
from scheduling import Plan


class PlanTables:
    """Tables of the job's current plan. Call `renew` after the plan was replaced.

    Attributes:
        batches: microbatches of the slots.
        slot_tokens: real tokens of every adapter in every slot.
        slot_rows: rows that every slot computes, of all replicas.
        last_slot: in which each adapter takes its last step; -1: none.
    """

    def __init__(self, job: Job, session: Session):
        self._job, self._session = job, session
        self.batches = Batches(job.config, job.prepared, job.plan, session.assembler, session.tasks)
        self._count()

    def renew(self) -> None:
        """Rebuilds the tables from the job. Microbatches keep their shape if the new samples fit into it."""
        self._session.take_data(self._job.config, self._job.prepared)
        self.batches.replace_plan(self._job.config, self._job.prepared, self._job.plan)
        self._count()

    def _count(self) -> None:
        plan, prepared = self._job.plan, self._job.prepared
        self.slot_tokens = slot_tokens(plan, prepared)
        self.slot_rows = [
            rows * len(slot.replicas) for slot, rows in zip(plan.slots, plan.slot_capacities, strict=True)
        ]
        self.last_slot = dict.fromkeys((adapter.name for adapter in self._job.config.adapters), -1) | {
            name: slot for slot, name, _ in plan.batches_ending()
        }


def slot_tokens(plan: Plan, prepared: Prepared) -> list[dict[str, int]]:
    """Counts the real tokens of every adapter in every slot."""
    lengths: Mapping[str, np.ndarray] = {name: data.stream_tokens() for name, data in prepared.adapters.items()}
    result: list[dict[str, int]] = []
    for slot in plan.slots:
        tokens: dict[str, int] = {}
        for ref in slot.samples:
            tokens[ref.adapter] = tokens.get(ref.adapter, 0) + int(lengths[ref.adapter][ref.sample])
        result.append(tokens)
    return result
