"""The table of states: every pair is walked."""

from __future__ import annotations

import random

import pytest
from more_cases import nightly

from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.state_folders import states_replaced_by
from lorafusion_jax.serve.states import ENDED, LIVE, NEW, ON_WORKER, STATES, TRANSITIONS, StateError, next_state
from lorafusion_jax.serve.store import jobs as jobs_module
from lorafusion_jax.serve.store.database import Database
from lorafusion_jax.serve.store.jobs import MOST_TRIES, PROGRESS, SUSPECT_TRIES, Jobs, MayRun, is_suspect
from lorafusion_jax.serve.store.keys import add_key, find_owner, revoke_key

EVENTS = sorted({event for _, event in TRANSITIONS})


@pytest.fixture
def store(tmp_path):
    db = Database(Settings(home=tmp_path, bases={}, places={}).database)
    yield db, Jobs(db)
    db.close()


def submitted(db: Database, jobs: Jobs, *events: str) -> str:
    with db.write() as connection:
        job = jobs.submit(connection, "ana", {"name": "law", "base": "tiny", "data": {}})["id"]
        for event in events:
            jobs.change(connection, job, event, actor="test")
    return job


def test_every_pair_is_in_the_table_or_refused():
    for state in (NEW, *STATES):
        for event in EVENTS:
            if (state, event) in TRANSITIONS:
                assert next_state(state, event) in STATES
            else:
                with pytest.raises(StateError) as problem:
                    next_state(state, event)
                assert problem.value.code == "job.state"


def test_every_state_is_reached_and_has_an_exit():
    reached = {NEW}
    while more := {after for (before, _), after in TRANSITIONS.items() if before in reached} - reached:
        reached |= more
    assert reached == {NEW, *STATES}
    assert {before for before, _ in TRANSITIONS} == {NEW, *STATES} - {"deleted"}
    assert LIVE | ENDED | {"deleted"} == set(STATES)
    for state in LIVE:  # a live job can always end: its owner or its worker ends it
        seen, todo = set(), {state}
        while todo:
            seen |= todo
            todo = {after for (before, _), after in TRANSITIONS.items() if before in todo} - seen
        assert seen & ENDED


@pytest.mark.parametrize("state", sorted(ON_WORKER))
def test_a_lost_worker_returns_every_job_of_it(state):
    assert next_state(state, "lost") == "queued"


def test_a_refused_event_changes_nothing(store):
    db, jobs = store
    job = submitted(db, jobs, "accept")

    def act() -> None:
        with db.write() as connection:
            jobs.set(connection, job, weight=9.0)
            jobs.change(connection, job, "started", actor="test")

    with pytest.raises(StateError):
        act()
    with db.read() as connection:
        row = jobs.get(connection, job)
        assert (row["state"], row["weight"]) == ("queued", 1.0)
        assert [transition["after"] for transition in jobs.transitions(connection, job)] == ["checking", "queued"]


@pytest.mark.parametrize(("asked", "reached"), [("pause", "paused"), ("cancel", "cancelled"), ("preempt", "queued")])
@pytest.mark.parametrize("how", ["stopped", "lost"])
def test_what_is_asked_of_a_running_job_happens_when_it_has_left(store, asked, reached, how):
    db, jobs = store
    job = submitted(db, jobs, "accept", "place", "started")
    with db.write() as connection:
        assert jobs.ask(connection, job, asked, actor="ana")["state"] == "draining"
        assert jobs.ask(connection, job, asked, actor="ana")["state"] == "draining"  # twice is once
        row = jobs.lost(connection, job, why="gone") if how == "lost" else None
        row = row or jobs.change(connection, job, "stopped", actor="worker")
        assert row["state"] == reached
        assert (row["group"], row["place"]) == (None, None)
        assert (
            len([transition for transition in jobs.transitions(connection, job) if transition["event"] == "drain"]) == 1
        )


def test_a_job_that_kills_its_workers_ends(store):
    db, jobs = store
    job = submitted(db, jobs, "accept")
    with db.write() as connection:
        for loss in range(MOST_TRIES):
            assert jobs.get(connection, job)["state"] == "queued"
            jobs.change(connection, job, "place", actor="test")
            jobs.change(connection, job, "started", actor="test", step=loss)
            row = jobs.lost(connection, job, why="killed")
        assert row["state"] == "failed"
        assert "4 times" in row["reason"]


@pytest.mark.parametrize("end", ["started", "finished", "cancel"])
def test_a_job_that_trains_or_has_ended_shows_no_reason_of_a_loss_before(store, end):
    """It was done, and said that its worker was lost."""
    db, jobs = store
    job = submitted(db, jobs, "accept", "place", "started")
    with db.write() as connection:
        assert jobs.lost(connection, job, why="power")["reason"] == "power"
        for event in ["cancel"] if end == "cancel" else ["place", "started", "finished"]:
            row = jobs.change(connection, job, event, actor="test")
            if event == end:
                assert row["reason"] == ""


def test_progress_forgives_lost_workers(store):
    db, jobs = store
    job = submitted(db, jobs, "accept")
    with db.write() as connection:
        for loss in range(3 * MOST_TRIES):
            jobs.change(connection, job, "place", actor="test")
            jobs.change(connection, job, "started", actor="test", step=25 * (loss + 1), state_step=25 * (loss + 1))
            assert jobs.lost(connection, job, why="power")["state"] == "queued"


