"""A start: the base is read while stages compile side by side, and what was compiled once is not compiled again."""

from __future__ import annotations

import re
import threading

import jax
import pytest

from lorafusion_jax.api.status import run_numbers
from lorafusion_jax.config import load_config
from lorafusion_jax.models import loading
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.session import executor
from lorafusion_jax.session.compiles import CompileCounter
from lorafusion_jax.training import train

PATIENCE_S = 300


@pytest.fixture
def config(write_job, write_rows):
    adapters = [
        {
            "name": "law",
            "data": {"train": write_rows("law", 4, longest=8), "eval": write_rows("held", 2, longest=8)},
            "batch": {"global_samples": 2},
        }
    ]
    return load_config(write_job(adapters, mesh={"stages": 2}, lora={"rank": 4, "targets": ["q_proj"]}))


def numbers_of(run):
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] in ("step", "eval")]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def test_stages_compile_side_by_side_while_the_base_is_read(config, tmp_path, monkeypatch):
    """The last tensor arrives once both stages are compiling, and neither goes on before the other has begun."""
    both, compiling, in_time, seen = threading.Barrier(2), threading.Event(), [], []
    time_passes, read_tensor = executor.time_passes, loading._read_tensor

    def together(stage, batch, before_backward):
        both.wait(PATIENCE_S)
        seen.append(run_numbers(tmp_path / "run"))
        compiling.set()
        return time_passes(stage, batch, before_backward)

    def late(tensor, *arguments):
        if tensor.leaf_name == "norm.weight":
            in_time.append(compiling.wait(PATIENCE_S))
        return read_tensor(tensor, *arguments)

    jax.clear_caches()  # what an earlier test has compiled is not on the disk where that test kept nothing
    with monkeypatch.context() as patch:
        patch.setattr(executor, "time_passes", together)
        patch.setattr(loading, "_read_tensor", late)
        train(config, tmp_path / "run")
    assert in_time == [True]
    for numbers in seen:  # status while it compiles
        assert (numbers["state"], numbers["alive"], numbers["slots"]) == ("starting", True, 0)
        assert re.match(r"loading |compiling [1-4] of 4: ", numbers["phase"])  # it may be told a moment later
    assert run_numbers(tmp_path / "run")["phase"] is None
    assert not (tmp_path / "run" / "start.json").exists()
    (started,) = [row for row in read_rows(tmp_path / "run" / "events.jsonl") if row["kind"] == "started-up"]
    parts = started["parts"]
    assert set(parts) == {"base", *(f"{what}stage {stage}" for what in ("", "evaluation of ") for stage in (0, 1))}
    assert max(parts["stage 0"][0], parts["stage 1"][0]) < min(parts["stage 0"][1], parts["stage 1"][1])
    assert parts["base"][0] < parts["stage 0"][0] < parts["base"][1]
    assert all(0 <= begin <= end <= started["seconds"] for begin, end in parts.values())
    assert min(started["lowering_s"], started["compiling_s"]) > 0

    jax.clear_caches()
    with CompileCounter() as programs:
        train(config, tmp_path / "again")
    assert (programs.compiled, programs.from_cache > 0) == (0, True), "a second start compiles nothing"
    (again,) = [row for row in read_rows(tmp_path / "again" / "events.jsonl") if row["kind"] == "started-up"]
    assert again["compiled"] == 0
    assert 0 < again["from_cache"] <= programs.from_cache
    assert numbers_of(tmp_path / "again") == numbers_of(tmp_path / "run")


def test_a_base_that_cannot_be_read_leaves_no_folder(config, tmp_path, monkeypatch):
    def broken(tensor, *arguments):
        raise OSError("Input/output error")

    for name in ("time_passes", "compile_steps", "try_evaluation"):  # what compiles beside it is tested above
        monkeypatch.setattr(executor, name, lambda *arguments: None)
    monkeypatch.setattr(loading, "_read_tensor", broken)
    with pytest.raises(OSError, match="Input/output error"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
