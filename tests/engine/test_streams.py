"""Streams: the calls of training clients are rows of a session, packed with those of other clients and jobs.

The last tests are of `lf.training_client`, on the same session.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stream_clients import (
    CAPACITY,
    TARGETS,
    Client,
    assert_equal,
    assert_near,
    check_refused_steps,
    data,
    logprobs,
    rows_of,
    run,
    run_alone,
    run_together,
    wait,
)

import lorafusion_jax as lf
from lorafusion_jax.api import training
from lorafusion_jax.api.custom_loss import differentiate
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.errors import CallError, LoraFusionError, RunError
from lorafusion_jax.peft.folder import read_described
from lorafusion_jax.session import AdapterState, Session, Task, WindowPlanner, call_runner
from lorafusion_jax.session.calls import LoadState, Row, SaveState

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture
def reproducible(session, monkeypatch) -> WindowPlanner:
    """Plans as a session that was opened so, with the same programs."""
    tail = replace(session.free_places.tail, reproducible=True, most_adapters=1)
    monkeypatch.setattr(session.free_places, "tail", tail)
    return WindowPlanner(session)


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
    assert "places={2: 8, 4: 1}" in raised.value.fix


def test_a_client_that_ends_fails_its_calls(planner):
    client = Client(planner, "ending")
    waiting = client.add(rows_of([10]))
    client.__exit__()
    late = client.step()
    for future in (waiting, late):
        assert future.exception(timeout=0).code == "call.closed"
        assert future.exception().category == "server"


# `lf.training_client`, which takes over the session of the tests above.


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


def test_samples_come_from_the_loaded_base(client, config):
    """Its folder may be gone by the first sample: training does not need it either."""
    client.forward(data()).result()
    base = base_directory(config)
    elsewhere = base.rename(base.with_name("elsewhere"))
    try:
        (sample,) = client.save_weights_and_get_sampling_client().sample([5, 6], max_tokens=2, stop=[]).result()
    finally:
        elsewhere.rename(base)
    assert len(sample.tokens) == 2


def test_settings_come_as_a_dict_too_and_wrong_ones_are_refused(client):
    """A dict has no attributes: samples of the default length came, and nobody was told."""
    sampler = client.save_weights_and_get_sampling_client()
    by_dict = sampler.sample([5, 6], sampling_params={"max_tokens": 3, "stop": [], "temperature": 0.0}).result()
    assert by_dict[0].tokens == sampler.sample([5, 6], max_tokens=3, stop=[], temperature=0.0).result()[0].tokens
    assert len(by_dict[0].tokens) == 3
    stepped = client.optim_step({"learning_rate": 2e-3, "beta1": None}).result()
    assert stepped.metrics["learning_rate:mean"] == pytest.approx(2e-3)
    for call in (
        lambda: sampler.sample([5, 6], sampling_params={"top_n": 3}),
        lambda: sampler.sample([5, 6], sampling_params=3),
        lambda: client.optim_step({"lr": 1e-3}),
        lambda: client.optim_step({"learning_rate": 1e-3}, eps=1e-9),
        lambda: client.forward([{"model_input": [5], "loss_fn_inputs": {"target_tokens": [6]}, "weights": [1]}]),
    ):
        with pytest.raises(LoraFusionError):
            call()


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


@pytest.mark.parametrize(
    "loss",
    [
        lambda _, logprobs: (logprobs[0].sum().item(), {}),
        lambda _, logprobs: (float(logprobs[0].sum()), {}),
        lambda _, logprobs: (np.exp(logprobs[0]).sum(), {}),
        lambda _, logprobs: (logprobs[0].sum(), {"mean": float(logprobs[0].mean())}),
        lambda _, logprobs: ((logprobs[0] < 0).sum(), {}),
        lambda _, logprobs: (jnp.asarray(logprobs[0].sum().item()), {}),
    ],
)
def test_a_loss_that_leaves_jax_is_refused_and_would_train_nothing(loss):
    arrays = [np.full(3, -1.0, np.float32)]
    with pytest.raises(CallError, match=r"call\.loss"):
        differentiate(loss, data()[:1], arrays, returns_gradients=False)
    assert differentiate(lambda *_: (0, {}), data()[:1], arrays, returns_gradients=False)[0] == 0


def test_a_fork_and_a_pickle_of_a_client_say_so_and_never_wait(client):
    """No thread of the session runs there: calls waited forever, and so did the end of a client."""
    future, sampler = client.forward(data()), client.save_weights_and_get_sampling_client()
    for copied in (client, future, sampler):
        with pytest.raises(CallError, match=r"call\.other-process"):
            pickle.dumps(copied)
    calls = [
        lambda: client.forward(data()),
        lambda: client.optim_step(learning_rate=0.0),
        lambda: client.save_state("never"),
        lambda: client.load_state("never"),
        lambda: client.new_client(rank=2),
        lambda: sampler.sample([5, 6], max_tokens=2),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax and Python warn of every fork
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            for call in calls:
                with pytest.raises(CallError, match=r"call\.other-process"):
                    call()
            client.close()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert future.result().metrics


@pytest.mark.parametrize(
    ("adapter", "fix"),
    [
        ({"rank": 9}, "places={4: 7, 9: 1})"),
        ({"rank": 4, "targets": ["v_proj"]}, f"targets={sorted(['v_proj', *TARGETS])})"),
    ],
)
def test_what_a_client_without_a_place_is_told_would_give_it_one(opened, session, monkeypatch, adapter, fix):
    narrow = replace(session.places, targets=tuple(TARGETS))
    monkeypatch.setattr(session.free_places, "places", narrow)
    with pytest.raises(RunError, match=r"session\.place") as raised:
        opened.new_client(**adapter)
    assert raised.value.fix.endswith(fix)


def test_arguments_of_another_kind_are_named(opened, tmp_path, monkeypatch):
    with opened.new_client(rank=4) as client:
        for one in (data()[0], {"model_input": [1], "loss_fn_inputs": {}}):
            with pytest.raises(LoraFusionError, match="is one datum, not a list"):
                client.forward_backward(one)
        with pytest.raises(LoraFusionError, match="is None, not a list"):
            client.forward(None)
        with pytest.raises(LoraFusionError, match=f"there is no folder {tmp_path / 'none'}"):
            client.load_state(tmp_path / "none")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "other").mkdir()
        with pytest.raises(LoraFusionError, match="other holds no state"):
            client.load_state("other")
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


def test_calls_read_and_keep_what_earlier_calls_write(client, tmp_path):
    """Though nobody waits for them."""
    path = tmp_path / "state"
    saves = [client.save_state(path), client.save_state(path)]
    client.forward_backward(data())
    client.optim_step(learning_rate=1e-1)
    expected = logprobs(client)
    client.save_state(path, overwrite=True)
    client.forward_backward(data())
    client.optim_step(learning_rate=1e-1)
    client.load_state(path)
    chex.assert_trees_all_equal(logprobs(client), expected)
    assert saves[0].result() == path
    with pytest.raises(LoraFusionError, match=r"save\.exists"):
        saves[1].result()


def test_samples_without_a_seed_differ(client, opened, monkeypatch):
    asked = []

    class Bank:
        def __init__(self, *_):
            """Draws nothing."""

        def sample(self, number, weights, prompt, samples, params):
            asked.append([params.seed + sample for sample in range(samples)])

    monkeypatch.setattr(training, "SamplerBank", Bank)
    monkeypatch.setattr(opened._shared, "banks", {})
    for _ in range(2):
        sampler = client.save_weights_and_get_sampling_client()
        for count, settings in ((2, {}), (1, {"seed": 7}), (3, {"temperature": 0.5})):
            sampler.sample([1, 2], count, **settings).result()
    assert asked[1] == asked[4] == [7]
    drawn = [seed for seeds in asked[:1] + asked[2:4] + asked[5:] for seed in seeds]
    assert len(set(drawn)) == len(drawn) == 10


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
    with pytest.raises(lf.LoraFusionError, match="no setting 'momentum'"):
        client.optim_step(momentum=0.9)
    with pytest.raises(lf.LoraFusionError, match="of the type SimpleNamespace"):
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


def test_a_client_ends_after_its_last_result_and_sampler(opened):
    """A cell of a notebook that runs again must not hold the base of the run before."""
    others = set(opened._shared.clients)
    sampler = opened.new_client(rank=2).save_weights_and_get_sampling_client()
    samples = sampler.sample([5, 6], max_tokens=2, stop=[])
    del sampler
    gc.collect()
    assert len(samples.result()[0].tokens) == 2
    assert opened._shared.clients > others
    del samples
    gc.collect()
    ends = time.monotonic() + 60
    while opened._shared.clients != others and time.monotonic() < ends:
        time.sleep(0.01)
    assert opened._shared.clients == others
