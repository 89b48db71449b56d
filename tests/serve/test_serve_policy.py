"""A policy in the loop: sessions and placements are what it decides; what it gets wrong changes nothing."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from simulated_service import Service, wait_for
from simulated_worker import SimulatedLauncher, SimulatedProcess
from sqlalchemy import select

from lorafusion_jax.serve.control.policy_scheduler import PolicyScheduler
from lorafusion_jax.serve.control.scheduler import plan_of_row
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.keys import Limits
from scheduling.online import ChangeCosts, Decision, Mesh, Rates
from scheduling.online.policies.baselines import Packing


@pytest.fixture
def serve(tmp_path, tiny_base):
    made: list[Service] = []

    def start(policy: Any, **options) -> Service:
        made.append(Service(tmp_path / f"home-{len(made)}", tiny_base, policy, **options))
        return made[-1]

    yield start
    for service in made:
        service.close()


def test_two_bases_get_their_sessions_and_all_jobs_end(serve):
    """Bases of equal shapes are different bases: a session never gets a job of the other."""
    service = serve(Packing)
    jobs = {service.submit(f"{base}-{n}", base): base for n in range(3) for base in ("red", "blue")}
    service.wait(*jobs)
    assert {decision["text"].split(" (")[0].split()[0] for decision in service.decisions()} >= {"open"}
    processes = [process for made in SimulatedLauncher.made.values() for process in made]
    assert {jobs[job] for process in processes for job in process.trained} == {"red", "blue"}
    # a session may change before its first job starts: such a process has trained none
    assert all(len({jobs[job] for job in process.trained}) <= 1 for process in processes)
    assert max(process.most_together for process in processes) >= 2


def sessions(service: Service, job: str) -> list[str]:
    """Sessions that a job was in, in order."""
    return [placement["group"] for placement in service.placed(job)]


class Moves:
    """A stranger's policy with names of its own: everybody on the last GPU, then each on its own."""

    promises = frozenset()

    def __init__(self):
        self.calls = 0

    def decide(self, state, now):
        self.calls += 1
        names, mesh = tuple(state.jobs), Mesh(1, 1, 256)
        if not names:
            return []
        base = next(iter(state.jobs.values())).job.base_name
        if "all" not in state.groups and "two" not in state.groups:
            return [
                Decision(
                    kind="open", group="all", base=base, worker="local", gpus=(1,), mesh=mesh, members=names, why="a"
                )
            ]
        moved = any(one.done_steps >= 5 for one in state.jobs.values())
        if "two" not in state.groups and len(names) == 3 and moved:
            return [
                Decision(
                    kind="change",
                    group="all",
                    base=base,
                    worker="local",
                    gpus=(1,),
                    mesh=mesh,
                    members=names[:1],
                    why="b",
                ),
                Decision(
                    kind="open",
                    group="two",
                    base=base,
                    worker="local",
                    gpus=(0,),
                    mesh=mesh,
                    members=names[1:2],
                    why="c",
                ),
            ]
        return []


def test_a_job_moves_to_a_session_of_its_own(serve, monkeypatch):
    monkeypatch.setattr("lorafusion_jax.serve.control.policy_scheduler.REPORT_S", 0.05)
    monkeypatch.setattr("lorafusion_jax.serve.control.policy_scheduler.TICK_S", 0.1)
    monkeypatch.setattr(SimulatedProcess, "most_steps", 30)  # jobs wait for the move
    service = serve(Moves(), gpus=2)
    first = service.submit("one", "red", steps=60)
    second = service.submit("two", "red", steps=60)
    wait_for(lambda: service.show(second)["step"] > 8)
    service.submit("three", "red")  # its arrival is when the policy is asked again; it waits
    wait_for(lambda: sessions(service, second)[-1:] == ["two"])
    monkeypatch.setattr(SimulatedProcess, "most_steps", math.inf)
    service.wait(first, second)
    assert sessions(service, first) == ["all"]
    assert sessions(service, second) == ["all", "two"]


