"""Adapters that take places on the devices in turn train as they do where all have one."""

from __future__ import annotations

import numpy as np
import pytest
import small_jobs
from more_cases import nightly
from watched_runs import asks, crash_after, losses_of, statuses, weights_of

from lorafusion_jax.api.training import training_client
from lorafusion_jax.config import load_config
from lorafusion_jax.config.stack import stack_of
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.planning import turns
from lorafusion_jax.planning.checks import layer_problems
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.session import Session
from lorafusion_jax.training import resume, train

NAMES = [f"user-{number}" for number in range(12)]
PLACES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resident")
    for number, name in enumerate(NAMES):
        small_jobs.write_rows(folder, name, 3 + 5 * number % 7, longest=6)
    small_jobs.write_rows(folder, "held", 2, longest=6)
    return folder


@pytest.fixture(scope="module")
def job(folder, tiny_base):
    """job(**train) → the configuration of twelve adapters of two ranks, with dropout and ends of their own."""

    def job(names=NAMES, odd=None, held=NAMES[:2], more=None, **train):
        adapters = [
            {
                "name": name,
                "data": {"train": f"{name}.jsonl"} | ({"eval": "held.jsonl"} if name in held else {}),
                "lora": {"rank": 4 - 2 * (NAMES.index(name) % 3 > 0), "dropout": 0.1, "targets": ["q_proj"]},
                "seed": NAMES.index(name),
            }
            | (odd or {}).get(name, {})
            for name in names
        ]
        batch = {"capacity_tokens": 32, "tile_tokens": 16, "global_samples": 2}
        sections = {"batch": batch, "data": {"max_length": 32}, "save": {"every_steps": 3, "keep": 30}}
        optim, sections = {"lr": 0.02, "schedule": "constant", "warmup": 0.0}, sections | (more or {})
        return load_config(
            small_jobs.write_job(
                folder, tiny_base, adapters, train={"plan_seconds": 0.01, **train}, optim=optim, **sections
            )
        )

    return job


class Moves:
    """Names the adapters that come to a place, and what happened in which order."""

    def __init__(self, patch):
        self.names, self.bring, self.send, self.order, self.working = [], Session._bring, Session._send, [], False
        patch.setattr(Session, "_bring", lambda session, *arguments: self.count(session, *arguments))
        patch.setattr(
            Session, "_send", lambda session, name: self.order.append(("sent", name)) or self.send(session, name)
        )
        admit = Executor.admit
        patch.setattr(Executor, "admit", lambda *arguments: self.order.append(("slot", "")) or admit(*arguments))

    def count(self, session, name, place):
        self.names.append(name)
        self.order.append(("came", name))
        self.working |= bool(session.executor._issued)
        self.bring(session, name, place)


@pytest.fixture(scope="module")
def turned(job, tmp_path_factory):
    """A run in which `user-3` is cancelled, and the moves of its adapters."""
    run = tmp_path_factory.mktemp("turned") / "run"
    with pytest.MonkeyPatch.context() as patch:
        moves = Moves(patch)
        result = train(job(resident=PLACES), run, listeners=[asks(run, ("user-5", 1, "user-3", "cancel"))])
    assert {name for name, adapter in result.adapters.items() if adapter.status != "done"} <= {"user-3"}
    return run, moves


def assert_bitwise(run, other):
    for name in NAMES:
        assert losses_of(run, name) == losses_of(other, name)
        if not losses_of(run, name):
            continue
        for key, array in weights_of(run, name).items():
            np.testing.assert_array_equal(array, weights_of(other, name)[key], err_msg=f"{name} {key}")


def test_places_change_nothing(turned, job, tmp_path, monkeypatch):
    run, moves = turned
    assert set(moves.names) >= set(NAMES[PLACES:])
    monkeypatch.setattr(turns, "residents", lambda config: PLACES)  # the same plan, with a place for each
    train(job(), tmp_path / "run", listeners=[asks(tmp_path / "run", ("user-5", 1, "user-3", "cancel"))])
    assert_bitwise(run, tmp_path / "run")
    assert len(losses_of(run, "user-0")) == 2