def test_the_loss_after_progress_is_the_first_that_counts(store):
    db, jobs = store
    job = submitted(db, jobs, "accept")
    states = []
    with db.write() as connection:
        for _ in range(MOST_TRIES):
            jobs.change(connection, job, "place", actor="test")
            jobs.change(connection, job, "started", actor="test", step=25, state_step=25)
            states.append(jobs.lost(connection, job, why="killed")["state"])
    assert states == ["queued"] * (MOST_TRIES - 1) + ["failed"]


def test_epochs_only_grow(store):
    db, jobs = store
    job = submitted(db, jobs, "accept")
    with db.write() as connection:
        assert jobs.place(connection, job, group="g0", place=1)["epoch"] == 1
        jobs.lost(connection, job, why="gone")
        assert jobs.place(connection, job, group="g0", place=0)["epoch"] == 2


def test_jobs_wait_in_the_order_of_their_arrival_whatever_the_clock_says(store, monkeypatch):
    db, jobs = store
    arrived = []
    for clock in (2e9, 2e9 - 3600, 2e9 + 3600, 2e9 - 7200):
        monkeypatch.setattr("lorafusion_jax.serve.store.jobs.time.time", lambda clock=clock: clock)
        arrived.append(submitted(db, jobs, "accept"))
    with db.write() as connection:
        jobs.set(connection, arrived[2], priority=5)
        queued = [job["id"] for job in jobs.in_states(connection, "queued")]
    assert queued == [arrived[2], arrived[0], arrived[1], arrived[3]]


@pytest.mark.parametrize("seed", [0, nightly(1), nightly(2)])
def test_a_round_reads_of_the_jobs_that_wait_only_those_that_have_changed(store, monkeypatch, seed):
    """Whatever has happened, it sees what the file says."""
    db, jobs = store
    draw, read, numbered = random.Random(seed), list[str](), jobs_module._numbered
    monkeypatch.setattr(
        jobs_module, "_numbered", lambda *asked: [read.append(row["id"]) or row for row in numbered(*asked)]
    )
    names, may_run = [submitted(db, jobs, "accept") for _ in range(30)], MayRun(db)
    may_run.read()
    for _ in range(60):
        changed = set(draw.sample(names, draw.randrange(3)))
        with db.write() as connection:
            for name in changed:
                events = [event for state, event in TRANSITIONS if state == jobs.get(connection, name)["state"]]
                if "place" in events and draw.random() < 0.3:
                    jobs.place(connection, name, group="g0", place=0)
                elif "place" in events and draw.random() < 0.3:
                    jobs.set(connection, name, priority=draw.randrange(-2, 3), weight=2.0)
                    db.add_event(connection, "changed", "ana", name, {})
                elif events:
                    jobs.change(connection, name, draw.choice(events), actor="test")
                jobs.set(connection, name, step=draw.randrange(9))  # not told to anybody
        if draw.random() < 0.2:
            names.append(submitted(db, jobs, "accept"))
            changed.add(names[-1])
        read.clear()
        seen = may_run.read()
        with db.read() as connection:
            told = jobs.in_states(connection, "queued", *ON_WORKER)
            on_worker = {job["id"] for job in told if job["state"] in ON_WORKER}
        moving = ("id", "state", "priority", "weight", "place", "epoch")
        assert [[row[key] for key in moving] for row in seen] == [[row[key] for key in moving] for row in told]
        assert set(read) <= changed | on_worker
    assert len(names) > 30


def test_a_state_that_was_not_told_of_yet_is_not_removed(tmp_path):
    """A worker may have written the next state while the message of the last one was under way."""
    names = ("e1-s12", "e2-s4", "e2-s8", "e2-s12", "e3-s2")
    for name in (*names, ".e2-s6-draft", "e1-s4 copy"):
        (tmp_path / name).mkdir()
    older = [folder.name for folder in states_replaced_by(tmp_path / "e2-s8")]
    assert older == ["e2-s4"]
    assert [folder.name for folder in states_replaced_by(tmp_path / "e3-s20")] == [
        "e3-s2", "e2-s12", "e2-s8", "e2-s4", "e1-s12",
    ]  # fmt: skip


def test_keys_end(store):
    db, _ = store
    with db.write() as connection:
        made = [add_key(connection, "ana", days=days) for days in (None, 1.0, -1.0)]
        assert [find_owner(connection, key) is not None for _, key in made] == [True, True, False]
        assert revoke_key(connection, made[0][0])
        assert find_owner(connection, made[0][1]) is None


def test_rows_after_the_state_from_which_a_job_goes_on_are_removed(store):
    db, jobs = store
    job = submitted(db, jobs, "accept")
    with db.write() as connection:
        jobs.add_metrics(connection, job, [{"kind": "step", "step": step} for step in range(1, 6)])
        jobs.restart(connection, job, step=3, path="/state")
        assert [row["step"] for row in jobs.metrics(connection, job, 0, 1)] == [1, 2, 3]


def test_a_job_that_went_on_since_its_losses_is_no_suspect():
    job = {"tries": SUSPECT_TRIES, "tries_step": 10, "step": 10 + PROGRESS}
    assert not is_suspect(job)
    assert is_suspect(job | {"step": 9 + PROGRESS})
    assert not is_suspect(job | {"step": 10, "tries": SUSPECT_TRIES - 1})
