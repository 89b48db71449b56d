"""Adapters of other kinds and objectives in a live session: each ends as it does alone, and disturbs no other."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from live_sessions import open_session, run, run_window, start
from more_cases import nightly
from safetensors.numpy import load_file
from small_jobs import WORDS, exported, write_job

from lorafusion_jax.adapters.kind import Head
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config import load_config
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.objective.reward import REWARD
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.session import AdapterState, Places, Task
from lorafusion_jax.session.compiles import CompileCounter
from lorafusion_jax.session.export import export_task
from lorafusion_jax.training import train

pytestmark = pytest.mark.usefixtures("quick_compiles")

# A gradient that is a difference of two texts has more rounding: eps is above it, see `write_config`.
DIFFERENCE = {"lr": 5e-3, "schedule": "constant", "warmup": 0, "eps": 1e-2}
TARGETS = ["down_proj"]  # each place compiles kernels for all of its leaves
ADAPTERS = {
    "plain": {"lora": {"rank": 4, "dropout": 0.1}, "data": {"train": "texts.jsonl"}},
    "prefers": {
        "lora": {"rank": 3, "dropout": 0.1},
        "objective": {"name": "dpo", "beta": 0.3, "sft": 0.1},
        "optim": DIFFERENCE,
    },
    "judged": {"lora": {"kind": "dora", "rank": 3}, "objective": {"name": "kto", "group": 2}},
    "scores": {
        "lora": {"rank": 2},
        "objective": {"name": "reward", "center": 0.02},
        "optim": DIFFERENCE,
    },
    "folded": {"lora": {"kind": "vera", "rank": 5, "dropout": 0.0}, "objective": {"name": "orpo"}},
}
SAMPLED = {"lora": {"rank": 3, "dropout": 0.0}, "objective": {"name": "grpo"}}
DATA = dict.fromkeys(("reward", "dpo", "orpo"), "pairs.jsonl") | {"kto": "labelled.jsonl", "grpo": "sampled.jsonl"}
COUNT = 10


def write_data(folder: Path) -> None:
    draw = random.Random(11)

    def text() -> str:
        return " " + " ".join(draw.choices(WORDS, k=draw.randint(1, 7)))

    pairs = [{"prompt": text(), "chosen": text(), "rejected": text() + " bad"} for _ in range(COUNT)]
    labelled = [{"prompt": text(), "completion": text(), "label": number % 3 > 0} for number in range(COUNT)]
    texts = [{"prompt": text(), "completion": text()} for _ in range(2 * COUNT)]
    sampled = [row | {"advantage": draw.gauss(0, 1)} for row in texts[:COUNT]]
    of_sampler = [row | {"old_logprobs": -2.5} for row in sampled]
    files = {"pairs": pairs, "labelled": labelled, "texts": texts, "sampled": sampled, "of_sampler": of_sampler}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("jobs")
    write_data(made)
    return made


@pytest.fixture(scope="module")
def write_config(folder, tiny_base):
    """write_config(entries) → the job of some adapters."""

    def write(entries: list[dict]):
        # eps: of a tiny gradient, Adam makes a whole step in the direction of its rounding, which processors differ in
        optim = {"lr": 5e-3, "schedule": "constant", "warmup": 0, "eps": 1e-4}
        sections = {"optim": optim, "batch": {"capacity_tokens": 256}, "lora": {"targets": TARGETS}}
        return load_config(write_job(folder, tiny_base, entries, **sections))

    return write


@pytest.fixture(scope="module")
def configure(write_config):
    """configure(name, **changes) → the job of one adapter."""
    return lambda name, **changes: write_config([entry_of(name, **changes)])


def entry_of(name: str, **changes) -> dict:
    """An adapter of a job file."""
    entry = {"name": name, "batch": {"global_samples": 3}} | ADAPTERS[name] | changes
    return {"data": {"train": DATA[entry["objective"]["name"]]}} | entry if "data" not in entry else entry


def evaluated(name: str) -> dict:
    """Data of an adapter that is evaluated on what it trains on."""
    rows = DATA[ADAPTERS[name]["objective"]["name"]]
    return {"train": rows, "eval": rows}


@pytest.fixture(scope="module")
def session(configure):
    """Its places have the targets of these adapters only; those of test_session.py have all, as users' have."""
    opened = open_session(configure("plain"), {4: 3, "dora:4": 1, "vera:6": 1}, TARGETS)
    yield opened
    opened.close()


