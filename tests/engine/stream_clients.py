"""Training clients of a session's streams, their rows, and what tests of them compare."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest

import lorafusion_jax as lf
from lorafusion_jax.errors import CallError
from lorafusion_jax.session import AdapterState, WindowPlanner
from lorafusion_jax.session.calls import ForwardBackward, OptimStep, Row, SaveState

CAPACITY = 128

TARGETS = ["q_proj", "down_proj"]


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


TOKENS = [np.random.default_rng(0).integers(0, 50, length) for length in (30, 12, 7)]


def data(**inputs) -> list[lf.Datum]:
    def datum(tokens):
        sizes = {name: value(len(tokens) - 1) for name, value in inputs.items()}
        return lf.Datum(model_input=tokens[:-1], loss_fn_inputs={"target_tokens": tokens[1:], **sizes})

    return [datum(tokens) for tokens in TOKENS]


def logprobs(client) -> list[np.ndarray]:
    return [output["logprobs"] for output in client.forward(data()).result().loss_fn_outputs]
