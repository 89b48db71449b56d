"""Input and output of a policy: the state of a cluster, and decisions about groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from scheduling.errors import PlanError
from scheduling.online.sharing import Mesh
from scheduling.online.types import Job, User, Worker


@dataclass(frozen=True, slots=True)
class JobState:
    """An unfinished job.

    Args:
        done_steps: optimizer steps taken until `at_s`.
        at_s: time of the last update; since then the job trains at `steps_per_s`.
        steps_per_s: 0 while it waits.
        group: name of its group; None while it waits.
        waited_s: seconds without a group, until `at_s`.
        in_groups_s: seconds in groups, until `at_s`.
        alone_s: isolated time of its steps so far, on its fair share of its groups' GPUs.
        speed: measured over predicted steps per second, if a live run has reported it.
        ahead_s: GPU-seconds of isolated work that its user's other jobs had left when it arrived (`work_ahead_s`).
    """

    job: Job
    done_steps: float = 0.0
    at_s: float = 0.0
    steps_per_s: float = 0.0
    group: str | None = None
    waited_s: float = 0.0
    in_groups_s: float = 0.0
    alone_s: float = 0.0
    speed: float = 1.0
    ahead_s: float = 0.0

    def left_steps(self, now: float) -> float:
        """Predicted; at least one, for a job that is later than predicted has not ended."""
        since = now - self.at_s  # without max(): a decision asks for every job
        done_steps = self.done_steps + self.steps_per_s * since if since > 0.0 else self.done_steps
        return self.job.steps - done_steps if done_steps + 1.0 < self.job.steps else 1.0

    def waited(self, now: float) -> float:
        """Seconds without a group since arrival."""
        return self.waited_s + (now - self.at_s if self.group is None else 0.0)


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group: jobs that share a session on some GPUs of a worker.

    Args:
        members: names of its jobs, in the order of their places. Without members the session is idle with its base
            loaded.
        ready_s: time at which it starts or continues to train.
    """

    name: str
    base: str
    worker: str
    gpus: tuple[int, ...]
    mesh: Mesh
    members: tuple[str, ...]
    ready_s: float = 0.0


@dataclass(frozen=True, slots=True)
class UserState:
    """A user's account: GPU-seconds that its jobs received, and what they would receive in a max–min fair cluster."""

    user: User
    got: float = 0.0
    entitled: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """Everything that a decision depends on, except the time.

    Args:
        time_s: latest time in the state.
        workers: workers that are up.
        jobs: jobs that have arrived and are unfinished, in order of arrival.
    """

    time_s: float
    workers: Mapping[str, Worker]
    jobs: Mapping[str, JobState]
    groups: Mapping[str, GroupState] = field(default_factory=dict[str, GroupState])
    users: Mapping[str, UserState] = field(default_factory=dict[str, UserState])

    def check_clock(self, now: float) -> None:
        """Checks that the clock has not gone back.

        Raises:
            PlanError: `online.clock`.
        """
        if not now >= self.time_s:
            raise PlanError(
                "online.clock",
                f"the clock stepped back: it is {now!r} s and the state is of {self.time_s!r} s",
                fix="use a monotonic clock",
            )


Kind = Literal["open", "change", "close"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One change of one group. All decisions of one time take effect together.

    Args:
        kind: "open" starts a session. "change" changes its members, its mesh or its GPUs within the worker. "close"
            ends it. A job that is no longer a member of any group waits, with its progress saved.
        why: the reason, in one line.
    """

    kind: Kind
    group: str
    base: str = ""
    worker: str = ""
    gpus: tuple[int, ...] = ()
    mesh: Mesh | None = None
    members: tuple[str, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        if self.kind == "close":
            return f"close {self.group}: {self.why}"
        assert self.mesh is not None
        gpus = f"{self.mesh.gpus} GPU{'s' if self.mesh.gpus > 1 else ''}"
        stages = f", {self.mesh.stages} stages" if self.mesh.stages > 1 else ""
        on = f"{self.base} on {gpus}{stages}, {self.mesh.capacity_tokens} tokens a microbatch"
        return f"{self.kind} {self.group} ({on}): {', '.join(self.members) or 'idle'}; {self.why}"


class Policy(Protocol):
    """A scheduling policy. It is pure: equal states and times give equal decisions.

    It may define the attributes of `Traits`.
    """

    def decide(self, state: ClusterState, now: float) -> list[Decision]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Properties of a policy.

    Args:
        name: shown in tables.
        mixes: a microbatch of a group may hold samples of several jobs.
        promises: rules that the checker enforces beyond capacity: "bounds", "no starvation", "quotas".
    """

    name: str
    mixes: bool = True
    promises: frozenset[str] = frozenset()

    @staticmethod
    def of(policy: Policy) -> Traits:
        """Reads the attributes of a policy; missing ones have their defaults."""
        return Traits(
            name=getattr(policy, "name", type(policy).__name__),
            mixes=getattr(policy, "mixes", True),
            promises=getattr(policy, "promises", frozenset[str]()),
        )


def after(state: ClusterState, decisions: Sequence[Decision]) -> dict[str, GroupState]:
    """The groups after these decisions, without times."""
    groups = dict(state.groups)
    for decision in decisions:
        if decision.kind == "close":
            groups.pop(decision.group, None)
    for decision in decisions:
        if decision.kind != "close":
            assert decision.mesh is not None
            groups[decision.group] = GroupState(
                decision.group, decision.base, decision.worker, decision.gpus, decision.mesh, decision.members
            )
    return groups


def held_gpus(groups: Iterable[tuple[int, Sequence[str]]], jobs: Mapping[str, JobState]) -> dict[str, float]:
    """GPUs per user: a group's GPUs are split by the weights of its members."""
    gpus_by_user: dict[str, float] = {}
    for gpus, members in groups:
        weights = [jobs[name].job.weight for name in members]
        for name, weight in zip(members, weights, strict=True):
            user = jobs[name].job.user
            gpus_by_user[user] = gpus_by_user.get(user, 0.0) + gpus * weight / sum(weights)
    return gpus_by_user
