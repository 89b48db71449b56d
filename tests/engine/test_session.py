"""Live sessions: adapters start, stop and move between places while others train."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from live_sessions import WINDOWS, assert_same, open_session, run, run_window, start
from more_cases import mostly_nightly
from small_jobs import exported, write_job, write_rows

from lorafusion_jax.config import load_config
from lorafusion_jax.config.data_sources import read_sources
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.config.schema import ObjectiveSettings
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.peft.folder import peft_tensors
from lorafusion_jax.peft.leaves import take_adapter
from lorafusion_jax.session import AdapterState, Places, Task
from lorafusion_jax.session.compiles import CompileCounter
from lorafusion_jax.training import train

pytestmark = pytest.mark.usefixtures("quick_compiles")

TARGETS = ["q_proj", "down_proj"]
ADAPTERS = {
    "tort": {"lora": {"rank": 3, "alpha": 8, "dropout": 0.1, "targets": ["down_proj"]}, "seed": 1},
    "lung": {
        "lora": {"rank": 5, "rslora": True, "dropout": 0.3, "targets": TARGETS},
        "optim": {"lr": 3e-3, "weight_decay": 0.1},
        "batch": {"global_samples": 5},
        "seed": 2,
        "epochs": 2,
    },
    "news": {"lora": {"rank": 3, "dropout": 0.0}, "optim": {"lr": 1e-2, "schedule": "linear"}, "seed": 3},
    "sick": {"lora": {"rank": 3}, "optim": {"name": "sgd", "lr": 1e30, "clip": 0}},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_base):
    folder = tmp_path_factory.mktemp("jobs")
    entries = [
        {"name": name, "data": {"train": write_rows(folder, name, 14)}, "batch": {"global_samples": 3}} | settings
        for name, settings in ADAPTERS.items()
    ]
    entries[1]["data"]["eval"] = entries[0]["data"]["train"]
    return load_config(write_job(folder, tiny_base, entries))


@pytest.fixture(scope="module")
def session(config):
    opened = open_session(config, {6: 1, 3: 2}, TARGETS, reproducible=True)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def task(config):
    def made(name: str) -> Task:
        selected = select_adapters(config, [name])
        return Task.of(selected, prepare(selected))

    return made


@pytest.fixture(scope="module")
def alone(session, task):
    """Each adapter trained alone in the session."""
    states = {}
    for name in ("tort", "lung", "news"):
        start(session, task(name))
        states |= run(session)
    return states


def test_company_places_and_moves_change_no_bit(session, task, alone, tmp_path):
    """Adapters arrive in turn; one leaves in the middle of a batch, waits on the disk and continues elsewhere."""
    moving = task("tort")
    first = start(session, moving)
    run(session, 2)
    start(session, task("lung"))
    run(session, 1)
    while not moving.cursor.done and moving.status == "running":
        run(session, 1)
    saved = session.stop("tort").write(tmp_path / "state")
    session.start(first, task("news"))
    run(session, 2)
    again = task("tort")
    assert start(session, again, AdapterState.read(saved, again.adapter)) != first
    ended = run(session)
    assert ended.keys() == alone.keys()
    for name, state in ended.items():
        assert_same(state, alone[name])


def test_a_begun_batch_moves_with_its_sums(session, task, alone, tmp_path):
    """Its samples do not run again: what they have summed up is in the state."""
    moving = task("tort")
    first = start(session, moving)
    while not moving.cursor.done:
        run(session, 1)
    saved = session.read("tort", sums=True)()
    assert any(leaf.any() for leaf in saved.sums.values())
    session.forget("tort")
    start(session, task("news"))
    again = task("tort")
    state = AdapterState.read(saved.write(tmp_path / "state"), again.adapter)
    other_place = session.find_place(again.spec)
    assert other_place not in (None, first)
    session.start(other_place, again, state, sums=True)
    again.cursor = moving.cursor
    for name, last in run(session).items():
        assert_same(last, alone[name])


def test_a_pause_changes_no_bit_and_other_ends_are_those_that_are_asked_for(session, task, alone):
    """`tort` is paused in the middle of a batch, `news` is cancelled, and `lung` ends with the batch it has begun."""
    moving, news, lung = (task(name) for name in ("tort", "news", "lung"))
    for joining in (moving, news):
        start(session, joining)
    while not moving.cursor.done:
        run(session, 1)
    session.pause("tort")
    at = moving.step
    run(session, 2)
    session.drain()
    assert moving.step == at
    assert news.step > 0
    session.cancel("news", "by request")
    assert (news.status, news.reason) == ("cancelled", "by request")
    session.forget("news")
    with pytest.raises(LoraFusionError, match=r"session\.status.*tort is paused"):
        session.pause("tort")
    session.resume("tort")
    start(session, lung)
    while not lung.cursor.done:
        run_window(session, 1)
    last = session.finish("lung", "enough")
    ended = run(session)
    assert_same(ended["tort"], alone["tort"])
    assert (ended["lung"].step, lung.status, lung.reason) == (last, "done", "enough")
    assert 0 < last < alone["lung"].step


@pytest.mark.nightly
def test_slots_take_the_smallest_capacity_that_holds_them(config, task, alone):
    """Padding is all that differs: equal to rounding, as in CONTRIBUTING.md."""
    sizes = config.batch.model_copy(update={"capacity_tokens": (config.batch.largest // 2, config.batch.largest)})
    session = open_session(config.model_copy(update={"batch": sizes}), {3: 1}, TARGETS)
    try:
        start(session, task("news"))
        windows, capacities = WINDOWS[session], set()
        with CompileCounter() as programs:
            while session.tasks["news"].status == "running":
                window = windows.plan(4)
                capacities |= {slot.capacity_tokens for slot in window.slots}
                windows.run(window)
                session.drain()
        state = session.stop("news")
    finally:
        session.close()
    assert capacities == set(sizes.sizes)
    assert programs.compiled == 0
    for name, leaf in state.weights.items():
        np.testing.assert_allclose(leaf, alone["news"].weights[name], rtol=1e-5, atol=1e-5 * np.abs(leaf).max())


def test_adapters_swap_their_places(session, task, alone):
    pair = task("tort"), task("news")
    places = [start(session, joining) for joining in pair]
    run(session, 3)
    states = [session.stop(joining.name) for joining in pair]
    for joining, new_place, state in zip(pair, reversed(places), states, strict=True):
        session.start(new_place, joining, state)
    for name, state in run(session).items():
        assert_same(state, alone[name])


def test_starting_and_stopping_compiles_nothing(session, task, alone):
    with CompileCounter() as programs:
        start(session, task("news"))
        start(session, task("tort"))
        run(session, 3)
        state = session.stop("tort")
        start(session, task("lung"))
        start(session, task("tort"), state)
        run(session)
    assert programs.compiled + programs.from_cache == 0


@pytest.mark.parametrize("has_room", [True, False])
def test_a_state_is_read_while_all_train(session, task, alone, monkeypatch, has_room):
    """Slots run between the beginning and the end of a read. The state is that of a step: it continues as if alone."""
    monkeypatch.setattr(session, "_copies_states", has_room)
    reading = task("tort")
    start(session, reading)
    start(session, task("news"))
    reads, issued = [], []

    def pause() -> bool:
        if session.steps.num_waiting("tort") and not reads:
            reads.append(session.read("tort"))
        elif reads:
            issued.append(reading.step)
        return False

    while len(issued) < 3:
        run_window(session, 8, pause=pause)
    session.drain()
    state = reads[0]()
    assert 0 < state.step < reading.step
    ended = run(session)
    start(session, task("tort"), state)
    for name, last in (ended | run(session)).items():
        assert_same(last, alone[name])


@pytest.mark.parametrize("has_room", [True, False])
def test_an_adapter_leaves_while_others_train(session, task, alone, monkeypatch, has_room):
    """It leaves in the middle of a batch. What is read is its state after its last step, and others do not wait."""
    monkeypatch.setattr(session, "_copies_states", has_room)
    leaving = task("tort")
    place = start(session, leaving)
    start(session, task("lung"))
    with CompileCounter() as programs:
        run_window(session, 8, pause=lambda: bool(session.steps.num_waiting("tort")))
        step = session.end_training("tort")
        assert step > leaving.step
        read = session.read("tort")
        assert run_window(session, 2) == 2
        state = read()
        session.drain()
        assert leaving.step == state.step == step
        session.forget("tort")
        session.start(place, task("news"))
        ended = run(session)
        start(session, task("tort"), state)
        ended |= run(session)
    for name, last in ended.items():
        assert_same(last, alone[name])
    assert programs.compiled + programs.from_cache == 0


@pytest.mark.parametrize("name", mostly_nightly(["tort", "lung"], ["tort"]))
def test_an_adapter_equals_one_of_a_run(config, alone, task, tmp_path, name):
    """As in joint and separate training: the programs differ in their shapes, so sums may have another order."""
    selected = select_adapters(config, [name])
    assert train(selected, tmp_path / "run").exit_code == 0
    leaves = {leaf: array[:, None] for leaf, array in alone[name].weights.items()}
    ours = peft_tensors(take_adapter(leaves, task(name).spec, 0))
    for key, theirs in exported(tmp_path / "run", name).items():
        assert np.linalg.norm(ours[key] - theirs) <= 1e-5 * np.linalg.norm(theirs), key


def test_a_failing_adapter_leaves_the_others_alone(session, task, alone):
    events: list = []
    start(session, task("sick"))
    start(session, task("tort"))
    ended = run(session, on_event=events.append, may_fail=True)
    failed = [event for event in events if event.kind == "adapter-failed"]
    assert [event.adapter for event in failed] == ["sick"]
    assert ended["sick"].step == failed[0].kept_step
    assert all(np.isfinite(leaf).all() for leaf in ended["sick"].weights.values())
    assert_same(ended["tort"], alone["tort"])


def test_a_window_can_be_interrupted(session, task, alone):
    asked: list[bool] = []
    start(session, task("lung"))
    ran = run_window(session, 6, pause=lambda: asked.append(True) or len(asked) == 2)
    assert ran == 2
    assert_same(run(session)["lung"], alone["lung"])


def test_a_state_of_the_last_step_is_done_at_once(session, task, alone):
    """A full disk may keep a state and not the adapter: who starts from it has nothing to train."""
    start(session, task("news"), alone["news"])
    assert session.tasks["news"].status == "done"
    assert not WINDOWS[session].plan(4).slots
    assert_same(session.stop("news"), alone["news"])


def test_an_idle_session_waits(session):
    assert session.tasks == {}
    window = WINDOWS[session].plan(8)
    assert window.slots == ()
    assert WINDOWS[session].run(window) == 0
    assert not session.index  # all places are free


def test_evaluation_depends_on_the_adapter_only(session, task, alone):
    start(session, task("lung"), alone["lung"])
    losses = [session.evaluate("lung")]
    start(session, task("tort"))
    run_window(session, 2)
    losses.append(session.evaluate("lung"))
    for name in list(session.tasks):
        session.forget(name)
    assert losses[0] is not None
    assert losses[0] == losses[1]
    assert not session.index  # all places are free


def test_what_does_not_fit_is_refused(session, task, config, alone, tmp_path):
    lung, tort = task("lung"), task("tort")
    with pytest.raises(LoraFusionError, match="rank 5 is above 3"):
        session.start(0, lung)
    with pytest.raises(LoraFusionError, match=r"state\.data"):
        session.start(0, tort, alone["lung"])
    session.start(0, tort)
    with pytest.raises(LoraFusionError, match="it is taken"):
        session.start(0, task("news"))
    session.forget("tort")
    folder = alone["tort"].write(tmp_path / "state")
    other = tort.adapter.model_copy(update={"optim": tort.adapter.optim.model_copy(update={"name": "lion"})})
    with pytest.raises(LoraFusionError, match=r"state\.mismatch"):
        AdapterState.read(folder, other)
    (folder / "state.json").write_text("{}")
    with pytest.raises(LoraFusionError, match=r"state\.damaged"):
        AdapterState.read(folder, tort.adapter)
    assert Places.of({4: 1}).refuses(lung.spec) == "rank 5 is above the largest place, 4"
    assert Places.of({8: 1}, dropout=False).refuses(lung.spec) == "the session was opened without dropout"
    with pytest.raises(LoraFusionError, match=r"places\.classes"):
        Places.of({})
    balanced = task("news")
    train_settings = balanced.config.train.model_copy(update={"router_aux": 0.001})
    balanced.config = balanced.config.model_copy(update={"train": train_settings})
    with pytest.raises(LoraFusionError, match=r"session\.router-aux"):
        session.start(session.find_place(balanced.spec), balanced)


@pytest.mark.nightly
def test_stages_and_replicas_give_the_same_adapter(config, task, alone):
    """On another mesh: equal to rounding, as in CONTRIBUTING.md."""
    mesh = config.mesh.model_copy(update={"stages": 2, "data": 2})
    wide = open_session(config.model_copy(update={"mesh": mesh}), {5: 2})
    try:
        reading, reads = task("tort"), []
        start(wide, reading)
        run(wide, 2)
        start(wide, task("lung"))
        while not reads:
            run_window(wide, 4, pause=lambda: bool(wide.steps.num_waiting("tort")))
            reads = [wide.read("tort")] if wide.steps.num_waiting("tort") else []
        ended = run(wide, 4)
        state = reads[0]()
        ended |= run(wide)
        start(wide, task("tort"), state)
        for name, state in [*ended.items(), *run(wide).items()]:
            assert state.step == alone[name].step
            for leaf, array in alone[name].weights.items():
                assert np.linalg.norm(state.weights[leaf] - array) <= 1e-5 * np.linalg.norm(array), leaf
    finally:
        wide.close()


def test_folder_of_a_state_is_written_whole(alone, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr("lorafusion_jax.session.adapter_state.write_tensors", full)
    with pytest.raises(LoraFusionError, match=r"save\.no-space"):
        alone["tort"].write(tmp_path / "state")
    assert list(Path(tmp_path).iterdir()) == []


def test_learning_another_objective_changes_no_bit(session, config, task, alone, tmp_path):
    """Two objectives more, one of them per token; before and after, preferences end with the same bits."""
    words = [{"prompt": f"w {n}", "chosen": " yes" * (1 + n % 3), "rejected": " no"} for n in range(7)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in words))
    drawn = [{"prompt": "w", "completion": f" no {n}", "advantage": n - 3.0} for n in range(7)]
    (tmp_path / "drawn.jsonl").write_text("".join(json.dumps(row) + "\n" for row in drawn))

    def made(name: str, objective: str, rows: str) -> Task:
        adapter = config.adapter("news").model_copy(
            update={
                "name": name,
                "data": config.adapter("news").data.model_copy(update={"train": read_sources(str(tmp_path / rows))}),
                "objective": ObjectiveSettings(name=objective),
            }
        )
        own_config = config.model_copy(update={"adapters": (adapter,)})
        return Task.of(own_config, prepare(own_config))

    start(session, made("pairs", "dpo", "pairs.jsonl"))
    before = run(session)["pairs"]
    start(session, made("drawn", "grpo", "drawn.jsonl"))
    start(session, task("tort"))
    start(session, made("pairs", "dpo", "pairs.jsonl"))
    ended = run(session)
    assert_same(ended["tort"], alone["tort"])
    assert_same(ended["pairs"], before)
