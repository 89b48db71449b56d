"""Parameters of our policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Parameters of the policy. Each switch turns off one idea, for ablations.

    Args:
        sharpness: α, the preference for short jobs.
        frugality: discount of groups that train slowly for their GPUs, while jobs wait.
        thrift: a new group's worth is divided by (its GPUs)^thrift, while more jobs wait than fit.
        start_work_s: START, GPU-seconds of work below which jobs count as equally short.
        horizon_s: expected duration of a move's effect.
        delay_price: weight of the delay that one more member causes to the others of its group. 1 is right if no more
            jobs come; each one that comes makes grouping worth more.
        margin: minimum relative gain for which a job is preempted or a group is split.
        urgent: share of the patience after which a waiting job goes first.
        fairness: priority of users that received less than their share.
        most_members: places of a session.
        candidates: number of waiting jobs of a base to try in a row without a gain.
        moves: maximum number of moves in one decision, except those onto free GPUs.
        grouping, residual, urgency, elasticity, preemption: switches. Without `residual` a group has at most four jobs,
            whatever capacity is left.
    """

    sharpness: float = 0.5
    frugality: float = 3.0
    thrift: float = 0.5
    start_work_s: float = 120.0
    horizon_s: float = 900.0
    delay_price: float = 0.5
    margin: float = 0.1
    urgent: float = 0.4
    fairness: float = 1.0
    most_members: int = 12
    candidates: int = 4
    moves: int = 12
    grouping: bool = True
    residual: bool = True
    urgency: bool = True
    elasticity: bool = True
    preemption: bool = True

    @property
    def largest_group(self) -> int:
        """Members up to which jobs join a group."""
        return self.most_members if self.residual else 4