class Broken:
    """Fails, and takes its time for it."""

    promises = frozenset()

    def __init__(self):
        self.calls = 0

    def decide(self, state, now):
        self.calls += 1
        time.sleep(0.05)
        raise RuntimeError(f"call {self.calls}")


def test_what_a_policy_gets_wrong_is_counted_shown_and_changes_nothing(serve, monkeypatch):
    """From the third refusal on a simpler policy decides, so jobs end."""
    monkeypatch.setattr("lorafusion_jax.serve.control.policy_scheduler.TICK_S", 0.1)
    service = serve(Broken())
    job = service.submit("one", "blue")
    service.wait(job)
    assert service.controller.refused_decisions >= 3
    decisions = service.decisions()
    refused = [decision for decision in decisions if decision["refused"]]
    assert [row["refused"] for row in refused[:3]] == [f"RuntimeError: call {number}" for number in (1, 2, 3)]
    opened = next(row for row in decisions if row["text"].startswith("open"))
    assert opened["seq"] > refused[1]["seq"]


class Liar:
    """Opens sessions on GPUs that do not exist, with jobs that nobody has submitted."""

    promises = frozenset()

    def decide(self, state, now):
        return [Decision("open", "sky", "red", "moon", (7, 8), Mesh(2, 1, 128), ("job-nobody",), "because")]


def test_decisions_that_cannot_be_are_refused(serve, monkeypatch):
    monkeypatch.setattr("lorafusion_jax.serve.control.policy_scheduler.TICK_S", 0.1)
    service = serve(Liar())
    service.wait(service.submit("one", "red"))
    assert service.controller.refused_decisions >= 3
    assert "sky" not in service.controller.groups


def test_a_changed_priority_and_weight_reach_the_policy(tmp_path, tiny_base):
    """The waiting job takes the GPU once it has a priority, and keeps it from a short job of a lower one."""
    now, changes = [0.0], ChangeCosts(start_s=1.0, change_s=0.1, compile_s=0.1, move_s=0.1)
    bases = {"red": tiny_base, "blue": tiny_base}
    settings = Settings(home=tmp_path, bases=bases, places={4: 2}, gpus=1, memory_gib=4.0)
    scheduler = PolicyScheduler(settings, "ours", rates=Rates(changes), clock=lambda: now[0])

    def row(name: str, base: str, steps: int) -> dict[str, Any]:
        spec = {"data": {}, "lora": {"rank": 4}, "batch": {"global_samples": 4}}
        job = {"id": name, "owner": "ana", "base": base, "spec": spec, "lengths": [60, 20, 90], "rank": 4, "step": 0}
        return job | {"steps": steps, "weight": 1.0, "priority": 0, "created": None, "queued": None, "state": "queued"}

    def placed(*rows: dict[str, Any]) -> set[str]:
        now[0] += 30.0
        ready = dict.fromkeys(scheduler._cluster.groups, True)
        configuration = scheduler.decide(rows, ready)
        while scheduler._answer is not None:
            configuration = scheduler.decide(rows, ready)
        assert configuration.refused == []
        return set(configuration.group)

    first, second = row("first", "red", 10**7), row("second", "blue", 10**8)
    assert placed(first, second) == placed(first, second) == {"first"}
    second = second | {"priority": 5, "weight": 3.0}
    assert placed(first, second) == {"second"}
    assert scheduler._cluster.jobs["second"].job.weight == 3.0
    short = row("short", "red", 2000)
    assert placed(first, second, short) == placed(first, second, short) == {"second"}
    second = second | {"priority": -1}
    assert "second" not in placed(first, second, short)