def task_of(config, references=None) -> Task:
    (adapter,) = config.adapters
    own_config = select_adapters(config, [adapter.name])
    return Task.of(own_config, prepare(own_config), references)


@pytest.fixture(scope="module")
def alone(session, configure) -> dict[str, AdapterState]:
    """The session trains with one objective before it learns the others, whose losses then compile once."""
    first, *others = ADAPTERS
    start(session, task_of(configure(first)))
    states = run(session)
    for name in others:
        start(session, task_of(configure(name)))
        session.stop(name)
    for name in others:
        start(session, task_of(configure(name)))
        states |= run(session)
    return states


def assert_same(state: AdapterState, other: AdapterState) -> None:
    """Equal to rounding: company changes where an adapter begins in a microbatch, and so the order of sums."""
    assert state.step == other.step
    assert state.weights.keys() == other.weights.keys()
    for name, leaf in other.weights.items():
        assert np.linalg.norm(state.weights[name] - leaf) <= 1e-5 * np.linalg.norm(leaf), name


def assert_equals_run(task: Task, state: AdapterState, trained: Path, folder: Path) -> None:
    """Compares exported files; sums may have another order, because programs differ in their shapes."""
    ours = load_file(export_task(task, state, folder / "session") / "adapter_model.safetensors")
    theirs = exported(trained, task.name)
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        assert np.linalg.norm(ours[key] - array) <= 1e-5 * np.linalg.norm(array), key


def test_kinds_and_objectives_train_together_as_alone(session, configure, alone):
    """References are computed while `plain` trains: it takes steps before the others have theirs."""
    events: list = []
    plain, *others = (task_of(configure(name)) for name in ADAPTERS)
    start(session, plain)
    run(session, 1, events.append)
    for task in others:
        start(session, task)
    assert [task.status for task in others] == ["preparing", "preparing", "running", "running"]
    run(session, 1, events.append)
    assert others[1].status == "preparing"
    ended = run(session, on_event=events.append)
    assert ended.keys() == alone.keys()
    for name, state in ended.items():
        assert_same(state, alone[name])
    steps = [event for event in events if event.kind == "step"]
    first = next(number for number, event in enumerate(steps) if event.adapter == "prefers")
    assert any(event.adapter == "plain" for event in steps[:first])
    assert {"rewards/accuracies", "logps/chosen"} <= steps[first].metrics.keys()
    assert {event.adapter for event in steps if event.metrics} == {"prefers", "judged", "scores", "folded"}


def test_known_kinds_and_objectives_compile_nothing(session, configure, alone):
    with CompileCounter() as programs:
        for name in ADAPTERS:
            start(session, task_of(configure(name)))
        run(session)
    assert programs.compiled + programs.from_cache == 0


def test_one_that_prepares_can_leave_and_come_back(session, configure, alone):
    task = task_of(configure("prefers"))
    start(session, task)
    state = session.stop("prefers")
    assert (state.step, task.references) == (0, None)
    moved = task_of(configure("prefers"))
    start(session, moved)
    run(session, 4)
    references = moved.references
    assert moved.step
    assert references is not None
    state = session.stop("prefers")
    start(session, task_of(configure("plain")))
    again = task_of(configure("prefers"), references)
    start(session, again, state)
    assert again.status == "running"
    assert_same(run(session)["prefers"], alone["prefers"])


def test_shared_matrices_of_a_folder_have_the_sizes_of_its_targets(alone, configure, tmp_path):
    """PEFT takes no others. A session holds them at the largest sizes of the model."""
    folder = export_task(task_of(configure("folded")), alone["folded"], tmp_path / "folder")
    shapes = {key: array.shape for key, array in load_file(folder / "adapter_model.safetensors").items()}
    assert (shapes["base_model.vera_A"], shapes["base_model.vera_B"]) == ((5, 48), (32, 5))


