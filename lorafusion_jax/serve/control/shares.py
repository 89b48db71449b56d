"""Shares of the places of one session: which jobs train now, and which wait for what.

Higher priorities come first. Within a priority every user has a share of the places by weight: the user with the fewest
places for its weight gets the next one, and its jobs follow their deadlines, then their arrival. A job leaves its place
for one of a higher priority, and for one of a user who would still have fewer places for its weight after that. A model
of the training API keeps its place until its client leaves, and a job that has settled leaves its own for a model.
Whoever holds a larger place than it needs moves to a smaller free one as soon as somebody waits for the larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log

from lorafusion_jax.config.places import Places
from lorafusion_jax.serve.control.spec import kind_of
from lorafusion_jax.serve.states import ON_WORKER
from lorafusion_jax.serve.store.jobs import Job as Row
from lorafusion_jax.serve.store.keys import Limits

ROUND_S = 1.0  # between two decisions while nothing changes
HALF_LIFE_S = 3600.0  # after which what a user has received counts half


@dataclass(slots=True)
class _User:
    limits: Limits
    held: int = 0

    def level(self, more: int = 0) -> float:
        """Places for its weight, with some more."""
        return (self.held + more) / self.limits.share


@dataclass(slots=True)
class Shares:
    """Decides for the places of one session.

    Args:
        settle_s: in its place before a job leaves it to one of equal priority, or to a model.

    Attributes:
        served: per user, place-seconds for its weight, recent ones most: it breaks ties between users.
    """

    layout: Places
    settle_s: float = 60.0
    served: dict[str, float] = field(default_factory=dict[str, float])
    _since: dict[str, float] = field(default_factory=dict[str, float])  # job → when it was first seen in a place
    _moving: set[str] = field(default_factory=set[str])  # jobs on their way from a place to another
    _at: float = -inf
    _answer: tuple[list[object], list[str]] | None = None  # what was asked last, and the answer

    def choose(self, rows: Sequence[Row], limits: Mapping[str, Limits], now: float) -> list[str]:
        """Returns the jobs that shall have a place: some that have one, and queued ones for the places that are left.

        Args:
            rows: jobs that may run, by priority and then arrival.
            limits: of users that have other ones than the default.
        """
        inputs = [limits, *((row["id"], row["state"], row["place"], row["priority"], row["deadline"]) for row in rows)]
        if self._answer is not None and now < self._at + ROUND_S and inputs == self._answer[0]:
            return self._answer[1]
        users = {row["owner"]: _User(limits.get(row["owner"], Limits())) for row in rows}
        staying = [row for row in rows if row["state"] in ("starting", "running") and row["place"] is not None]
        self._account(rows, users, now)
        for row in staying:
            users[row["owner"]].held += 1
        occupied = {row["place"] for row in staying}
        moving = [row for row in rows if row["id"] in self._moving and row["state"] in ("draining", "queued")]
        self._moving = {row["id"] for row in moving}
        starting = self._reserve(moving, users, occupied)
        starting += self._fill([row for row in rows if row["id"] not in self._moving], users, occupied)
        if (leaving := self._leaving(rows, starting, staying, users, occupied, now)) is not None:
            staying.remove(leaving)
            if self._fits_elsewhere(leaving, occupied):
                self._moving.add(leaving["id"])
        self._answer = inputs, [row["id"] for row in (*staying, *starting)]
        return self._answer[1]

    def order(self, rows: Sequence[Row], limits: Mapping[str, Limits]) -> list[Row]:
        """The queued jobs in the order in which they would get places, if nobody came or ended."""
        users = {row["owner"]: _User(limits.get(row["owner"], Limits())) for row in rows}
        for row in rows:
            users[row["owner"]].held += row["state"] in ON_WORKER
        queue: list[Row] = []
        for row in self._in_turn(rows, users, quotas=False):
            users[row["owner"]].held += 1
            queue.append(row)
        return queue

    def full(self, row: Row, rows: Sequence[Row], limits: Limits) -> str:
        """What a queued job waits for."""
        jobs_of_owner = [other for other in rows if other["owner"] == row["owner"] and other["state"] in ON_WORKER]
        if limits.places is not None and len(jobs_of_owner) >= limits.places:
            return f"{row['owner']} has {len(jobs_of_owner)} places, of at most {limits.places}"
        occupied = {other["place"] for other in rows if other["state"] in ON_WORKER}
        if self.layout.find(kind_of(row["spec"]), row["rank"], occupied) is not None:
            return "a place is free: it starts now, unless others go first"
        kind, rank = kind_of(row["spec"]), row["rank"]
        count = self.layout.count(kind, rank)
        if not count:
            return f"no place of this service holds {kind} of rank {rank}: add {kind}:{rank}:1 to its --places"
        if count == 1:
            return f"the only place that holds {kind} of rank {rank} is taken"
        return f"all {count} places that hold {kind} of rank {rank} are taken"

    def _account(self, rows: Iterable[Row], users: Mapping[str, _User], now: float) -> None:
        seconds, self._at = (now - self._at if self._at > -inf else 0.0), now
        fades = exp(-log(2) * seconds / HALF_LIFE_S)
        self.served = {user: value * fades for user, value in self.served.items() if value * fades > 1.0}
        owner_by_job = {row["id"]: row["owner"] for row in rows if row["state"] in ON_WORKER}
        for owner in owner_by_job.values():
            self.served[owner] = self.served.get(owner, 0.0) + seconds / users[owner].limits.share
        self._since = {job: self._since.get(job, now) for job in owner_by_job}

    def _in_turn(self, rows: Sequence[Row], users: Mapping[str, _User], *, quotas: bool = True) -> Iterator[Row]:
        """Queued jobs, one after the other; the caller counts in `users` what it places before it asks for the next."""
        queues: dict[tuple[bool, int], dict[str, list[Row]]] = {}  # models first
        for row in rows:
            if row["state"] == "queued":
                turn = "stream" in row["spec"], row["priority"]
                queues.setdefault(turn, {}).setdefault(row["owner"], []).append(row)
        for _, by_user in sorted(queues.items(), reverse=True):
            for queue in by_user.values():
                queue.sort(key=lambda row: inf if row["deadline"] is None else row["deadline"])
                queue.reverse()  # the next one is the last
            while by_user:
                name = min(by_user, key=lambda name: (users[name].level(1), self.served.get(name, 0.0), name))
                most = users[name].limits.places if quotas else None
                if not by_user[name] or (most is not None and users[name].held >= most):
                    del by_user[name]
                else:
                    yield by_user[name].pop()

    def _reserve(self, moving: Sequence[Row], users: Mapping[str, _User], taken: set[int]) -> list[Row]:
        """Keeps places for jobs that move, from the moment they leave theirs. Returns those that wait for it now."""
        for row in moving:
            if (place := self.layout.find(kind_of(row["spec"]), row["rank"], taken)) is not None:
                taken.add(place)
                users[row["owner"]].held += 1
        return [row for row in moving if row["state"] == "queued"]

    def _fill(self, rows: Sequence[Row], users: Mapping[str, _User], taken: set[int]) -> list[Row]:
        """The queued jobs for the free places."""
        starting: list[Row] = []
        full: set[tuple[str, int]] = set()
        for row in self._in_turn(rows, users):
            if len(taken) >= len(self.layout.ranks):
                break
            needs = kind_of(row["spec"]), row["rank"]
            place = None if needs in full else self.layout.find(*needs, taken)
            if place is None:
                full.add(needs)
                continue
            taken.add(place)
            users[row["owner"]].held += 1
            starting.append(row)
        return starting

    def _leaving(
        self,
        rows: Sequence[Row],
        chosen: Sequence[Row],
        staying: Sequence[Row],
        users: Mapping[str, _User],
        taken: set[int],
        now: float,
    ) -> Row | None:
        """The job that leaves its place for one that found none."""
        names, first = {row["id"] for row in chosen}, dict[tuple[int, str, str, int, bool], Row]()
        for row in rows:
            if row["state"] == "queued" and row["id"] not in names:
                needs = kind_of(row["spec"]), row["rank"], "stream" in row["spec"]
                first.setdefault((row["priority"], row["owner"], *needs), row)
        for row in self._in_turn([*first.values()], users):
            needs = kind_of(row["spec"]), row["rank"]
            fits = [other for other in staying if self.layout.find(*needs, taken - {other["place"]}) is not None]
            yielding = [other for other in fits if self._fits_elsewhere(other, taken)]
            yielding = yielding or [other for other in fits if self._yields(other, row, users, now)]
            if yielding:
                return min(yielding, key=lambda other: self._first_to_leave(other, users))
        return None

    def _fits_elsewhere(self, row: Row, taken: set[int]) -> bool:
        """Whether a free place holds a job that has one. It is smaller, if somebody found none and waits for this."""
        return row["state"] == "running" and self.layout.find(kind_of(row["spec"]), row["rank"], taken) is not None

    def _first_to_leave(self, row: Row, users: Mapping[str, _User]) -> tuple[int, float, float]:
        """The lowest priority, then the user with most places, then the job that came last."""
        return row["priority"], -users[row["owner"]].level(), -self._since[row["id"]]

    def _yields(self, row: Row, waiting: Row, users: Mapping[str, _User], now: float) -> bool:
        if "stream" in row["spec"]:
            return False
        if row["priority"] != waiting["priority"]:
            return row["priority"] < waiting["priority"]
        if now - self._since[row["id"]] < self.settle_s:
            return False
        return "stream" in waiting["spec"] or users[row["owner"]].level(-1) >= users[waiting["owner"]].level(1)
