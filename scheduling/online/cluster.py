"""Entry point of the cluster simulator."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf

from scheduling.errors import PlanError
from scheduling.online.check import WRONG, CheckedPolicy
from scheduling.online.policies.baselines import Backfill, ElasticSrtf, Fifo, Mlora, Packing, Srtf, Tlora
from scheduling.online.policies.ours import Ours
from scheduling.online.rates import Rates
from scheduling.online.result import ClusterResult
from scheduling.online.simulator import Simulator
from scheduling.online.state import Policy
from scheduling.online.types import End, Fault, Job, User, Worker

POLICIES = {
    "ours": Ours,
    "fifo": Fifo,
    "backfill": Backfill,
    "srtf": Srtf,
    "elastic-srtf": ElasticSrtf,
    "mlora": Mlora,
    "packing": Packing,
    "tlora": Tlora,
}


def make_policy(name: str, rates: Rates) -> Policy:
    """Returns a policy by its name.

    Raises:
        PlanError: `online.policy`.
    """
    if name not in POLICIES:
        raise PlanError("online.policy", f"no policy {name!r}", fix=f"one of {', '.join(POLICIES)}")
    return POLICIES[name](rates)


def simulate_cluster(
    jobs: Sequence[Job],
    workers: Sequence[Worker],
    policy: str | Policy = "ours",
    seed: int = 0,
    faults: Sequence[Fault | tuple[str, float, float]] = (),
    users: Sequence[User] = (),
    rates: Rates | None = None,
    truth: Rates | None = None,
    ends: Sequence[End] = (),
    late: float = 0.0,
) -> ClusterResult:
    """Simulates jobs that arrive over time on a cluster until all are done. The result is deterministic.

    Args:
        policy: a name from `POLICIES`, or an object with `decide(state, now)`. A refused decision of a named policy, or
            of a `CheckedPolicy`, changes nothing and is in the result; one of another object raises.
        seed: for policies that draw random numbers; the built-in ones do not.
        faults: workers that fail for some time; tuples are (worker, start_s, duration_s).
        users: weights and quotas; other users have weight 1.
        rates: cached predictions of the policy, to share between several runs of the same jobs.
        truth: how fast groups really train (None: as predicted). The checker knows the truth, and forgives a slowdown
            that is a quarter above its bound.
        ends: jobs that stop early, fail or are cancelled; the policy does not know before.
        late: every job ends so much later than its steps say (0.3: by 30 %; below 0: earlier), which the policy does
            not know either.

    Raises:
        PlanError: bad input, a job that no worker has the memory for, or a decision that breaks a rule.
    """
    if not -1.0 < late < inf:
        raise PlanError("online.late", f"late must be above -1, not {late!r}", fix="late=0.01: one per cent later")
    rates = rates or Rates()
    tolerance = WRONG if truth else 0.0
    chosen = make_policy(policy, rates) if isinstance(policy, str) else policy
    if isinstance(policy, str):
        chosen = CheckedPolicy(chosen, truth or rates, tolerance=tolerance)
    events = [fault if isinstance(fault, Fault) else Fault(*fault) for fault in faults]
    with few_collections():
        predicted = rates if truth else None
        simulator = Simulator(
            jobs, workers, chosen, truth or rates, predicted=predicted, users=users, faults=events, ends=ends, late=late
        )
        return simulator.run()


@contextmanager
def few_collections() -> Iterator[None]:
    """Rates are cached in millions of small tuples; looking through them for cycles again and again costs 4 %."""
    usual = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
