"""This machine's tuning table: what uses it, what refuses it, and how it is passed on."""

from __future__ import annotations

import getpass
import json

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lorafusion_jax.cli.job_calls import calls_of_job, defaults, typical_calls
from lorafusion_jax.config import load_config
from lorafusion_jax.errors import RunError
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.planning.memory import kernels_run, memory_problem
from lorafusion_jax.report.record import other_table
from lorafusion_jax.session import base
from lorafusion_jax.tuning_table import table_folder, table_path, use_tables
from pallas_kernels import config_store
from pallas_kernels.measured import OpRow
from pallas_kernels.policy import attention_call
from pallas_kernels.tuning import store

KIND = "NVIDIA L40S"
L40S = AbstractDevice(device_kind=KIND, num_cores=142, platform="gpu")
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """A machine without tables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    for device in (KIND, "cpu"):
        config_store.forget(device)


def rows_of(calls, **median_us):
    return tuple(
        OpRow(call=shape.op_call, default="xla", median_us=median_us, failed={}, jax=jax.__version__)
        for shape in calls.linears.values()
    )


def table_of(device="cpu", rows=()):
    conditions = {"jax": "0.12.0", "date": "2026-11-23"}
    return store.Table(device=device, conditions=conditions, ops=rows or rows_of(typical_calls(), xla=9.0, mine=3.0))


def on_l40s(function, *arguments):
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=L40S)):
        return function(*arguments)


def test_a_table_travels_from_machine_to_machine(lorafusion, tmp_path, monkeypatch):
    shared, table = tmp_path / "mine.json", table_of()
    nothing = lorafusion("tune", "--share", shared)
    assert (nothing.code, nothing.errors) == (2, ["tune.nothing-measured"])
    store.save(table, table_path("cpu"))
    outcome = lorafusion("tune", "--share", shared, "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out) == {"table": str(shared), "device": "cpu", "tile sizes": 0, "calls": 4}
    assert store.load(shared) == table
    text = shared.read_text()
    assert all(word not in text for word in (str(tmp_path), getpass.getuser(), str(table_folder())))

    kept = lorafusion("tune", "--use", shared)
    assert (kept.code, kept.errors) == (2, ["tune.table-exists"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    outcome = lorafusion("tune", "--use", shared)
    assert outcome.code == 0, outcome.err
    assert outcome.last_line == "next: lorafusion doctor"
    assert store.load(table_path("cpu")) == table
    prepare_machine()
    assert config_store.used_digest("cpu") == table.digest


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("none.json", None, "tune.no-table"),
        ("a100.json", store.text_of(table_of("NVIDIA A100")), "tune.other-device"),
        ("cut.json", store.text_of(table_of())[:400], "tune.old-table"),
        ("edited.json", store.text_of(table_of()).replace("9.0", "1.0"), "tune.old-table"),
        ("not.json", "\x00", "tune.old-table"),
    ],
)
def test_what_is_no_table_of_this_device_is_refused(lorafusion, tmp_path, name, content, code):
    if content is not None:
        (tmp_path / name).write_text(content)
    outcome = lorafusion("tune", "--use", tmp_path / name)
    assert (outcome.code, outcome.errors) == (2, [code])
    assert name in outcome.err
    assert not table_path("cpu").exists()


@pytest.mark.parametrize(
    "options", [("--share", "a", "--use", "b"), ("jobs.yaml", "--share", "a"), ("--use", "b", "--out", "c")]
)
def test_passing_on_and_measuring_are_two_commands(lorafusion, options):
    outcome = lorafusion("tune", *options)
    assert (outcome.code, outcome.errors) == (2, ["tune.one-thing"])


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda path: path.write_text(path.read_text()[:-10]), "tune.old-table"),
        (lambda path: path.rename(path.with_name("nvidia_h200.json")), "tune.other-device"),
    ],
)
def test_a_broken_table_of_this_machine_stops_a_command_before_it_computes(lorafusion, job, spoil, code):
    store.save(table_of(), table_path("cpu"))
    spoil(table_path("cpu"))
    out = job.folder / "run"
    outcome = lorafusion("train", job.path, "--out", out)
    assert (outcome.code, outcome.errors) == (2, [code])
    assert f"fix: rm {table_folder()}" in outcome.err
    assert not out.exists()
    told = json.loads(lorafusion("doctor", "--json").out)["defaults"]
    assert list(told) == ["tuning table"]
    assert code in told["tuning table"]
    assert config_store.used_digest("cpu") == ""


def test_doctor_says_where_each_default_comes_from():
    calls, measure = typical_calls(), "lorafusion tune jobs.yaml"
    before = on_l40s(defaults, calls, None, measure)
    assert before["linear o"] == f"xla: not measured on this device, so the fallback; to measure: {measure}"
    assert before["tuning table"] == f"none of this machine: {table_path(KIND)}"
    faster = rows_of(calls, xla=150.0, pallas_triton=100.0)
    slow = OpRow(
        call=attention_call(**calls.attention), default="xla", median_us={"xla": 5.0, "cudnn": 4.0}, failed={}, jax="0"
    )
    store.save(table_of(KIND, (*faster, slow)), table_path(KIND))
    use_tables()
    lines = on_l40s(defaults, calls, None, measure)
    assert lines["tuning table"] == f"{table_path(KIND)}: 5 calls, 0 tile sizes, 2026-11-23, jax 0.12.0"
    when = f"({table_path(KIND)}, 2026-11-23, jax 0.12.0)"
    assert lines["linear gate and up"] == f"pallas_triton: measured, 1.50 × as fast as xla {when}"
    assert lines["attention"].startswith("xla: the measured cudnn does not serve this call; not measured")
    assert lines["norm"] == before["norm"]


def test_doctor_of_a_job_looks_at_its_calls_and_its_wishes(lorafusion, job):
    told = json.loads(lorafusion("doctor", job.path, "train.attention=xla", "--json").out)["defaults"]
    assert told["attention"] == "xla: the job asks for it"
    assert told["linear o"] == "xla: no adapter trains it"
    assert told["linear q, k and v"] == "xla: kernels are interpreted here"
    told = json.loads(lorafusion("doctor", job.path, "train.implementation=pallas_mosaic_gpu", "--json").out)[
        "defaults"
    ]
    assert told["linear q, k and v"].startswith("refused: implementation='pallas_mosaic_gpu' cannot serve this call")


@pytest.mark.parametrize(("other", "expected"), [(128, "pallas_mosaic_gpu"), (16, "xla")])
def test_doctor_knows_the_ranks_that_the_trainer_knows(job, other, expected):
    """Equal ranks are known when programs are compiled, different ones are their inputs: another form of a call."""
    for adapter, rank in zip(job.values["adapters"], (128, other), strict=True):
        adapter["lora"] = {"rank": rank, "dropout": 0.0, "targets": ["o_proj"]}
    job.values["batch"] = {"capacity_tokens": 2048, "tile_tokens": 128}
    model = ModelConfig(
        family="llama", vocab_size=64, hidden_size=5120, intermediate_size=256, num_layers=1, num_heads=40,
        num_kv_heads=40, head_dim=128,
    )  # fmt: skip
    (calls,) = calls_of_job(load_config(job.write(), ["base.dtype=bfloat16"]), model)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        assert defaults(calls, None, "lorafusion tune")["linear o"].split(":")[0] == expected


def test_memory_is_planned_for_the_implementations_of_the_table(wide_config):
    config, model = wide_config
    (calls,) = calls_of_job(config, model)
    problem = memory_problem(config, model)
    store.save(table_of(KIND, rows_of(calls, xla=150.0, pallas_triton=100.0)), table_path(KIND))
    assert not kernels_run(on_l40s(base.memory_problem_here, config, model))
    use_tables()
    assert kernels_run(on_l40s(base.memory_problem_here, config, model))
    assert kernels_run(problem)  # a plan without a device is one for Hopper


@pytest.fixture
def wide_config(job):
    config = load_config(job.path, ["base.dtype=bfloat16"])
    model = ModelConfig(
        family="llama", vocab_size=64, hidden_size=256, intermediate_size=256, num_layers=1, num_heads=4,
        num_kv_heads=4, head_dim=64,
    )  # fmt: skip
    return config, model


def test_processes_with_different_tables_do_not_start():
    told = []
    base.check_tables(lambda text: told.append(text) or True)
    store.save(table_of(), table_path("cpu"))
    use_tables()
    with pytest.raises(RunError) as caught:
        base.check_tables(lambda text: told.append(text))
    assert told == ["none", config_store.used_digest("cpu")]
    assert caught.value.code == "tune.processes-differ"


def test_resume_says_that_other_measurements_decide():
    digest = table_of().digest
    assert other_table({"tuning_table": digest}, digest) is None
    assert "another tuning table" in (other_table({"tuning_table": ""}, digest) or "")