@pytest.mark.parametrize(
    ("options", "fits", "capacity"),
    [
        ({"base": {"quantize": "nf4"}}, True, 4736),
        ({"base": {"quantize": "nf4"}, "places": {64: 16}}, False, 4736),
        ({"base": {"quantize": "nf4"}, "train": {"remat": "everything"}, "memory_gib": 60.0}, False, 4736),
        ({"memory_gib": 79.0, "device": "h100"}, False, 4736),
        ({"batch": {"capacity_tokens": [1000, 2000]}}, False, 2048),
    ],
)
def test_a_policy_plans_with_the_settings_of_sessions(options, fits, capacity, tmp_path):
    """A 70B fits on one GPU in four bits, with few places, and sessions have the capacity that was given."""
    base = write_base(tmp_path / "tall", {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336})
    large = write_base(tmp_path / "large", {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672})
    bases = {"tall": base, "large": large}
    options = {"places": {4: 2}, "policy": "ours"} | options
    scheduler = PolicyScheduler(Settings(home=tmp_path, bases=bases, **options), "ours")
    spec = {"data": {}, "lora": {"rank": 4}, "batch": {"global_samples": 64}}
    job = {"id": "law", "owner": "ana", "base": "tall", "spec": spec, "lengths": [600, 200, 900], "rank": 4, "step": 0}
    job |= {"steps": 9, "weight": 1.0, "priority": 0, "created": None, "queued": None, "state": "queued"}
    assert bool(scheduler.refuses(job | {"base": "large"})) is not fits
    earlier = job | {"id": "earlier", "base": "large"}  # of a service with other settings
    wait_for(lambda: scheduler.decide([job, earlier], {}).sessions)
    decided = scheduler.decide([job, earlier], {})
    assert [plan.capacity_tokens for plan in decided.sessions.values() if plan.base == "tall"] == [capacity]
    why = scheduler.full(earlier, [job, earlier], Limits())
    assert ("fits on no GPUs of this service" in why) is not fits


def write_base(folder: Path, sizes: dict[str, int]) -> Path:
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8} | sizes
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192}))
    return folder


def test_sessions_of_a_policy_have_the_capacities_that_were_given(serve, monkeypatch):
    opened, start = [], SimulatedLauncher.start
    monkeypatch.setattr(
        SimulatedLauncher, "start", lambda self, values, log: opened.append(values) or start(self, values, log)
    )
    service = serve(Packing, batch={"tile_tokens": 16, "capacity_tokens": [128, 256]})
    service.wait(service.submit("one", "red"))
    assert [values["batch"]["capacity_tokens"] for values in opened] == [[128, 256]]


class Sleeper(Packing):
    """Takes longer than a lease."""

    def decide(self, state, now):
        time.sleep(1.9)
        return super().decide(state, now)


def test_a_policy_that_sleeps_delays_decisions_and_nothing_else(serve, monkeypatch):
    """Workers train on, their events are taken, and none of them counts as lost."""
    monkeypatch.setattr(SimulatedProcess, "most_steps", 3)  # it runs when the other comes, however late
    service = serve(Sleeper, lease_s=1.5)
    job = service.submit("one", "red")
    wait_for(lambda: service.show(job)["step"] == 3)
    began = time.monotonic()
    other = service.submit("two", "blue", steps=20)  # the policy is asked, and sleeps
    monkeypatch.setattr(SimulatedProcess, "most_steps", math.inf)
    wait_for(lambda: service.show(job)["step"] > 13)
    service.wait(job, other)
    assert time.monotonic() - began > 1.9
    assert [service.show(name)["tries"] for name in (job, other)] == [0, 0]


class Dreamer(Packing):
    """Begins to think once a second job is there, and wakes when it is told to."""

    wake = threading.Event()

    def decide(self, state, now):
        if len(state.jobs) > 1:
            self.wake.wait(120)
        return super().decide(state, now)


def test_jobs_are_stopped_and_lost_workers_replaced_while_a_policy_thinks(serve, monkeypatch):
    monkeypatch.setattr(Dreamer, "wake", threading.Event())
    service = serve(Dreamer)
    first = service.submit("one", "red", steps=10**6)
    wait_for(lambda: service.show(first)["step"] >= 3)
    second = service.submit("two", "blue", steps=5)
    (processes,) = SimulatedLauncher.made.values()
    processes[0].crash()
    wait_for(lambda: len(service.placed(first)) == 2 and service.show(first)["state"] == "running")
    with service.db.write() as connection:
        service.jobs.ask(connection, first, "pause", actor="ana")
    wait_for(lambda: service.show(first)["state"] == "paused")
    assert service.show(second)["state"] == "queued"
    Dreamer.wake.set()
    service.wait(second)