# test_a_reference_may_be_another_adapter compares `prefers` to a run
@pytest.mark.parametrize("name", [nightly("prefers"), "judged", nightly("scores"), nightly("folded")])
def test_each_equals_one_of_a_run(session, configure, alone, tmp_path, name):
    config, trained = configure(name, data=evaluated(name)), tmp_path / "run"
    assert train(config, trained).exit_code == 0
    task = task_of(config)
    assert_equals_run(task, alone[name], trained, tmp_path)
    rows = read_rows(trained / "metrics.jsonl")
    last = [row for row in rows if row["kind"] == "eval" and row["adapter"] == name][-1]
    place_index = start(session, task)
    while task.status == "preparing":
        run_window(session, 1)
    session.forget(name)
    again = task_of(config, task.references)
    session.start(place_index, again, alone[name])
    evaluation = session.evaluate(name)
    session.forget(name)
    assert evaluation is not None
    wanted = {key.removeprefix("eval_"): value for key, value in last.items() if key.startswith("eval_")}
    for key, value in {"loss": evaluation.loss, **evaluation.metrics}.items():
        assert value == pytest.approx(wanted[key], rel=1e-4, abs=1e-5), key


def test_a_reference_may_be_another_adapter(session, configure, alone, tmp_path):
    """A folder of another rank is in the place while its log-probabilities are computed."""
    reference = export_task(task_of(configure("plain")), alone["plain"], tmp_path / "other")
    config = configure("prefers", objective={"name": "dpo", "beta": 0.3, "reference": str(reference)})
    trained = tmp_path / "run"
    assert train(config, trained).exit_code == 0
    task = task_of(config)
    start(session, task)
    start(session, task_of(configure("folded")))
    ended = run(session)
    assert_same(ended["folded"], alone["folded"])
    assert_equals_run(task, ended["prefers"], trained, tmp_path)


def test_what_no_place_holds_is_refused(session, configure):
    wide = task_of(configure("judged", lora={"kind": "dora", "rank": 5}))
    assert session.find_place(wide.spec) is None
    assert session.places.refuses(wide.spec) == "rank 5 is above the largest place, 4"
    other = task_of(configure("plain", lora={"kind": "lora-fa", "rank": 2, "dropout": 0.0}))
    assert "no place for kind lora-fa" in session.places.refuses(other.spec)
    data = {"train": "labelled.jsonl", "max_length": 24}
    many = task_of(configure("judged", data=data, objective={"name": "kto", "group": 4}))
    with pytest.raises(LoraFusionError, match=r"session\.segments"):
        session.start(session.find_place(many.spec) or 0, many)
    assert session.tasks == {}
    assert not session.index  # all places are free


def test_a_head_of_another_size_is_refused():
    """Places have the heads of all objectives with their default options."""
    leaf = replace(REWARD.head[0], axes=("D", 3))
    wide = AdapterSpec(name="wide", rank=2, alpha=4, head=Head(name="reward", leaves=(leaf,), task="SEQ_CLS"))
    assert "head" in Places.of({4: 1}).refuses(wide)
    usual = replace(wide, head=Head(name="reward", leaves=REWARD.head, task="SEQ_CLS"))
    assert Places.of({4: 1}).refuses(usual) == ""


@pytest.mark.nightly
def test_columns_of_one_adapter_do_not_reach_another(session, configure, monkeypatch):
    """Of two with an objective, one says how likely its tokens were; the other's ratio stays 1."""
    monkeypatch.setitem(ADAPTERS, "sampled", SAMPLED)
    monkeypatch.setitem(ADAPTERS, "off", SAMPLED | {"data": {"train": "of_sampler.jsonl"}})
    tasks = {name: task_of(configure(name)) for name in ("sampled", "off")}
    start(session, tasks["sampled"])
    alone = run(session)["sampled"]
    ratios: dict[str, list[float]] = {name: [] for name in tasks}

    def listen(event) -> None:
        if event.kind == "step":
            ratios[event.adapter].append(event.metrics["ratio"])

    for task in tasks.values():
        start(session, task_of(configure(task.name)))
    states = run(session, on_event=listen)
    assert_same(states["sampled"], alone)
    assert ratios["sampled"] == pytest.approx([1.0] * len(ratios["sampled"]), abs=1e-5)
    assert abs(ratios["off"][0] - 1) > 0.1
