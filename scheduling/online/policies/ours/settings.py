"""Parameters of our policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Parameters of the policy. Each switch turns off one idea, for ablations.

    Args:
        thrift: a new group's worth is divided by (its GPUs)^thrift, so that several small groups may be worth more.
        horizon_s: longest expected effect of a move. Shorter groups gain for as long as they last.
        margin: minimum relative gain for which a job is preempted or a group is split.
        urgent: share of the patience after which a waiting job goes first.
        fairness: priority of users that received less than their share.
        most_members: places of a session.
        candidates: number of waiting jobs of a base to try in a row without a gain.
        moves: maximum number of moves in one decision, except those onto free GPUs.
        short_first: whether the shortest jobs go first; else those that came first.
        grouping, residual, urgency, elasticity, preemption: switches. Without `residual` a group has at most four jobs,
            whatever capacity is left.
    """

    thrift: float = 0.5
    horizon_s: float = 900.0
    margin: float = 0.1
    urgent: float = 0.9
    fairness: float = 0.25
    most_members: int = 12
    candidates: int = 4
    moves: int = 12
    short_first: bool = True
    grouping: bool = True
    residual: bool = True
    urgency: bool = True
    elasticity: bool = True
    preemption: bool = True

    @property
    def largest_group(self) -> int:
        """Members up to which jobs join a group."""
        return self.most_members if self.residual else 4
