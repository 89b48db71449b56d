"""Users share the places of one session: rows and a clock, without workers."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import pytest
from simulated_service import Service, wait_for
from simulated_worker import SimulatedLauncher, SimulatedProcess

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.serve.control.pace import Pace
from lorafusion_jax.serve.control.scheduler import OneSession
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.keys import Limits, add_key, limits_of, set_limits, user_limits

PLACES = 4


class Session:
    """A session whose jobs train a second a second, and save for some rounds before they leave their places."""

    def __init__(self, tmp_path, places=None, limits=None, save_rounds=0, **more):
        self.save_rounds, self.saving = save_rounds, dict[str, int]()
        self.now, self.numbers, self.rows, self.ended = 0.0, count(), [], {}
        settings = Settings(home=tmp_path, bases={"tiny": tmp_path}, places=places or {16: PLACES}, **more)
        self.scheduler, self.limits = OneSession(settings, clock=lambda: self.now), limits or {}
        self.left: dict[str, int] = {}
        self.starts: dict[str, list[float]] = {}

    def submit(self, owner, seconds, *, priority=0, rank=16, deadline=None, stream=False):
        name = f"{owner}-{next(self.numbers)}"
        spec = {"lora": {"kind": "lora", "rank": rank}} | ({"stream": {}} if stream else {})
        row = {"id": name, "owner": owner, "base": "tiny", "spec": spec, "rank": rank, "state": "queued", "place": None}
        row |= {"priority": priority, "deadline": deadline, "step": 0, "steps": seconds, "epoch": 1}
        self.rows.append(row)
        self.left[name] = seconds
        return name

    def run(self, seconds, step=1):
        for _ in range(seconds // step):
            self.rows.sort(key=lambda row: -row["priority"])
            chosen = set(self.scheduler.decide(self.rows, {}, self.limits).group)
            for row in self.rows:
                if row["state"] == "running" and row["id"] not in chosen:
                    row["state"], self.saving[row["id"]] = "draining", self.save_rounds
                if row["state"] == "draining":
                    self.saving[row["id"]] -= 1
                    row.update({} if self.saving[row["id"]] >= 0 else {"state": "queued", "place": None})
            taken = {row["place"] for row in self.rows} - {None}
            for row in self.rows:
                if row["state"] == "queued" and row["id"] in chosen:
                    layout = self.scheduler._shares.layout
                    place = layout.find("lora", row["rank"], taken)
                    assert place is not None or self.save_rounds
                    if place is None:
                        continue  # its job still saves
                    taken.add(place)
                    row.update(state="running", place=place)
                    self.starts.setdefault(row["id"], []).append(self.now)
            self.now += step
            for row in [row for row in self.rows if row["state"] == "running"]:
                self.left[row["id"]] -= step
                if self.left[row["id"]] <= 0:
                    self.ended[row["id"]] = self.now
                    self.rows.remove(row)

    def held(self, owner):
        return sum(row["owner"] == owner and row["place"] is not None for row in self.rows)


@pytest.mark.parametrize("seconds", [100, 600, 4000])
def test_a_flood_leaves_another_user_an_equal_share(tmp_path, seconds):
    """Ann has 1000 jobs of some seconds. Bob's four take half of the places: twice as long as one."""
    session = Session(tmp_path)
    for _ in range(1000):
        session.submit("ann", seconds)
    session.run(100, 20)
    jobs, began = [session.submit("bob", 600) for _ in range(4)], session.now
    session.run(1400, 20)
    assert max(session.ended[name] for name in jobs) - began <= 1.15 * 2 * 600
    assert session.held("bob") == 0
    assert max(map(len, session.starts.values())) <= 3


