"""Streams: the calls of training clients are rows of a session, packed with those of other clients and jobs.

The last tests are of `lf.training_client`, on the same session.
"""

from __future__ import annotations

import asyncio
import re
import runpy
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from live_sessions import open_session
from small_jobs import two_adapters, write_job, write_rows

import lorafusion_jax as lf
from lorafusion_jax.api.training import TrainingClient, _Shared
from lorafusion_jax.config import load_config
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.errors import CallError, LoraFusionError
from lorafusion_jax.examples import examples_directory
from lorafusion_jax.peft.folder import read_described
from lorafusion_jax.session import AdapterState, Session, Task, WindowPlanner, call_runner
from lorafusion_jax.session.calls import ForwardBackward, LoadState, OptimStep, Row, SaveState
from lorafusion_jax.session.session_thread import SessionThread

pytestmark = pytest.mark.usefixtures("quick_compiles")

CAPACITY = 128
TARGETS = ["q_proj", "down_proj"]


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_base) -> JobConfig:
    folder = tmp_path_factory.mktemp("job")
    rows = {name: write_rows(folder, name, 6) for name in ("law", "med")}
    entries = [entry | {"lora": {"rank": 2, "targets": TARGETS}} for entry in two_adapters(rows)]
    return load_config(write_job(folder, tiny_base, entries, batch={"capacity_tokens": CAPACITY}))


@pytest.fixture(scope="module")
def session(config):
    opened = open_session(config, {4: 7}, TARGETS, row_targets=1)
    yield opened
    opened.close()


@pytest.fixture
def planner(session) -> WindowPlanner:
    return WindowPlanner(session)


@pytest.fixture
def reproducible(session, monkeypatch) -> WindowPlanner:
    """Plans as a session that was opened so, with the same programs."""
    tail = replace(session.free_places.tail, reproducible=True, most_adapters=1)
    monkeypatch.setattr(session.free_places, "tail", tail)
    return WindowPlanner(session)


class Client:
    """A training client that waits for nothing by itself."""

    def __init__(self, planner: WindowPlanner, name: str, rank: int = 4, seed: int = 0):
        self.planner, self.task = planner, planner.session.new_stream(name, rank=rank, seed=seed, targets=TARGETS)
        free_place = planner.session.find_place(self.task.spec)
        assert free_place is not None
        planner.session.start(free_place, self.task)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_) -> None:
        self.planner.session.drain()
        self.planner.session.forget(self.task.name)

    def submit(self, call) -> Future:
        return self.task.source.submit(call)

    def add(self, rows, loss="cross_entropy", **options) -> Future:
        return self.submit(ForwardBackward(rows=rows, loss=loss, **options))

    def look(self, rows) -> Future:
        return self.add(rows, forward_only=True)

    def step(self, **numbers) -> Future:
        return self.submit(OptimStep(**{"learning_rate": 1e-2} | numbers))

    def state(self) -> AdapterState:
        return wait(self.planner, self.submit(SaveState()))


def run(planner: WindowPlanner) -> None:
    """Runs all calls."""
    while True:
        window = planner.plan(48)
        planner.run(window)
        if not window.slots and not planner.has_calls:
            planner.session.drain()
            return


def wait(planner: WindowPlanner, future: Future):
    run(planner)
    return future.result(timeout=60)


