"""Stages of one replica in several processes of this host: bitwise the run of one process on the same mesh."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time

import pytest
import yaml
from idle_units import idle_share
from mixed import WORDS, assert_equal, read_trained, write_mixed_job
from test_processes import BITWISE, EQUAL, STAGES, assert_lost, signal_under_way, start, wait, write_equals

from lorafusion_jax.config import load_config
from lorafusion_jax.config.run_sections import MeshSettings
from lorafusion_jax.planning.network import Network, with_network
from lorafusion_jax.session.processes import LEAVE_S
from lorafusion_jax.training import RunFolder, resume, train
from scheduling import AdapterJob, CostModel, PassCost, StageCost, make_plan, one_forward_one_backward, simulate
from scheduling.timeline import Timeline

MESH = ("mesh.stages=2", "mesh.layers=[1.5, 3.5]")
WHOLE = ("mesh.stages=2",)  # no programs of half layers: every process compiles its own
LONG = ("epochs=12",)  # a signal finds it under way


@pytest.fixture(scope="module")
def job(tmp_path_factory, deep_base):
    """Tied embeddings: the last process reads the table of the first stage."""
    folder = tmp_path_factory.mktemp("job")
    return write_mixed_job(folder, deep_base(True), ("law", "chat"), held_out=("law",), save={"every_steps": 2})


@pytest.fixture(scope="module")
def small_job(tmp_path_factory, tiny_base):
    return write_mixed_job(tmp_path_factory.mktemp("small"), tiny_base, ("law",), (), save={"every_steps": 10})


@pytest.fixture(scope="module")
def one_process(kept_programs, tmp_path_factory):
    """one_process(job, *settings) → what one process with two devices trains."""
    known = {}

    def trained(*what):
        if what not in known:
            folder = tmp_path_factory.mktemp("one") / "run"
            assert train(load_config(what[0], what[1:]), folder).exit_code == 0
            known[what] = read_trained(folder)
        return known[what]

    return trained


def test_a_killed_process_ends_the_other(tiny_base, tmp_path):
    """It waits for activations, not for a sum of replicas."""
    run, job = tmp_path / "run", write_equals(tmp_path, tiny_base)
    processes = start(2, 2, "train", str(job), "--out", str(run), *STAGES)
    signal_under_way(processes, run, signal.SIGKILL, to=1)
    began = time.monotonic()
    left = wait(processes)
    assert time.monotonic() - began < LEAVE_S, "the other waited for the lost one"
    assert_lost(left, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_all_and_one_process_goes_on_bitwise(killed, job, one_process, tmp_path):
    run, settings = tmp_path / "run", (*MESH, *EQUAL, *LONG)
    processes = start(2, 1, "train", str(job), "--out", str(run), *settings)
    signal_under_way(processes, run, signal.SIGKILL, to=killed)
    assert_lost(wait(processes), killed)
    assert resume(run).exit_code == 0
    assert_equal(one_process(job, *settings), read_trained(run), BITWISE)


def assert_idle_as_predicted(plan, orders):
    """Compares the prediction with counted units, where messages take none, one and three."""
    unit = PassCost(fixed_s=1.0)
    costs = CostModel(stages=(StageCost(forward=unit, backward=unit),) * 2)
    shares = []
    for latency in (0, 1, 3):
        network = Network(processes=2, bytes_per_s=1e30, latency_s=float(latency))
        predicted = simulate(plan, with_network(costs, MeshSettings(stages=2), network, token_bytes=4)).bubble_share
        assert predicted == pytest.approx(idle_share(orders, latency), abs=1e-9)
        shares.append(predicted)
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def test_idle_units_of_a_plan_are_as_predicted():
    plan = make_plan(
        [AdapterJob("law", [90, 60, 30] * 6, 3), AdapterJob("med", [70] * 8, 4)], capacity_tokens=128, num_stages=2
    )
    orders = [
        [(event.kind, event.slot) for event in events if event.kind != "update"]
        for events in one_forward_one_backward(plan)
    ]
    assert_idle_as_predicted(plan, orders)


@pytest.mark.nightly
def test_two_processes_are_idle_as_predicted(small_job, tmp_path):
    """In the order in which they issued their passes: no load of the machine changes it."""
    run = tmp_path / "run"
    left = wait(start(2, 1, "train", str(small_job), "--out", str(run), *WHOLE))
    assert [process.code for process in left] == [0, 0], left[0].err + left[1].err
    plan = RunFolder(run).read_plan()
    issued = sorted(Timeline.from_json((run / "timeline.json").read_text()).host, key=lambda span: span.start_s)
    orders = [[(s.kind, s.slot) for s in issued if s.stage == stage and s.kind != "update"] for stage in (0, 1)]
    assert [len(order) for order in orders] == [2 * (plan.num_slots - plan.num_noops)] * 2
    assert_idle_as_predicted(plan, orders)


@pytest.mark.nightly
def test_a_signal_stops_both_and_two_processes_go_on_bitwise(job, one_process, tmp_path):
    run = tmp_path / "run"
    processes = start(2, 1, "train", str(job), "--out", str(run), *MESH, *EQUAL, *LONG)
    signal_under_way(processes, run, signal.SIGTERM, to=1)
    left = wait(processes)
    assert [process.code for process in left] == [130, 130], left[0].err + left[1].err
    left = wait(start(2, 1, "resume", str(run)))
    assert [process.code for process in left] == [0, 0], left[0].err + left[1].err
    assert_equal(one_process(job, *EQUAL, *MESH, *LONG), read_trained(run), BITWISE)
    timeline = Timeline.from_json((run / "timeline.json").read_text())
    assert [len(spans) > 0 for spans in timeline.by_stage] == [True, True]
    assert 0 < timeline.bubble_share < 1


@pytest.mark.nightly
def test_what_one_process_began_two_end(job, one_process, tmp_path):
    run = tmp_path / "run"
    assert train(load_config(job, (*EQUAL, *MESH)), run).exit_code == 0
    shutil.rmtree(max(RunFolder(run).state.iterdir(), key=lambda folder: int(folder.name)))
    left = wait(start(2, 1, "resume", str(run)))
    assert [process.code for process in left] == [0, 0], left[0].err + left[1].err
    assert_equal(one_process(job, *EQUAL, *MESH), read_trained(run), BITWISE)


@pytest.mark.nightly
@pytest.mark.parametrize(("count", "devices"), [(2, 2), (4, 1)])
def test_replicas_and_stages_in_several_processes(count, devices, job, one_process, tmp_path):
    mesh = (*MESH, "mesh.data=2")
    left = wait(start(count, devices, "train", str(job), "--out", str(tmp_path / "run"), *mesh, *EQUAL))
    assert [process.code for process in left] == [0] * count, "".join(process.err for process in left)
    assert_equal(one_process(job, *EQUAL, *mesh), read_trained(tmp_path / "run"), BITWISE)


@pytest.mark.nightly
def test_references_and_an_adapter_that_diverges(job, tmp_path):
    """The reference comes from the last stage; the adapter is put back on both."""
    words = random.Random(3)

    def text(count):
        return " ".join(words.choice(WORDS) for _ in range(count))

    rows = [{"prompt": text(3), "chosen": text(4), "rejected": text(2)} for _ in range(6)]
    (job.parent / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = yaml.safe_load(job.read_text())
    content["batch"]["capacity_tokens"] = 128
    law, chat = content["adapters"]
    chat["optim"]["lr"] = 1e30
    pairs = {"data": {"train": "pairs.jsonl", "eval": "pairs.jsonl"}, "objective": {"name": "dpo"}, "seed": 9}
    content["adapters"].append(law | pairs | {"name": "pairs", "batch": {"global_samples": 2}})
    other = job.with_name("with_pairs.yaml")
    other.write_text(yaml.safe_dump(content))
    assert train(load_config(other, MESH), tmp_path / "one").exit_code == 3
    left = wait(start(2, 1, "train", str(other), "--out", str(tmp_path / "run"), *MESH))
    assert [process.code for process in left] == [3, 3], left[0].err + left[1].err
    assert "gradient not finite" in left[0].out
    assert_equal(read_trained(tmp_path / "one"), read_trained(tmp_path / "run"), BITWISE)