def test_a_live_service_shares_as_the_simulated_one(tmp_path, tiny_base, monkeypatch):
    """Ann has 200 jobs and bob four. The live one trains a few steps whenever its controller changes nothing."""
    flood, steps, equal, tick = 200, 20, 2 * 20, 5  # alone on half of the places
    simulated = Session(tmp_path / "simulated", yield_s=10.0)
    for _ in range(flood):
        simulated.submit("ann", steps)
    simulated.run(2 * tick, tick)
    began, jobs = simulated.now, [simulated.submit("bob", steps) for _ in range(4)]
    simulated.run(2 * equal)
    expected = (max(simulated.ended[name] for name in jobs) - began) / equal

    step = SimulatedProcess._step

    def step_if_told(process, name: str, job: dict[str, Any]) -> None:
        if job["place"] is None or job["step"] < job.get("until", 0):
            step(process, name, job)

    monkeypatch.setattr(SimulatedProcess, "_step", step_if_told)
    monkeypatch.setattr("lorafusion_jax.serve.control.controller.ROUND_S", 0.02)
    now = [0.0]
    service = Service(tmp_path / "live", tiny_base, None, places={4: PLACES}, yield_s=10.0)
    service.scheduler._clock = lambda: now[0]

    def worker() -> dict[str, dict[str, Any]]:
        return SimulatedLauncher.made["g0"][-1].jobs

    def is_settled() -> bool:
        """Every place trains, and a round of the controller has changed nothing of it."""
        rounds = []
        while len(rounds) < 3:
            with service.db.read() as connection:
                on_worker = service.jobs.in_states(connection, "starting", "running", "draining")
            jobs = [*worker().items()] if SimulatedLauncher.made else []
            held = {name: job["step"] for name, job in jobs if job["place"] is not None}
            if len(held) < PLACES or len(on_worker) != PLACES or held != {row["id"]: row["step"] for row in on_worker}:
                return False
            if service.controller._round_at not in rounds:
                rounds.append(service.controller._round_at)
            time.sleep(0.005)
        return True

    def train() -> None:
        for job in worker().values():
            job["until"] = job["step"] + tick
        wait_for(lambda: all(job["step"] >= job.get("until", 0) for job in list(worker().values())))
        now[0] += tick

    try:
        first = service.submit("flood", "red", steps, owner="ann")
        with service.db.write() as connection:
            row = service.jobs.get(connection, first) | {"state": "queued", "place": None, "group": None, "epoch": 0}
            rows = [row | {"id": f"job-{number:012x}"} for number in range(flood - 1)]
            connection.execute(t.jobs.insert(), rows)
            event = {"kind": "changed", "owner": "ann", "at": 0.0, "data": {}}
            connection.execute(t.events.insert(), [event | {"job": row["id"]} for row in rows])
        for _ in range(2):
            wait_for(is_settled)
            train()
        began, jobs = now[0], [service.submit("law", "red", steps, owner="bob") for _ in range(4)]
        while any(service.show(job)["step"] < steps for job in jobs):
            wait_for(is_settled)
            train()
            wait_for(is_settled)
        live = (now[0] - began) / equal
    finally:
        service.close()
    assert max(expected, live) <= 1.5
    assert live == pytest.approx(expected, rel=0.15), (live, expected)


def test_several_floods_leave_a_small_user_a_share(tmp_path):
    session = Session(tmp_path)
    for user in "abc" * 100:
        session.submit(user, 4000)
    session.run(200, 20)
    small = session.submit("small", 500)
    session.run(700, 20)
    assert session.ended[small] <= 200 + 1.3 * 500


def test_shares_follow_the_weights_of_users(tmp_path):
    session = Session(tmp_path, limits={"bob": Limits(share=3.0)})
    for user in "ann", "bob":
        for _ in range(9):
            session.submit(user, 5000)
    session.run(300, 20)
    assert (session.held("ann"), session.held("bob")) == (1, 3)
    assert max(map(len, session.starts.values())) == 1


def test_a_quota_of_places_holds_while_others_are_free(tmp_path):
    session = Session(tmp_path, limits={"ann": Limits(places=2)})
    names = [session.submit("ann", 100) for _ in range(3)]
    session.run(10)
    assert session.held("ann") == 2
    (waiting,) = [row for row in session.rows if row["state"] == "queued"]
    assert waiting["id"] == names[2]
    assert session.scheduler.full(waiting, session.rows, Limits(places=2)) == "ann has 2 places, of at most 2"


def test_a_higher_priority_takes_the_place_of_a_lower_one(tmp_path):
    """At once, also of the same user, but never of an equal or higher one."""
    session = Session(tmp_path)
    low = [session.submit("ann", 5000, priority=-1) for _ in range(2)] + [session.submit("ann", 5000) for _ in range(2)]
    session.run(5)
    high = session.submit("ann", 50, priority=50)
    session.run(2)
    running = {row["id"] for row in session.rows if row["state"] == "running"}
    assert high in running
    assert len(running & set(low[:2])) == 1
    assert running > set(low[2:])
    others = [session.submit("ann", 5000) for _ in range(4)]
    session.run(5)
    running = {row["id"] for row in session.rows if row["state"] == "running"}
    assert running == {high, *low[2:], others[0]}


def test_models_of_clients_keep_their_places_and_settled_jobs_leave_for_them(tmp_path):
    session = Session(tmp_path)
    jobs = [session.submit("ana", 500) for _ in range(PLACES)]
    session.run(30)
    models = [session.submit("ana", 1000, stream=True) for _ in range(PLACES + 1)]
    session.run(20)
    assert not session.starts.keys() & set(models)  # nobody has settled yet
    session.run(100)
    assert session.starts.keys() >= set(models[:PLACES])
    session.submit("ben", 50, priority=50)
    session.run(200)
    assert [len(session.starts[model]) for model in models[:PLACES]] == [1] * PLACES
    assert models[-1] not in session.starts  # models do not leave for each other
    assert not session.ended.keys() & set(jobs)


def test_a_job_leaves_only_if_its_place_holds_the_other(tmp_path):
    session = Session(tmp_path, places={16: 1, 64: 1})
    large, small = session.submit("ann", 5000, rank=64), session.submit("bob", 5000)
    session.run(3)
    session.submit("cem", 100, rank=64, priority=3)
    session.run(3)
    running = {row["id"] for row in session.rows if row["state"] == "running"}
    assert small in running
    assert large not in running