@pytest.mark.parametrize("saved", [nightly(1), 4])
def test_a_killed_run_resumes_bitwise(saved, turned, job, tmp_path):
    run = tmp_path / "run"
    asking = asks(run, ("user-5", 1, "user-3", "cancel"))
    with pytest.raises(KeyboardInterrupt):
        train(job(resident=PLACES), run, listeners=[asking, crash_after("saved", saved)])
    assert resume(run, listeners=[asking]).exit_code == 0
    assert_bitwise(run, turned[0])


@pytest.mark.nightly  # the plan of a halving is tested with the scheduler, and places of a mesh as those of one device
@pytest.mark.parametrize(
    "more",
    [
        {"halving": {"first_step": 1, "factor": 2}},
        {"mesh": {"stages": 2}},
        {"mesh": {"data": 2}},
        {"mesh": {"stages": 2, "fsdp": 2}, "halving": {"first_step": 1, "factor": 2}},
        {"mesh": {"tensor": 2}},
    ],
    ids=str,
)
def test_places_change_nothing_elsewhere(more, job, tmp_path, monkeypatch):
    held = NAMES if "halving" in more else ()
    result = train(job(resident=PLACES, held=held, more=more), tmp_path / "turned")
    monkeypatch.setattr(turns, "residents", lambda config: PLACES)
    other = train(job(held=held, more=more), tmp_path / "run")
    assert statuses(result) == statuses(other)
    assert_bitwise(tmp_path / "turned", tmp_path / "run")


@pytest.mark.nightly  # compiles another run; places of a job equal those of an adapter alone elsewhere
def test_it_trains_as_it_does_alone(turned, job, tmp_path):
    train(job(["user-7"]), tmp_path / "alone")
    for key, array in weights_of(turned[0], "user-7").items():
        np.testing.assert_allclose(array, weights_of(tmp_path / "alone", "user-7")[key], rtol=0, atol=2e-5)


def test_each_adapter_comes_once_where_nothing_is_compared(turned):
    moves = turned[1].names
    assert max(moves.count(name) for name in NAMES) <= 2, moves  # the first are in places before the plan is known


def test_arrays_are_sent_while_others_train(turned):
    order = turned[1].order
    first = order.index(("slot", ""))
    for at in range(first, len(order)):
        what, name = order[at]
        if what == "came":
            sent = order.index(("sent", name))
            assert ("slot", "") in order[sent:at], f"{name} was sent when it was needed"
    assert turned[1].working, "the devices waited whenever one came"


@pytest.mark.parametrize("odd", [{"lora": {"kind": "dora"}}, {"lora": {"trainable_tokens": [5]}}])
def test_who_cannot_take_turns_is_named(odd, job):
    config = job(odd={"user-3": odd}, resident=PLACES)
    with pytest.raises(ConfigError, match=r"resident\.adapter.*user-3"):
        stack_of(config)
    assert any("user-3" in problem.what for problem in layer_problems(config)[1])
    assert stack_of(job(odd={"user-3": odd})).index["user-3"] == 3


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("train", {"resident": 4}),
        ("train", {"places": {16: 2}}),
        ("train", {"max_steps": 3}),
        ("train", {"samples": 2, "remat": "nothing"}),
        ("batch", {"global_samples": 4, "capacity_tokens": 128}),
    ],
    ids=str,
)
def test_live_sessions_refuse_what_only_runs_have(tiny_base, section, settings):
    with pytest.raises(ConfigError, match="is of runs") as refused:
        training_client({"model": str(tiny_base)}, reproducible=True, **{section: settings})
    assert refused.value.code == f"session.{section}"


@pytest.mark.parametrize("places", [[8], {8: "2"}, 3])
def test_places_that_are_no_counts_are_named(places):
    with pytest.raises(ConfigError, match="classes of rank -> number"):
        training_client("nowhere", places=places)
