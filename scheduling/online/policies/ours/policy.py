"""The policy: which moves it tries, in which order.

A configuration saves  Σ over running jobs of  claim · rate  seconds of completion times a second, where rates are in
GPU-seconds of isolated work. A move is made if its gain over `horizon_s`, or while the group lasts, exceeds the loss
while groups stop for it.
"""

from __future__ import annotations

from functools import partial
from math import inf

from scheduling.online.patience import Sizes, StepCost, step_cost, worker_sizes
from scheduling.online.policies.ours.claims import weigh
from scheduling.online.policies.ours.members import join_or_swap, repair
from scheduling.online.policies.ours.packs import evict, fill_free
from scheduling.online.policies.ours.search import Search
from scheduling.online.policies.ours.settings import Settings
from scheduling.online.policies.ours.sizes import grow, split
from scheduling.online.policies.ours.urgent import place_urgent
from scheduling.online.rates import Rates
from scheduling.online.state import ClusterState, Decision
from scheduling.online.types import Job

MOST_PRIORITIES = 8  # that wait and are placed one after the other; jobs of all lower ones come with the last
SPARE = 100  # jobs in the cache beyond twice those of a state


class Ours:
    """Groups jobs by their joint gain; grows, shrinks, merges and preempts groups if that pays off.

    Args:
        rates: predicts the rates of groups.
        settings: parameters of the policy.
    """

    mixes = True

    def __init__(self, rates: Rates, settings: Settings | None = None, name: str = "ours"):
        self.rates, self.settings, self.name = rates, settings or Settings(), name
        self.promises = frozenset({"bounds", "quotas"} | ({"no starvation"} if self.settings.urgency else set[str]()))
        self._known: dict[str, tuple[Job, Sizes, StepCost]] = {}  # cache across decisions

    def decide(self, state: ClusterState, now: float) -> list[Decision]:
        """Returns the changes to make now; empty if no change pays off."""
        state.check_clock(now)
        if not state.jobs or not state.workers:
            return []
        self._forget_ended(state)
        self._prepare_new(state)
        claims = weigh(state, now, self.settings, partial(self._step_cost, worker_sizes(state)))
        search = Search(self.rates, self.settings, state, now, claims)
        repair(search)
        priority = search.next_priority(inf)
        for _ in range(MOST_PRIORITIES):
            if priority is None:
                break
            search.begin(priority)
            self._place(search)
            priority = search.next_priority(priority)
        for _ in range(self.settings.moves if self.settings.elasticity else 0):
            if not grow(search):
                break
        return search.draft.decisions()

    def _place(self, search: Search) -> None:
        """Finds places for the jobs that wait."""
        place_urgent(search)
        for _ in range(self.settings.moves):
            while fill_free(search):
                pass
            if not (join_or_swap(search) or split(search) or evict(search)):
                break

    def _forget_ended(self, state: ClusterState) -> None:
        """Keeps the cache about as small as the state: a service runs for months."""
        if len(self._known) > 2 * len(state.jobs) + SPARE:
            self._known = {name: entry for name, entry in self._known.items() if name in state.jobs}

    def _prepare_new(self, state: ClusterState) -> None:
        new_jobs = [job_state.job for name, job_state in state.jobs.items() if name not in self._known]
        if new_jobs:
            self.rates.prepare(new_jobs)

    def _step_cost(self, sizes: Sizes, job: Job) -> StepCost:
        entry = self._known.get(job.name)
        if entry is None or entry[0] is not job or entry[1] != sizes:
            entry = self._known[job.name] = (job, sizes, step_cost(self.rates, job, sizes))
        return entry[2]