@pytest.mark.parametrize("save_rounds", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_who_needs_a_smaller_place_moves_when_a_larger_one_is_waited_for(tmp_path, stream, save_rounds):
    """It keeps a place whoever comes meanwhile, and does not move without need."""
    session = Session(tmp_path, places={8: 2, 32: 1}, save_rounds=save_rounds)
    session.submit("ann", 40, rank=6), session.submit("ann", 5000, rank=8)
    session.run(2)
    mover = session.submit("bob", 5000, rank=3, stream=stream)
    session.run(100)
    row = next(row for row in session.rows if row["id"] == mover)
    assert (row["place"], len(session.starts[mover])) == (2, 1)  # a small place is free, but nobody waits
    large = session.submit("bob", 5000, rank=20, stream=True)
    session.run(1)
    small = session.submit("cem", 5000, rank=8, priority=90)
    session.run(10)
    places = {row["id"]: row["place"] for row in session.rows}
    assert places[mover] in (0, 1)
    assert places[large] == 2
    session.run(100)
    assert len(session.starts[mover]) == 2 or not stream  # a job of lower priority leaves for a higher one
    waiting = next(row for row in session.rows if row["id"] == small)
    holds = session.scheduler.full(waiting | {"state": "queued"}, session.rows, Limits())
    assert holds == "all 3 places that hold lora of rank 8 are taken"
    another = {"rank": 20, "owner": "cem", "base": "tiny", "spec": waiting["spec"]}
    assert session.scheduler.full(another, session.rows, Limits()) == (
        "the only place that holds lora of rank 20 is taken"
    )


def test_the_jobs_of_a_user_follow_their_deadlines(tmp_path):
    session = Session(tmp_path, places={16: 1})
    names = [
        session.submit("ann", 20),
        session.submit("ann", 20, deadline=900.0),
        session.submit("ann", 20, deadline=500.0),
    ]
    session.run(60)
    assert sorted(names, key=session.ended.get) == [names[2], names[1], names[0]]


def test_a_waiting_job_knows_its_turn(tmp_path):
    session = Session(tmp_path)
    for _ in range(20):
        session.submit("ann", 100)
    session.run(1)
    bob = session.submit("bob", 100)
    order = session.scheduler.order(session.rows, {})
    assert [row["id"] for row in order].index(bob) == 0
    waiting = next(row for row in session.rows if row["id"] == bob)
    assert session.scheduler.full(waiting, session.rows, Limits()) == "all 4 places that hold lora of rank 16 are taken"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rank": 17}, "no place of this service holds lora of rank 17: add lora:17:1 to its --places"),
        ({"base": "huge"}, "this service has no base huge: add --base huge=FOLDER to its start"),
    ],
)
def test_a_job_of_an_earlier_service_says_what_this_one_lacks(tmp_path, change, why):
    """Its places and bases may be other ones."""
    session = Session(tmp_path)
    session.submit("ann", 100)
    waiting = session.rows[0] | change
    assert session.scheduler.full(waiting, [waiting], Limits()) == why


def test_a_decision_among_ten_thousand_waiting_jobs_looks_at_few(tmp_path, monkeypatch):
    session, asked = Session(tmp_path), count()
    for number in range(10_000):
        session.submit(f"user{number % 7}", 500)
    session.run(1)
    find = type(session.scheduler._shares.layout).find
    monkeypatch.setattr(type(session.scheduler._shares.layout), "find", lambda *of: [next(asked), find(*of)][1])
    session.scheduler.decide(session.rows, {}, {})
    assert next(asked) < 200


def test_pace_predicts_ends_and_starts(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.time", lambda: 5000.0)
    pace, job = Pace(), {"id": "a", "epoch": 1, "state": "running", "step": 10, "steps": 100}
    pace.note([job])
    assert pace.rate(job) is None
    assert pace.start([], [job]) is None
    clock[0], job["step"] = 110.0, 30
    pace.note([job])
    assert pace.rate(job) == 2.0
    assert pace.end(job) == 5035.0
    ahead = {"id": "b", "epoch": 0, "state": "queued", "step": 0, "steps": 40}
    assert pace.start([], [job]) == 5035.0
    assert pace.start([ahead], [job]) == 5055.0
    pace.note([])
    assert pace.rate(job) is None


def test_the_widest_of_a_users_keys_counts(tmp_path):
    from lorafusion_jax.serve.server import open_database

    db = open_database(Settings(home=tmp_path, bases={}, places={}))
    with db.write() as connection:
        first, _ = add_key(connection, "ann", limits=Limits(share=2.0, jobs=3, priority=0))
        assert limits_of(connection, "ann") == Limits(share=2.0, jobs=3, priority=0)
        add_key(connection, "ann", limits=Limits(share=1.0, jobs=9, priority=-5, places=1))
        assert user_limits(connection) == {"ann": Limits(share=2.0, jobs=9, priority=0)}
        assert set_limits(connection, first, Limits(priority=7))
        assert limits_of(connection, "ann").priority == 7
        assert not set_limits(connection, "nothing", Limits())
        with pytest.raises(ConfigError, match="share must be at least"):
            set_limits(connection, first, Limits(share=0.0))
    db.close()
