"""Checks the decisions of a policy before they take effect.

A decision that a `CheckedPolicy` refuses changes nothing and is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from scheduling.errors import PlanError
from scheduling.online.patience import (
    PATIENCE,
    StepCost,
    fair_times_s,
    owed_s,
    step_cost,
    users_above_share,
    worker_sizes,
)
from scheduling.online.policies.baselines import ElasticSrtf
from scheduling.online.rates import MESHES, Rates
from scheduling.online.state import ClusterState, Decision, GroupState, Policy, Traits, after, held_gpus
from scheduling.online.types import Job

BOUND_SLACK = 1e-6
WRONG = 0.25  # by which predictions may be off before a slowdown is refused, where the truth is known


def check_decisions(
    state: ClusterState,
    decisions: Sequence[Decision],
    rates: Rates,
    policy: Policy,
    now: float,
    *,
    tolerance: float = 0.0,
) -> None:
    """Checks that decisions are possible and that they keep the promises of the policy.

    Rules: a group is opened once, and is changed or closed only while it exists. Each job is in one group, of its own
    base. Each GPU is in one group and belongs to a worker that is up. A mesh has 1, 2, 4 or 8 GPUs, with memory for all
    members and room for their longest samples.

    Promises: the predicted slowdown of every member is within its bound. When a job has waited four times its fair
    time and its user is not above its share, no later job of equal or lower weight starts before it (`patience`). No
    user gets more GPUs than its quota.

    Args:
        tolerance: share by which a predicted slowdown may exceed its bound.

    Raises:
        PlanError: `online.decision`, with every violation.
    """
    state.check_clock(now)
    traits = Traits.of(policy)
    problems = [*_kinds(state, decisions)]
    if not problems:
        groups = after(state, decisions)
        decided_groups = {decision.group for decision in decisions}
        problems += _placement(state, groups)
        problems += _membership(state, groups)
        if not problems:
            for name in sorted(decided_groups & groups.keys()):
                most = 1 + tolerance if "bounds" in traits.promises else inf
                problems += _group(state, groups[name], rates, most)
        if "no starvation" in traits.promises and not problems:
            problems += _starvation(state, groups, rates, now)
        if "quotas" in traits.promises and not problems:
            problems += _quotas(state, groups)
    if problems:
        raise PlanError(
            "online.decision", f"{traits.name} decided what cannot be: {problems[0]}", problems=tuple(problems)
        )


def _kinds(state: ClusterState, decisions: Sequence[Decision]) -> Iterator[str]:
    closed_groups = {decision.group for decision in decisions if decision.kind == "close"}
    decision_keys: set[tuple[bool, str]] = set()
    for decision in decisions:
        exists = decision.group in state.groups
        if (decision.kind == "close", decision.group) in decision_keys:
            yield f"two decisions about {decision.group}"
        decision_keys.add((decision.kind == "close", decision.group))
        if decision.kind == "open" and exists and decision.group not in closed_groups:
            yield f"{decision.group} is open already"
        if decision.kind in ("change", "close") and not exists:
            yield f"{decision.group} does not exist"
        if decision.kind == "change" and decision.group in closed_groups:
            yield f"{decision.group} is changed and closed"
        if decision.kind != "close" and decision.mesh is None:
            yield f"{decision.group} has no mesh"
        if decision.kind == "change" and exists:
            before = state.groups[decision.group]
            if (before.base, before.worker) != (decision.base, decision.worker):
                yield f"{decision.group} cannot take another base or worker"


def _placement(state: ClusterState, groups: dict[str, GroupState]) -> Iterator[str]:
    job_on: dict[tuple[str, int], str] = {}
    for group in groups.values():
        worker = state.workers.get(group.worker)
        if worker is None:
            yield f"{group.name} is on {group.worker}, which is not up"
            continue
        if len(group.gpus) not in MESHES or group.mesh.gpus != len(group.gpus):
            yield f"{group.name} has {len(group.gpus)} GPUs for a mesh of {group.mesh.gpus}"
        for gpu in group.gpus:
            if not 0 <= gpu < worker.gpus:
                yield f"{group.name} is on GPU {gpu} of {worker.name}, which has {worker.gpus}"
            if (group.worker, gpu) in job_on:
                yield f"{group.name} and {job_on[group.worker, gpu]} share GPU {gpu} of {worker.name}"
            job_on[group.worker, gpu] = group.name


def _membership(state: ClusterState, groups: dict[str, GroupState]) -> Iterator[str]:
    member_of: dict[str, str] = {}
    for group in groups.values():
        for name in group.members:
            if name not in state.jobs:
                yield f"{group.name} trains {name}, which is no unfinished job"
            elif state.jobs[name].job.base_name != group.base:
                yield f"{group.name} trains {name} on {group.base}, not on its own base"
            if name in member_of:
                yield f"{name} is in {member_of[name]} and {group.name}"
            member_of[name] = group.name


def _group(state: ClusterState, group: GroupState, rates: Rates, most: float) -> Iterator[str]:
    if not group.members:
        return
    kind, jobs = state.workers[group.worker].kind, [state.jobs[name].job for name in group.members]
    memory_gib = rates.memory_gib(jobs, kind, group.mesh)
    if memory_gib is None:
        yield f"{group.name} needs more than {kind[1]:g} GiB a GPU"
        return
    rate = rates.formed(jobs, kind, group.mesh)
    if rate is None:
        yield f"{group.name} has microbatches shorter than a sample"
    elif rate.excess > most + BOUND_SLACK and len(jobs) > 1:
        slowest = max(zip(rate.slowdowns, group.members, strict=True))
        yield f"{group.name} slows {slowest[1]} down {slowest[0]:.2f} times"


def _starvation(state: ClusterState, groups: dict[str, GroupState], rates: Rates, now: float) -> Iterator[str]:
    running = {name for group in groups.values() for name in group.members}
    starts = [state.jobs[name] for name in running if state.jobs[name].group is None]
    if not starts:
        return
    latest, sizes = max(job_state.job.arrival_s for job_state in starts), worker_sizes(state)
    patient = [
        job_state
        for name, job_state in state.jobs.items()
        if job_state.group is None and job_state.job.arrival_s < latest and name not in running
    ]

    def cost(job: Job) -> StepCost:
        return step_cost(rates, job, sizes)

    if not any(
        job_state.waited(now) > PATIENCE * job_state.job.steps * cost(job_state.job).seconds / job_state.speed
        for job_state in patient
    ):
        return
    fair_s, above = fair_times_s(state, cost), users_above_share(owed_s(state))
    for job_state in patient:
        if job_state.job.user not in above and job_state.waited(now) > PATIENCE * fair_s[job_state.job.name]:
            later = [
                s for s in starts if s.job.arrival_s > job_state.job.arrival_s and s.job.weight <= job_state.job.weight
            ]
            if later:
                yield f"{later[0].job.name} starts while {job_state.job.name} has waited {job_state.waited(now):.0f} s"
                return


def _quotas(state: ClusterState, groups: dict[str, GroupState]) -> Iterator[str]:
    quotas = {name: user.user.max_gpus for name, user in state.users.items() if user.user.max_gpus is not None}
    if not quotas:
        return
    gpus_before, gpus_after = (
        held_gpus(((len(group.gpus), group.members) for group in of.values()), state.jobs)
        for of in (state.groups, groups)
    )
    for user, most in quotas.items():
        if gpus_after.get(user, 0.0) > max(most, gpus_before.get(user, 0.0)) + BOUND_SLACK:
            yield f"{user} holds {gpus_after[user]:.2f} GPUs and has a quota of {most:g}"


SETTLE_S = 60.0  # of training before which the fallback takes nothing from a group
REFUSALS_IN_A_ROW = 3  # after which the simpler policy decides


def _check_settled(state: ClusterState, decisions: Sequence[Decision], policy: Policy, now: float) -> None:
    """Checks that a fallback leaves groups alone that have just begun: the policy, or it, had a reason for them.

    Raises:
        PlanError: `online.decision`.
    """
    groups = after(state, decisions)
    for name, group in state.groups.items():
        later = groups.get(name)
        leavers = set(group.members) - (set(later.members) if later is not None and later.gpus == group.gpus else set())
        if leavers and group.ready_s + SETTLE_S > now:
            problem = f"it takes {', '.join(sorted(leavers))} from {name}, which has not trained for {SETTLE_S:g} s"
            raise PlanError("online.decision", f"{Traits.of(policy).name}: {problem}", problems=(problem,))


class Refusal(NamedTuple):
    """A decision that did not take effect."""

    time_s: float
    policy: str
    why: str


class CheckedPolicy:
    """Calls a policy and checks what it decides, for callers that must never stop.

    A refused decision changes nothing. From the third refusal in a row on, `fallback` decides as well, until the policy
    succeeds again. It takes no GPUs and no member from a group that has trained for less than a minute.

    Args:
        policy: makes the decisions.
        rates: the checker's predictions.
        fallback: a simpler policy (None: `elastic-srtf`).
        tolerance: share by which a predicted slowdown may exceed its bound, where the checker's predictions are others.
        strict: raise on a refusal instead.

    Attributes:
        refusals: every refusal, in order.

    Raises:
        PlanError: of `decide`: `online.clock` and `online.speed`, which are errors of the caller; if strict,
            `online.decision`.

    >>> from scheduling.online import ClusterState, Ours, Rates, Worker
    >>> policy = CheckedPolicy(Ours(Rates()), Rates())
    >>> policy.decide(ClusterState(time_s=0.0, workers={"host0": Worker("host0", 8)}, jobs={}), 0.0), policy.refusals
    ([], [])
    """

    def __init__(
        self,
        policy: Policy,
        rates: Rates,
        *,
        fallback: Policy | None = None,
        tolerance: float = 0.0,
        strict: bool = False,
    ):
        traits = Traits.of(policy)
        self.name, self.mixes, self.promises = traits.name, traits.mixes, traits.promises
        self.policy, self.rates, self.tolerance, self.strict = policy, rates, tolerance, strict
        self.fallback = fallback or ElasticSrtf(rates, settle_s=SETTLE_S)
        self.refusals: list[Refusal] = []
        self.refused_in_a_row = 0

    def decide(self, state: ClusterState, now: float) -> list[Decision]:
        """The decisions of the policy, or of its fallback, that passed the checks; else none."""
        state.check_clock(now)
        decisions = self._attempt(self.policy, state, now)
        if decisions is not None:
            self.refused_in_a_row = 0
            return decisions
        self.refused_in_a_row += 1
        if self.refused_in_a_row < REFUSALS_IN_A_ROW:
            return []
        return self._attempt(self.fallback, state, now) or []

    def _attempt(self, policy: Policy, state: ClusterState, now: float) -> list[Decision] | None:
        """The policy's decisions; None if they are refused, or if it failed."""
        try:
            decisions = policy.decide(state, now)
            if decisions and policy is self.fallback:
                _check_settled(state, decisions, policy, now)
            if decisions:
                check_decisions(state, decisions, self.rates, policy, now, tolerance=self.tolerance)
            return decisions
        except PlanError as error:
            if self.strict or error.code != "online.decision":
                raise
            why = "; ".join(error.problems or (error.what,))
        except Exception as error:  # a bug of a policy must not stop a service
            if self.strict:
                raise
            why = f"{type(error).__name__}: {error}"
        self.refusals.append(Refusal(now, Traits.of(policy).name, why))
        return None