def test_another_policy_decides_after_one_that_never_does(serve, monkeypatch):
    monkeypatch.setattr("lorafusion_jax.serve.control.policy_scheduler.PATIENCE_S", 0.5)
    monkeypatch.setattr(Dreamer, "wake", threading.Event())
    service = serve(Dreamer)
    first = service.submit("one", "red", steps=200)
    wait_for(lambda: service.show(first)["step"] >= 3)
    service.wait(first, service.submit("two", "blue", steps=5))
    Dreamer.wake.set()
    assert service.show(first)["tries"] == 0  # its session stayed
    assert len(service.placed(first)) == 1
    assert [row["refused"] for row in service.decisions() if "has not decided" in row["refused"]]


def test_each_host_has_its_gpus(serve):
    """Sessions of two hosts have GPUs of the same number at the same time."""
    service = serve(Packing, gpus=1, hosts=2)
    jobs = [service.submit(base, base, steps=150) for base in ("red", "blue")]
    wait_for(lambda: all(service.show(job)["state"] == "running" for job in jobs))
    plans = [session.plan for session in service.controller._sessions.values()]
    assert sorted((plan.host, plan.gpus) for plan in plans) == [("node-0", (0,)), ("node-1", (0,))]
    with service.db.read() as connection:
        rows = [dict(row) for row in connection.execute(select(t.groups)).mappings()]
        running = service.jobs.in_states(connection, "running")
    again = PolicyScheduler(service.settings, "packing")
    again.adopt(rows, running)  # the next server goes on with both
    assert again.decide(running, {}).sessions == {row["id"]: plan_of_row(row) for row in rows}
    service.wait(*jobs)


def test_a_policy_without_gpus_has_the_cpu(serve):
    """Two bases take turns on it."""
    service = serve("ours", gpus=0)
    service.wait(service.submit("one", "red"), service.submit("two", "blue"))


def test_the_gpus_of_a_lost_host_leave_the_count_until_it_is_back(serve, monkeypatch):
    """Its job goes on elsewhere. A host that goes without a session, as an autoscaler ends it, is not lost."""
    monkeypatch.setattr("lorafusion_jax.serve.control.policy_scheduler.HOSTS_S", 0.0)
    monkeypatch.setattr(SimulatedLauncher, "up", 3)
    monkeypatch.setattr(SimulatedProcess, "most_steps", 20)
    service = serve(Packing, gpus=1, hosts=2)
    jobs = [service.submit(base, base, steps=40) for base in ("red", "blue")]
    wait_for(lambda: all(service.show(job)["step"] == 20 for job in jobs))
    SimulatedLauncher.up = 1
    cluster, host_of = service.scheduler._cluster, {job: service.placed(job)[-1]["group"] for job in jobs}
    assert cluster.down == frozenset()
    group = host_of[jobs[0]]
    host = cluster.groups[group].worker
    SimulatedLauncher.made[group][-1].crash()
    wait_for(lambda: cluster.down == {host})
    wait_for(lambda: all(state.worker != host for state in cluster.groups.values()))
    SimulatedProcess.most_steps = math.inf
    service.wait(jobs[1], jobs[0])
    SimulatedLauncher.up = 2
    wait_for(lambda: cluster.down == frozenset())


def test_a_session_that_dies_is_opened_again(serve):
    service = serve(Packing)
    job = service.submit("one", "red", steps=80)
    wait_for(lambda: service.show(job)["step"] >= 3)
    (processes,) = SimulatedLauncher.made.values()
    processes[0].crash()
    service.wait(job)
    assert service.show(job)["tries"] == 1
    assert len(processes) == 2


def test_sessions_grow_with_the_ranks_of_their_jobs(serve):
    """Places of the settings hold ranks up to 4; the policy's group has a member of rank 12."""
    service = serve(Packing)
    jobs = [service.submit("small", "red"), service.submit("large", "red", rank=12)]
    service.wait(*jobs)
    plans = [places for made in SimulatedLauncher.plans.values() for places in made]
    assert {"4": 2, "16": 1} in plans