def rows_of(lengths, loss="cross_entropy", seed=0) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        inputs = {"target_tokens": rng.integers(0, 50, length)}
        if loss == "cross_entropy":
            inputs["weights"] = (np.arange(length) >= length // 3) * rng.uniform(0.1, 1.0, length)
        else:
            inputs |= {"logprobs": rng.normal(-4, 0.5, length), "advantages": rng.normal(size=length)}
            inputs["advantages"][: length // 3] = 0
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = np.arange(length) >= length // 3
        rows.append(Row(tokens=rng.integers(0, 50, length), inputs=inputs))
    return rows


def assert_equal(state, other) -> None:
    assert state.step == other.step
    for name, leaf in other.weights.items():
        np.testing.assert_array_equal(state.weights[name], leaf)


def assert_near(state, other, atol=2e-5) -> None:
    for name, leaf in other.weights.items():
        np.testing.assert_allclose(state.weights[name], leaf, atol=atol)


def test_a_client_learns_and_its_results_are_those_of_its_rows(planner):
    rows = rows_of([30, 5, 100, 1])
    with Client(planner, "one") as client:
        looked, added, stepped = client.look(rows), client.add(rows), client.step()
        run(planner)
        for row, before, now in zip(rows, looked.result().outputs, added.result().outputs, strict=True):
            assert now["logprobs"].shape == row.tokens.shape
            np.testing.assert_allclose(now["logprobs"], before["logprobs"], atol=1e-6)
            losses = -row.inputs["weights"] * now["logprobs"]
            np.testing.assert_allclose(now["elementwise_loss"], losses, atol=1e-5)
        total = sum(output["elementwise_loss"].sum() for output in added.result().outputs)
        assert added.result().metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
        assert stepped.result().step == 1
        assert stepped.result().metrics["grad_norm:mean"] > 0
        after = wait(planner, client.look(rows)).metrics["loss:sum"]
        assert after < added.result().metrics["loss:sum"]


CALLS = (  # of six clients: loss, rank, and the lengths of the rows of each call; a step follows every second one
    ("cross_entropy", 4, [[30, 20], [100], [7] * 5]),
    ("importance_sampling", 2, [[50], [60, 40, 10], [9, 8]]),
    ("ppo", 2, [[20, 10], [5], [64]]),
    ("cispo", 4, [[12], [90, 8], [3]]),
    ("dro", 2, [[25] * 3, [16], [40]]),
    ("gspo", 4, [[33, 20], [128], [1, 2, 3]]),
)
LAST = {"learning_rate": 3e-3, "beta2": 0.9, "weight_decay": 0.1, "grad_clip_norm": 0.05}


def submit_turn(client: Client, loss: str, calls: Sequence[Sequence[int]], turn: int) -> list[Future]:
    added = client.add(rows_of(calls[turn], loss, seed=turn), loss)
    return [added, client.step(**LAST if turn == 2 else {})] if turn else [added]


def run_alone(planner: WindowPlanner) -> dict[str, tuple[list[Future], AdapterState]]:
    alone = {}
    for loss, rank, calls in CALLS:
        with Client(planner, loss, rank) as client:
            results = [future for turn in range(3) for future in submit_turn(client, loss, calls, turn)]
            run(planner)
            alone[loss] = results, client.state()
    return alone


def run_together(planner: WindowPlanner) -> dict[str, tuple[list[Future], AdapterState]]:
    """Calls come between the slots of others."""
    clients = {loss: Client(planner, loss, rank) for loss, rank, _ in CALLS}
    results: dict[str, list[Future]] = {loss: [] for loss in clients}
    for turn in range(3):
        for loss, _, calls in CALLS:
            results[loss] += submit_turn(clients[loss], loss, calls, turn)
        planner.run(planner.plan(1))
    run(planner)
    states = {loss: (results[loss], client.state()) for loss, client in clients.items()}
    for client in clients.values():
        client.__exit__()
    return states


def test_company_and_time_of_arrival_change_no_bit(reproducible):
    alone, together = run_alone(reproducible), run_together(reproducible)
    for loss, (results, state) in together.items():
        expected, expected_state = alone[loss]
        for now, before in zip(results, expected, strict=True):
            assert now.result().metrics == before.result().metrics
        assert_equal(state, expected_state)


def test_clients_and_a_job_fill_microbatches_together(planner, config):
    alone = run_alone(planner)
    law = select_adapters(config, ["law"])
    task = Task.of(law, prepare(law))
    job_alone = run_job(planner, task)
    slots_alone = planner.slot
    task = Task.of(law, prepare(law))
    planner.session.start(planner.session.find_place(task.spec), task)
    together = run_together(planner)
    job_together = planner.session.stop("law")
    assert planner.slot - slots_alone < 0.8 * slots_alone
    assert_near(job_together, job_alone)
    for loss, (results, state) in together.items():
        expected, expected_state = alone[loss]
        for now, before in zip(results, expected, strict=True):
            assert now.result().metrics == pytest.approx(before.result().metrics, rel=1e-4, abs=1e-4)
        assert_near(state, expected_state)


def run_job(planner: WindowPlanner, task: Task) -> AdapterState:
    session: Session = planner.session
    session.start(session.find_place(task.spec), task)
    while task.status == "running":
        planner.run(planner.plan(48))
        session.drain()
    return session.stop(task.name)


def test_calls_split_in_any_way_give_the_same_step(planner):
    rows = rows_of([40, 30, 20, 10, 50], "ppo")
    splits = ([rows], [rows[:1], rows[1:]], [[row] for row in rows])
    states, norms = [], []
    for split in splits:
        with Client(planner, "split") as client:
            for part in split:
                client.add(part, "ppo", config={"clip_high_threshold": 1.1})
            norms.append(wait(planner, client.step()).metrics["grad_norm:mean"])
            states.append(client.state())
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    for state in states[1:]:
        assert_near(state, states[0])


def test_a_short_call_has_a_small_pass(session, planner, monkeypatch):
    """Its log-probabilities are those of a large one; a reproducible session has one size."""
    monkeypatch.setattr(call_runner, "SMALLEST_PASS", 32)
    sizes: list[int | None] = []
    assemble = session.free_places.microbatch

    def microbatch(assembler, slot, tasks):
        sizes.append(slot.capacity_tokens)
        return assemble(assembler, slot, tasks)

    monkeypatch.setattr(session.free_places, "microbatch", microbatch)
    short, long = rows_of([20]), rows_of([20, 100])
    with Client(planner, "ana") as ana, Client(planner, "ben") as ben:
        (alone,) = wait(planner, ana.look(short)).outputs
        both = wait(planner, ana.look(long)).outputs
        assert sizes == [32, 128]
        np.testing.assert_allclose(both[0]["logprobs"], alone["logprobs"], atol=1e-5)
        ana.look(short)
        wait(planner, ben.look(short))
        assert sizes[2:] == [64]  # a tile begins with each adapter
        monkeypatch.setattr(session.free_places, "tail", replace(session.free_places.tail, reproducible=True))
        wait(WindowPlanner(session), ana.look(short))
        assert sizes[3:] == [None]


def test_losses_are_sums(planner):
    rows = rows_of([40, 30])
    doubled = [Row(tokens=r.tokens, inputs=r.inputs | {"weights": 2 * r.inputs["weights"]}) for r in rows]
    norms = []
    for calls in ([rows], [doubled], [rows, rows]):
        with Client(planner, "sums") as client:
            for part in calls:
                client.add(part)
            norms.append(wait(planner, client.step()).metrics["grad_norm:mean"])
    assert norms == pytest.approx([norms[0], 2 * norms[0], 2 * norms[0]], rel=1e-5)


def test_every_step_has_its_own_numbers_and_may_lack_rows(planner):
    """A step without rows moves by its moments and decay, as that of torch does with gradients of zero."""
    with Client(planner, "numbers") as client:
        wait(planner, client.step())
        first = client.state()
        assert first.step == 1
        client.add(rows_of([60]))
        wait(planner, client.step())
        before = client.state()
        numbers = {"beta1": 0.8, "beta2": 0.7, "eps": 1e-3, "weight_decay": 0.5, "learning_rate": 3e-2}
        wait(planner, client.step(**numbers))
        after = client.state()
        assert after.step == 3
    mu = {path: leaf for path, leaf in before.optimizer.items() if "mu" in path}
    assert len(mu) == len(before.weights)
    for path, moment in mu.items():
        (name,) = (name for name in before.weights if path.endswith((f"['{name}']", name)))
        m, v = 0.8 * moment / (1 - 0.8**3), 0.7 * before.optimizer[path.replace("mu", "nu")] / (1 - 0.7**3)
        expected = before.weights[name] - 3e-2 * (m / (np.sqrt(v) + 1e-3) + 0.5 * before.weights[name])
        np.testing.assert_allclose(after.weights[name], expected, rtol=1e-5, atol=1e-7)


def test_a_failed_call_adds_nothing_and_later_ones_run(planner):
    rows = rows_of([40])
    with Client(planner, "good") as client:
        client.add(rows)
        expected = wait(planner, client.step()).metrics
    too_long = Row(tokens=np.zeros(CAPACITY + 1, int), inputs={"target_tokens": np.zeros(CAPACITY + 1, int)})
    with Client(planner, "bad") as client:
        failed = client.add([*rows, too_long])
        wrong_step = client.step(beta1=1.0)
        client.add(rows)
        assert wait(planner, client.step()).metrics == expected
    assert failed.exception().code == "call.too-long"
    assert all(text in str(failed.exception()) for text in ("datum 1", str(CAPACITY), str(CAPACITY + 1)))
    assert wrong_step.exception().code == "call.optimizer"


def test_a_sum_that_is_not_finite_fails_its_step_alone(planner):
    check_refused_steps(planner)


def check_refused_steps(planner: WindowPlanner) -> None:
    """A step is refused for its gradient, and for what it would write; weights and sums are those of before and 0."""
    rows = rows_of([40])
    with Client(planner, "sound") as client:
        expected = wait(planner, client.look(rows))
        client.add(rows)
        norm = wait(planner, client.step()).metrics["grad_norm:mean"]
    bad = rows_of([30], "importance_sampling")[0]
    bad.inputs["logprobs"][20] = -1e4  # its ratio overflows
    with Client(planner, "infinite") as client:
        client.add([bad, *rows_of([20], "importance_sampling", 1)], "importance_sampling")
        refused, looked = client.step(), client.look(rows)
        client.add(rows)
        too_far = client.step(learning_rate=3e38, weight_decay=1e3)
        client.add(rows)
        stepped = client.step()
        run(planner)
        assert too_far.exception().code == "call.not-finite"
        assert isinstance(refused.exception(), CallError)
        assert refused.exception().code == "call.not-finite"
        np.testing.assert_array_equal(looked.result().outputs[0]["logprobs"], expected.outputs[0]["logprobs"])
        assert stepped.result().metrics == {
            "grad_norm:mean": norm,
            "learning_rate:mean": pytest.approx(1e-2),
            "step:max": 1,
        }


def test_a_state_continues_in_another_client(reproducible):
    planner = reproducible
    with Client(planner, "whole") as client:
        client.add(rows_of([40, 60]))
        client.step()
        client.add(rows_of([30], seed=1))
        wait(planner, client.step())
        expected = client.state()
    with Client(planner, "first") as client:
        client.add(rows_of([40, 60]))
        client.step()
        saved = client.submit(SaveState())
        weights = client.submit(SaveState(optimizer=False))
        run(planner)
        assert not weights.result().optimizer
    with Client(planner, "second", seed=5) as client:
        client.add(rows_of([9]))
        client.step()
        client.submit(LoadState(state=saved.result()))
        client.add(rows_of([30], seed=1))
        wait(planner, client.step())
        assert_equal(client.state(), expected)
        client.submit(LoadState(state=saved.result(), optimizer=False))
        assert client.state().step == 0
    with Client(planner, "other", rank=2) as client:
        refused = client.submit(LoadState(state=saved.result()))
        run(planner)
        assert refused.exception().code == "state.shapes"


def test_a_state_comes_after_all_results_before_it(planner):
    with Client(planner, "order") as client:
        order: list[str] = []
        calls = {"rows": client.add(rows_of([40])), "step": client.step(), "late": client.add(rows_of([20]))}
        calls["look"], calls["state"] = client.look(rows_of([9])), client.submit(SaveState())
        for name, future in calls.items():
            future.add_done_callback(lambda _, name=name: order.append(name))
        wait(planner, calls["state"])
    assert order[-1] == "state"
    assert len(order) == 5


def test_a_state_holds_gradients_that_no_step_has_used(reproducible, tmp_path):
    planner = reproducible
    with Client(planner, "whole") as client:
        client.add(rows_of([40, 60]))
        client.add(rows_of([30], seed=1))
        expected = wait(planner, client.step())
        expected_state = client.state()
    with Client(planner, "begun") as client:
        client.add(rows_of([40, 60]))
        saved = client.state()
        assert saved.sums
    saved = AdapterState.read(saved.write(tmp_path / "state"), client.task.adapter)
    with Client(planner, "goes-on", seed=3) as client:
        client.submit(LoadState(state=saved))
        client.add(rows_of([30], seed=1))
        assert wait(planner, client.step()).metrics == expected.metrics
        assert_equal(client.state(), expected_state)
        assert not client.state().sums
        client.submit(LoadState(state=saved, optimizer=False))
        assert wait(planner, client.step()).metrics["grad_norm:mean"] == 0
        client.planner.session.drain()
        client.planner.session.forget("goes-on")
        task = planner.session.new_stream("goes-on", rank=4, targets=TARGETS)
        planner.session.start(planner.session.find_place(task.spec), task, saved, sums=True)
        client.task = task
        client.add(rows_of([30], seed=1))
        assert wait(planner, client.step()).metrics == expected.metrics


def test_a_rank_without_a_place_is_refused_before_the_base_is_read(monkeypatch):
    monkeypatch.setattr("lorafusion_jax.api.training.prepare_machine", lambda: pytest.fail("it has begun"))
    with pytest.raises(LoraFusionError, match="rank 4 is above the largest place, 2") as raised:
        lf.training_client("models/any", rank=4, places={2: 8})
    assert "places={4:" in raised.value.fix


@pytest.mark.nightly
def test_several_targets_at_a_position(planner):
    rng = np.random.default_rng(0)
    targets, weights = rng.integers(0, 50, (40, 3)), rng.uniform(0, 1, (40, 3))
    tokens = rng.integers(0, 50, 40)
    together = Row(tokens=tokens, inputs={"target_tokens": targets, "weights": weights})
    apart = [Row(tokens=tokens, inputs={"target_tokens": targets[:, k], "weights": weights[:, k]}) for k in range(3)]
    results, norms = [], []
    for rows in ([together], apart):
        with Client(planner, "wide") as client:
            results.append(client.add(rows))
            norms.append(wait(planner, client.step()).metrics["grad_norm:mean"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    wide, narrow = (result.result().outputs for result in results)
    assert wide[0]["logprobs"].shape == (40, 3)
    for k in range(3):
        np.testing.assert_allclose(wide[0]["logprobs"][:, k], narrow[k]["logprobs"], atol=1e-5)


def test_a_client_that_ends_fails_its_calls(planner):
    client = Client(planner, "ending")
    waiting = client.add(rows_of([10]))
    client.__exit__()
    late = client.step()
    for future in (waiting, late):
        assert future.exception(timeout=0).code == "call.closed"
        assert future.exception().category == "server"


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [{"stages": 2}, {"data": 2}, {"stages": 2, "data": 2}], ids=str)
def test_stages_and_replicas_give_the_same_results(planner, config, mesh):
    expected = run_together(planner)
    settings = config.mesh.model_validate(mesh)
    other = open_session(config.model_copy(update={"mesh": settings}), {4: 7}, TARGETS, row_targets=1)
    try:
        spread = WindowPlanner(other)
        for loss, (results, state) in run_together(spread).items():
            for now, before in zip(results, expected[loss][0], strict=True):
                assert now.result().metrics == pytest.approx(before.result().metrics, rel=1e-4, abs=1e-4)
            assert_near(state, expected[loss][1])
        check_refused_steps(spread)
    finally:
        other.close()


# `lf.training_client`, which takes over the session of the tests above.


TOKENS = [np.random.default_rng(0).integers(0, 50, length) for length in (30, 12, 7)]


@pytest.fixture(scope="module")
def opened(session):
    shared = _Shared(SessionThread(session), TARGETS)
    with TrainingClient(shared, rank=4, targets=TARGETS) as client:
        yield client


@pytest.fixture
def client(opened):
    with opened.new_client(rank=4) as fresh:
        yield fresh


def data(**inputs) -> list[lf.Datum]:
    def datum(tokens):
        sizes = {name: value(len(tokens) - 1) for name, value in inputs.items()}
        return lf.Datum(model_input=tokens[:-1], loss_fn_inputs={"target_tokens": tokens[1:], **sizes})

    return [datum(tokens) for tokens in TOKENS]


def logprobs(client) -> list[np.ndarray]:
    return [output["logprobs"] for output in client.forward(data()).result().loss_fn_outputs]


def test_calls_run_in_their_order_and_clients_share_a_session(client, opened):
    before = client.forward_backward(data())
    step = client.optim_step(lf.AdamParams(learning_rate=1e-2))
    after = client.forward(data())
    with opened.new_client(rank=2) as other:
        first = other.forward(data()).result().metrics["loss:sum"]
        assert first == pytest.approx(before.result().metrics["loss:sum"], rel=1e-5)
    assert step.result().step == 1
    assert after.result().metrics["loss:sum"] < before.result().metrics["loss:sum"]
    assert after.done()


def test_results_can_be_awaited(client):
    async def work():
        futures = client.forward_backward(data()), client.optim_step(learning_rate=1e-3)
        return [await future for future in futures]

    output, stepped = asyncio.run(work())
    assert [len(row["logprobs"]) for row in output.loss_fn_outputs] == [29, 11, 6]
    assert stepped.metrics["learning_rate:mean"] == pytest.approx(1e-3)


def test_custom_losses_of_jax_and_numpy_are_those_of_rows(opened):
    """The mean of -p² over all positions, whose gradient is -2 p / n."""

    def of_jax(given, arrays):
        joined = jnp.concatenate(arrays)
        return -jnp.mean(joined**2), {"largest:max": jnp.max(joined)}

    def of_numpy(given, arrays):
        n = sum(map(len, arrays))
        loss = -sum((p**2).sum() for p in arrays) / n
        return loss, {"largest:max": max(p.max() for p in arrays)}, [-2 * p / n for p in arrays]

    results = []
    for loss, options in ((of_jax, {}), (of_numpy, {"returns_gradients": True}), (None, {})):
        with opened.new_client(rank=4) as client:
            if loss is None:
                rows = data()
                n = sum(len(p) for p in logprobs(client))
                for row, p in zip(rows, logprobs(client), strict=True):
                    row.loss_fn_inputs["weights"] = 2 * p / n
                client.forward_backward(rows)
            else:
                output = client.forward_backward_custom(data(extra=np.ones), loss, **options).result()
                assert output.metrics["loss:sum"] == pytest.approx(
                    -np.mean(np.concatenate(logprobs(client)) ** 2), rel=1e-5
                )
                assert output.metrics["largest:max"] == pytest.approx(max(p.max() for p in logprobs(client)), rel=1e-5)
            norm = client.optim_step(learning_rate=1e-2).result().metrics["grad_norm:mean"]
            results.append((norm, logprobs(client)))
    for norm, arrays in results[1:]:
        assert norm == pytest.approx(results[0][0], rel=1e-5)
        jax.tree.map(lambda now, before: np.testing.assert_allclose(now, before, atol=1e-4), arrays, results[0][1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda arrays: arrays[0].sum(), "not (loss, metrics)"),
        (lambda arrays: (arrays[0], {}), "must be one number"),
        (lambda arrays: (arrays[0].sum(), None), "no table of numbers"),
        (lambda arrays: (jnp.log(arrays[0] - arrays[0]).sum(), {}), "the gradient of the loss is not finite"),
    ],
)
def test_what_a_custom_loss_returns_is_checked(opened, returned, says):
    with opened.new_client(rank=4) as client:
        with pytest.raises(LoraFusionError, match=re.escape(says)) as raised:
            client.forward_backward_custom(data(), lambda given, arrays: returned(arrays))
        assert raised.value.code == "call.loss"
        with pytest.raises(ZeroDivisionError):  # errors of the loss itself stay as they are
            client.forward_backward_custom(data(), lambda given, arrays: 1 / 0)
        gradients = [np.zeros(99) for _ in data()]
        with pytest.raises(LoraFusionError, match=r"the shape \(99,\)"):
            client.forward_backward_custom(data(), lambda given, arrays: (0.0, {}, gradients), returns_gradients=True)
        assert client.optim_step(learning_rate=1e-2).result().metrics["grad_norm:mean"] == 0  # nothing was added


def test_arguments_of_another_kind_are_named(opened, tmp_path):
    with opened.new_client(rank=4) as client:
        for one in (data()[0], {"model_input": [1], "loss_fn_inputs": {}}):
            with pytest.raises(LoraFusionError, match="is one datum, not a list"):
                client.forward_backward(one)
        with pytest.raises(LoraFusionError, match=f"there is no folder {tmp_path / 'none'}"):
            client.load_state(tmp_path / "none")
        client.save_weights_for_sampler(tmp_path / "peft").result()
        with pytest.raises(LoraFusionError, match="is a PEFT folder"):
            client.load_state(tmp_path / "peft")
        sampler = client.save_weights_and_get_sampling_client()
        for number in (0, 1.5):
            with pytest.raises(LoraFusionError, match="num_samples is"):
                sampler.sample([1], number)


def test_data_of_the_sdk_are_read(client):
    class Tensor(SimpleNamespace):
        def to_numpy(self):
            return np.asarray(self.data)

    sparse = Tensor(data=[0.5, 2.0], sparse_crow_indices=[0, 1, 1, 2], sparse_col_indices=[1, 0], shape=[3, 2])
    targets = Tensor(data=[[1, 2], [3, 4], [5, 6]], sparse_crow_indices=None)
    datum = SimpleNamespace(
        model_input=SimpleNamespace(to_ints=lambda: [7, 8, 9]),
        loss_fn_inputs={"target_tokens": targets, "weights": sparse},
    )
    params = SimpleNamespace(
        learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0, type="adam"
    )
    output = client.forward_backward([datum]).result().loss_fn_outputs[0]
    expected = -np.array([[0, 0.5], [0, 0], [2.0, 0]]) * output["logprobs"]
    np.testing.assert_allclose(output["elementwise_loss"], expected, rtol=1e-6)
    assert client.optim_step(params).result().step == 1


def test_states_and_folders(client, opened, tmp_path):
    client.forward_backward(data())
    client.optim_step(learning_rate=1e-2)
    state, folder = client.save_state(tmp_path / "state"), client.save_weights_for_sampler(tmp_path / "adapter")
    client.forward_backward(data())
    client.optim_step(learning_rate=1e-2)
    expected = logprobs(client)
    assert read_described(folder.result())[0].spec.rank == 4
    with pytest.raises(lf.LoraFusionError, match="exists"):
        client.save_state(state.result())
    with opened.new_client(rank=4, seed=3) as other:
        other.load_state_with_optimizer(tmp_path / "state").result()
        other.forward_backward(data())
        assert other.optim_step(learning_rate=1e-2).result().step == 2
        for now, before in zip(logprobs(other), expected, strict=True):
            np.testing.assert_allclose(now, before, atol=1e-5)
        other.load_state(tmp_path / "state").result()
        assert other.optim_step().result().step == 1


def test_failed_calls_say_why_and_add_nothing(client):
    for wrong in (
        client.forward_backward(data(), "pp0"),
        client.forward_backward([lf.Datum(model_input=[1] * 129, loss_fn_inputs={"target_tokens": [1] * 129})]),
        client.optim_step(beta1=2.0),
    ):
        with pytest.raises(lf.LoraFusionError, match=r"did you mean 'ppo'|129 tokens.*holds 128|beta1"):
            wrong.result()
    with pytest.raises(lf.LoraFusionError, match="rank"):
        client.new_client(rank=0)
    with pytest.raises(lf.LoraFusionError, match="no place"):
        client.new_client(rank=16)
    with pytest.raises(lf.LoraFusionError, match="no momentum"):
        client.optim_step(momentum=0.9)
    with pytest.raises(lf.LoraFusionError, match="given a SimpleNamespace"):
        client.optim_step(SimpleNamespace(type="dimuon", learning_rate=1e-3))
    with pytest.raises(lf.LoraFusionError, match="without model_input"):
        client.forward([{"tokens": [1, 2]}])
    assert client.optim_step().result().metrics["grad_norm:mean"] == 0


def test_calls_of_a_closed_client_fail(opened):
    client = opened.new_client(rank=2)
    client.close()
    client.close()
    with pytest.raises(lf.LoraFusionError, match="client was closed"):
        client.forward(data()).result()


@pytest.mark.nightly
def test_samples_are_of_a_snapshot(client):
    """The log-probabilities of a sample are those of `forward` on it, also after the adapter has trained on."""
    prompt = [5, 6, 7]
    for _ in range(3):  # so that the adapter differs from the base
        client.forward_backward(data())
        client.optim_step(learning_rate=1e-1)
    sampler = client.save_weights_and_get_sampling_client()
    settings = {"max_tokens": 6, "seed": 3, "temperature": 1.0, "stop": []}
    first = sampler.sample(prompt, num_samples=3, **settings).result()
    rows = [
        lf.Datum(
            model_input=[*prompt, *sample.tokens[:-1]],
            loss_fn_inputs={"target_tokens": [*prompt[1:], *sample.tokens]},
        )
        for sample in first
    ]
    for sample, output in zip(first, client.forward(rows).result().loss_fn_outputs, strict=True):
        assert (len(sample.tokens), sample.stop_reason) == (6, "length")
        np.testing.assert_allclose(output["logprobs"][2:], sample.logprobs, atol=1e-5)
    client.forward_backward(data())
    client.optim_step(learning_rate=1e-1).result()
    assert sampler.sample(prompt, num_samples=3, **settings).result() == first
    assert len({tuple(sample.tokens) for sample in first}) > 1
    (cut,) = sampler.sample(prompt, 1, SimpleNamespace(**settings | {"stop": [first[0].tokens[2]]})).result()
    assert cut.tokens == first[0].tokens[: first[0].tokens.index(first[0].tokens[2]) + 1]
    assert cut.stop_reason == "stop"
    for wrong in ([48_000], [True], [-1]):
        with pytest.raises(lf.LoraFusionError, match=r"generate\.(token|setting)"):
            sampler.sample(prompt, 1, **settings | {"stop": wrong}).result()
    with pytest.raises(lf.LoraFusionError, match="have no beams"):
        sampler.sample(prompt, beams=2)


@pytest.mark.nightly
def test_the_examples_learn():
    folder = Path(__file__).parents[2] / "examples" / "calls"
    losses = runpy.run_path(str(folder / "sft.py"))["main"]()
    assert all(values[-1] < values[0] for values in losses.values())
    rewards = runpy.run_path(str(folder / "rl.py"))["main"]()
    assert rewards[-1] > rewards[0]
    preferred = runpy.run_path(str(folder / "dpo.py"))["main"]()
    assert preferred[-1] < preferred[0]
    gaps = runpy.run_path(str(folder / "distillation.py"))["main"]()
    assert gaps[-1] < gaps[0]


@pytest.mark.nightly
def test_samples_in_bfloat16_are_as_exact_as_forward(tmp_path):
    """What bfloat16 costs depends on the weights, so the measure is what it costs `forward` on the same rows."""
    base, prompt, exact = str(examples_directory() / "base"), TOKENS[0][:4], "float32"
    options = {"rank": 8, "targets": TARGETS, "batch": {"capacity_tokens": 512, "tile_tokens": 32}}
    logprobs = {}
    for dtype in ("bfloat16", exact):
        with lf.training_client({"model": base, "dtype": dtype}, **options) as client:
            if dtype == exact:
                client.load_state(tmp_path / "state").result()
            else:
                for _ in range(4):
                    client.forward_backward(data())
                    client.optim_step(learning_rate=1e-2)
                client.save_state(tmp_path / "state").result()
                sampler = client.save_weights_and_get_sampling_client()
                samples = sampler.sample(prompt, 16, max_tokens=24, seed=0, temperature=1.0, stop=[]).result()
                wholes = [[*prompt, *sample.tokens] for sample in samples]
                logprobs["sampler"] = np.array([sample.logprobs for sample in samples])
            rows = [lf.Datum(model_input=t[:-1], loss_fn_inputs={"target_tokens": t[1:]}) for t in wholes]
            outputs = client.forward(rows).result().loss_fn_outputs
            logprobs[dtype] = np.array([output["logprobs"][len(prompt) - 1 :] for output in outputs])
    sampled, forwarded = (np.abs(logprobs[name] - logprobs[exact]) for name in ("sampler", "bfloat16"))
    assert np.median(forwarded) > 1e-4  # so the rows are those of two dtypes
    assert np.median(sampled) <= 1.5 * np.median(forwarded)
    assert np.sqrt(np.mean(sampled**2)) <= 1.5 * np.sqrt(np.mean(forwarded**2))
