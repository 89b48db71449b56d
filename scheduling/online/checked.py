"""A policy whose decisions are checked before a caller sees them. A refused decision changes nothing and is counted."""

from __future__ import annotations

from typing import NamedTuple

from scheduling.errors import PlanError
from scheduling.online.check import check_decisions
from scheduling.online.policies.grouped import Packing
from scheduling.online.rates import Rates
from scheduling.online.state import ClusterState, Decision, Policy, Traits

REFUSALS_IN_A_ROW = 3  # after which the simpler policy decides


class Refusal(NamedTuple):
    """A decision that did not take effect."""

    time_s: float
    policy: str
    why: str


class CheckedPolicy:
    """Calls a policy and checks what it decides, for callers that must never stop.

    A refused decision changes nothing. From the third refusal in a row on, `fallback` decides as well, until the policy
    succeeds again.

    Args:
        policy: makes the decisions.
        rates: the checker's predictions.
        fallback: a simpler policy (None: `packing`).
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
        self.fallback = fallback or Packing(rates)
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
