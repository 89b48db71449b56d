"""A policy of `scheduling.online` decides which sessions there are and which job trains in which."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from lorafusion_jax.config.places import Places, class_name
from lorafusion_jax.config.run_sections import BaseSettings, BatchSettings, MeshSettings, TrainSettings
from lorafusion_jax.config.stack import session_config
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.planning.model_facts import ModelFacts
from lorafusion_jax.serve.control.scheduler import Configuration, no_base, plan_of_row
from lorafusion_jax.serve.control.session import LOCAL, SessionPlan
from lorafusion_jax.serve.control.spec import kind_of
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.states import ON_WORKER
from lorafusion_jax.serve.store.jobs import Job as Row
from lorafusion_jax.serve.store.keys import Limits
from scheduling.errors import PlanError
from scheduling.online import Decision, GroupState, Job, LiveCluster, Mesh, ModelShape, Policy, Rates, User, Worker
from scheduling.online.costs import rank_class
from scheduling.online.profile import TILE
from scheduling.online.shapes import LINEARS
from scheduling.online.simulator import make_policy

TICK_S = 180.0  # between two decisions while jobs wait and nothing happens
RETRY_S = 1.0  # after a decision that was refused
HOSTS_S = 10.0  # between two counts of the hosts that are up
REPORT_S = 5.0  # between two reports of progress to the policy
QUICK_S = 0.2  # that a round waits for a policy
PAST_S = 90 * 86400.0  # time of the policy's clock at which this server began: jobs may have come long before
OPEN_S = 900.0  # for a session to become ready; then the policy decides anew where its jobs train
PATIENCE_S = 60.0  # for one decision; then another policy decides for good
MAX_SLOWDOWN = 1.3  # of a job that does not say
SLOW = "elastic-srtf"  # that policy


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseShape(ModelShape):
    """The shape of a base of the service. Bases of equal shapes are different bases."""

    name: str = ""


class PolicyScheduler:
    """Asks a policy of `scheduling.online`. What it refuses or fails at changes nothing.

    The policy thinks in a thread of its own. Until it has decided everything stays as it is, and it is told afterwards
    what has happened.

    Args:
        policy: name of a built-in one, or the policy itself.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: Settings,
        policy: str | Policy,
        *,
        rates: Rates | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        models = {name: ModelConfig.from_hf(folder) for name, folder in settings.bases.items()}
        rates = rates or _rates(settings, models)
        gpus, device = (settings.gpus, settings.device) if settings.gpus else (1, "cpu")  # one place: the CPU
        self._workers = [Worker(name, gpus, settings.memory_gib, device) for name in host_names(settings.hosts)]
        policy_object = make_policy(policy, rates) if isinstance(policy, str) else policy
        self._cluster = LiveCluster(self._workers, rates, policy=policy_object)
        self._settings, self._clock, self._began = settings, clock, clock() - PAST_S
        self._epoch = time.time() - PAST_S  # wall clock of the policy's second 0
        self._limits: Mapping[str, Limits] = {}
        self._users: dict[str, Limits] = {}  # as the policy knows them
        self._asked: dict[str, float] = {}  # session that is not ready → since when
        self._shapes = {name: _shape(name, model) for name, model in models.items()}
        self._rates = rates
        self._answer: Future[list[Decision]] | None = None  # of a policy that thinks
        self._members: dict[str, str] = {}  # job → its session, as decided
        self._rows: dict[str, Row] = {}
        self._too_large = set[str]()  # jobs that fit on no GPUs that this service has
        self._ready: dict[str, bool] = {}
        self._sessions: dict[str, SessionPlan] = {}
        self._told, self._refused = 0, False  # refusals that were returned; whether the last decision was refused
        self._tick = self._report = self._counted = 0.0
        self._hosts_changed = False  # since the policy was asked
        self._most_hosts, self._opened = 0, set[str]()  # hosts that were up together; groups that have trained

    def refuses(self, row: Row) -> str:
        job = self._job(row, 0.0)
        worker = self._workers[0]
        if self._rates.best_isolated_rate(job, worker.kind, worker.gpus) is None:
            return f"{row['base']} with samples of {max(job.lengths)} tokens fits on no GPUs of this machine"
        return ""

    def count_hosts(self, hosts: Callable[[int], int | None]) -> None:
        """Takes the GPUs of a host that was lost with its sessions out of the count until as many hosts are up again.

        Hosts that an autoscaler starts and ends as needed have no session when they go, and stay in the count.
        """
        now = self._clock() - self._began
        if self._answer is not None or now - self._counted < HOSTS_S:
            return
        self._counted, up = now, hosts(self._settings.gpus)
        if up is None:
            return
        cluster, self._most_hosts = self._cluster, max(self._most_hosts, min(up, len(self._workers)))
        states = [(group.worker, self._ready[name]) for name, group in cluster.groups.items() if name in self._opened]
        trains = Counter(host for host, is_ready in states if is_ready)
        suspects = sorted({host for host, is_ready in states if not is_ready}, key=lambda host: (trains[host], host))
        down = frozenset([*sorted(cluster.down), *suspects][: self._most_hosts - up])
        if down != cluster.down:
            cluster.set_down(down, now)
            self._hosts_changed = True

    def decide(
        self, rows: Sequence[Row], ready: Mapping[str, bool], limits: Mapping[str, Limits] = {}
    ) -> Configuration:
        now = self._clock() - self._began
        self._limits = limits
        late: list[tuple[str, str]] = []
        if self._answer is not None and not self._answer.done() and now - self._tick > PATIENCE_S:
            late = [("the policy", f"it has not decided for {PATIENCE_S:g} s; {SLOW} decides from now on")]
            self._replace_policy(rows, now)
        if self._answer is None:
            self._ask(rows, ready, now)
        if self._answer is not None and not self._answer.done():
            return Configuration(sessions=self._sessions, group=self._members, refused=late)
        texts, refusals = self._decided()
        return Configuration(sessions=self._sessions, group=self._members, decisions=texts, refused=[*late, *refusals])

    def _ask(self, rows: Sequence[Row], ready: Mapping[str, bool], now: float) -> None:
        """Tells the policy what has happened, and asks it if that is a reason to."""
        cluster = self._cluster
        has_news = self._tell_users(rows, now) | self._tell_jobs(rows, now) | self._tell_sessions(ready, now)
        has_news, self._hosts_changed = has_news or self._hosts_changed, False
        if now - self._report >= REPORT_S:
            self._report = now
            for name, row in self._rows.items():
                cluster.progress(name, row["step"], now)
        waits = any(state.group is None for state in cluster.jobs.values())
        if has_news or (waits and now - self._tick >= (RETRY_S if self._refused else TICK_S)):
            self._tick, self._answer = now, _in_thread(lambda: cluster.decide(now))
            wait([self._answer], QUICK_S)

    def _decided(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Takes what the policy has decided: texts, and refusals."""
        cluster, texts = self._cluster, list[str]()
        refusals = [(refusal.policy, refusal.why) for refusal in cluster.refusals[self._told :]]
        if self._answer is not None:
            answer, self._answer, self._refused = self._answer, None, bool(refusals)
            texts = [str(decision) for decision in answer.result()]
            self._sessions = {name: self._plan(group) for name, group in cluster.groups.items()}
        self._told = len(cluster.refusals)
        self._members = {name: group.name for group in cluster.groups.values() for name in group.members}
        return texts, refusals

    def _replace_policy(self, rows: Sequence[Row], now: float) -> None:
        """Goes on with a simpler policy. The earlier one may never answer, and nobody waits for it."""
        down = self._cluster.down
        self._cluster = LiveCluster(self._workers, self._rates, policy=make_policy(SLOW, self._rates))
        self._cluster.set_down(down, now)
        self._answer, self._told, self._rows, self._ready, self._users = None, 0, {}, {}, {}
        self._tell_users(rows, now)
        self._tell_jobs(rows, now)
        for name, plan in self._sessions.items():
            if plan.host in down:
                continue
            members = tuple(job for job, group in self._members.items() if group == name and job in self._rows)
            self._cluster.adopt(_state_of(name, plan, members, now), now)

    def adopt(self, rows: Sequence[Mapping[str, Any]], jobs: Sequence[Row]) -> None:
        now = self._clock() - self._began
        self._tell_jobs(jobs, now)
        hosts = {worker.name for worker in self._workers}
        for row in rows:
            plan = plan_of_row(row)
            if not plan.gpus or plan.base not in self._shapes or plan.host not in hosts:
                continue
            members = tuple(
                job["id"]
                for job in jobs
                if job["group"] == row["id"] and job["state"] in ON_WORKER and job["id"] in self._rows
            )
            self._cluster.adopt(_state_of(row["id"], plan, members, now), now)
            self._sessions[row["id"]] = plan

    def _tell_jobs(self, rows: Sequence[Row], now: float) -> bool:
        present = {row["id"]: row for row in rows if row["base"] in self._shapes}  # others wait for their base
        absent = [name for name in self._rows if name not in present]
        for name in absent:
            del self._rows[name]
            self._cluster.leave(name, now)
        arrivals = [row for name, row in present.items() if name not in self._rows]
        self._too_large.clear()
        for row in sorted(arrivals, key=lambda row: (row["created"], row["id"])):
            try:
                waited_s = self._policy_s(time.time(), now) - self._policy_s(row["queued"], now)
                self._cluster.arrive(self._job(row, now), now, row["step"], waited_s=waited_s)
            except PlanError:
                self._too_large.add(row["id"])  # for an earlier service it was not
                del present[row["id"]]
        revisions = [row for name, row in present.items() if _asks(row) != _asks(self._rows.get(name, row))]
        for row in revisions:
            self._cluster.revise(self._job(row, now), now)
        self._rows = present
        return bool(absent or arrivals or revisions)

    def _tell_users(self, rows: Sequence[Row], now: float) -> bool:
        """Passes on what users have a right to; whether that has changed."""
        limits = {row["owner"]: self._limits.get(row["owner"], Limits()) for row in rows}
        users = [name for name, of_user in limits.items() if self._users.get(name, Limits()) != of_user]
        for name in users:
            self._users[name] = limits[name]
            self._cluster.set_user(User(name, limits[name].share, limits[name].places), now)
        return bool(users)

    def order(self, rows: Sequence[Row], limits: Mapping[str, Limits]) -> list[Row]:
        return [row for row in rows if row["state"] == "queued"]

    def full(self, row: Row, rows: Sequence[Row], limits: Limits) -> str:
        if why := no_base(row["base"], self._shapes):
            return why
        if row["id"] in self._too_large:
            return f"{row['base']} with its samples fits on no GPUs of this service: start it with more, or larger ones"
        groups = [*self._cluster.groups.values()]
        busy_gpus = sum(len(group.gpus) for group in groups if group.members)
        gpus = sum(worker.gpus for worker in self._workers if worker.name not in self._cluster.down)
        if row["id"] in self._members:
            return f"its session {self._members[row['id']]} opens, or makes room for it"
        return f"{busy_gpus} of {gpus} GPUs train other jobs, which the policy holds to be worth more now"

    def _policy_s(self, at: float | None, now: float) -> float:
        """A time of the wall clock on the policy's clock; now if there is none, or if it has not come."""
        return now if at is None else min(now, max(0.0, at - self._epoch))

    def _tell_sessions(self, ready: Mapping[str, bool], now: float) -> bool:
        has_news = False
        for name in list(self._cluster.groups):
            before, is_ready = self._ready.get(name, False), ready.get(name, False)
            since = self._asked.setdefault(name, now)
            if is_ready:
                self._asked[name] = now
                self._opened.add(name)
            if is_ready and not before:
                self._cluster.ready(name, now)
                has_news = True
            elif not is_ready and now - since > OPEN_S:  # its host may be gone
                self._cluster.lose(name, now)
                has_news = True
            self._ready[name] = is_ready
        self._asked = {name: since for name, since in self._asked.items() if name in self._cluster.groups}
        self._ready = {name: state for name, state in self._ready.items() if name in self._cluster.groups}
        self._opened &= self._cluster.groups.keys()
        return has_news

    def _job(self, row: Row, now: float) -> Job:
        spec = row["spec"]
        targets = spec["lora"].get("targets")
        linears = tuple(name for name in LINEARS if name in targets) if isinstance(targets, list) else LINEARS
        arrival_s, deadline = self._policy_s(row.get("created"), now), row.get("deadline")
        deadline_s = None if deadline is None else max(arrival_s, deadline - self._epoch)
        train = self._settings.train if spec["data"].get("eval") else {}
        return Job(
            row["id"],
            row["owner"],
            self._shapes[row["base"]],
            arrival_s,
            row["lengths"],
            spec["batch"]["global_samples"],
            row["steps"],
            rank=row["rank"],
            weight=row["weight"],
            targets=linears or LINEARS,
            priority=row["priority"],
            deadline_s=deadline_s,
            max_slowdown=spec.get("max_slowdown") or MAX_SLOWDOWN,
            eval_every=train.get("eval_every_steps") or 0,
            eval_tokens=row["eval_tokens"] if train else 0,
            kind=kind_of(spec),
        )

    def _plan(self, group: GroupState) -> SessionPlan:
        """Returns the session of a group; one that exists keeps its places as long as they hold all members."""
        before = self._sessions.get(group.name)
        places = dict(self._settings.places if before is None else before.places)
        mesh = group.mesh
        return SessionPlan(
            base=group.base,
            places=_enlarged(places, [self._rows[member] for member in group.members]),
            gpus=group.gpus,
            mesh={"stages": mesh.stages, "data": mesh.replicas},
            capacity_tokens=mesh.capacity_tokens,
            host=group.worker,
        )


def _rates(settings: Settings, models: Mapping[str, ModelConfig]) -> Rates:
    """Rates of sessions with these settings."""
    batch, train = BatchSettings.model_validate(settings.batch), TrainSettings.model_validate(settings.train)
    capacities = [-(-batch.largest // TILE) * TILE] if "capacity_tokens" in settings.batch else None
    places, sessions = Places.of(settings.places), {}
    for name, folder in settings.bases.items():
        base = BaseSettings.model_validate({**settings.base, "model": str(folder)})
        sessions[name] = session_config(base, MeshSettings(), places, batch=batch, train=train, directory="")
    return Rates(capacities=capacities, facts=ModelFacts(models, sessions))


def _asks(row: Row) -> tuple[float, int, float | None]:
    """What a user may change of a job that is there."""
    return row["weight"], row["priority"], row.get("deadline")


def _enlarged(classes: dict[str, int], rows: Sequence[Row]) -> dict[str, int]:
    """Adds places for adapters that find none."""
    occupied: set[int] = set()
    for row in sorted(rows, key=lambda row: (-row["rank"], row["id"])):
        kind, rank = kind_of(row["spec"]), row["rank"]
        place = Places.of(classes).find(kind, rank, occupied)
        if place is None:
            name = class_name(kind, rank_class([rank]))
            return _enlarged(classes | {name: classes.get(name, 0) + 1}, rows)
        occupied.add(place)
    return classes


def _state_of(name: str, plan: SessionPlan, members: tuple[str, ...], now: float) -> GroupState:
    """Returns a session as a policy sees it."""
    assert plan.capacity_tokens is not None, "a policy decides it"
    mesh = Mesh(plan.mesh.get("stages", 1), plan.mesh.get("data", 1), plan.capacity_tokens)
    return GroupState(name, plan.base, plan.host, plan.gpus, mesh, members, ready_s=now)


def host_names(count: int) -> list[str]:
    """Names of the hosts in the view of a policy. They have equal GPUs.

    >>> host_names(1), host_names(3)
    (['local'], ['node-0', 'node-1', 'node-2'])
    """
    return [LOCAL] if count == 1 else [f"node-{number}" for number in range(count)]


def _in_thread[T](work: Callable[[], T]) -> Future[T]:
    """Starts a thread that nobody has to wait for, also not at the end of the process."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as problem:
            result.set_exception(problem)

    threading.Thread(target=run, name="policy", daemon=True).start()
    return result


def _shape(name: str, model: ModelConfig) -> BaseShape:
    keys = [key for key in ModelShape.__dataclass_fields__ if hasattr(model, key)]
    return BaseShape(name=name, **{key: getattr(model, key) for key in keys})
