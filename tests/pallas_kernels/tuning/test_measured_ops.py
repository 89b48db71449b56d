"""Implementations by measurement: the rules, the table, and what selection makes of it."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from cuda_lowering import A100, H200, lowered, num_kernels
from jax.sharding import AbstractMesh, use_abstract_mesh

from pallas_kernels import backend, config_store, policy
from pallas_kernels.linear import xla
from pallas_kernels.measured import OpRow, nearest, winner
from pallas_kernels.norm import add_rms_norm
from pallas_kernels.policy import LinearShape, norm_call
from pallas_kernels.problem import linear_shape
from pallas_kernels.tuning import store
from pallas_kernels.tuning.op_cases import linear_case, norm_case, select_backend
from pallas_kernels.tuning.ops import OpCase, measure, reason, tune_ops
from pallas_kernels.tuning.timing import Timing

LAYER = LinearShape(
    rows=4096, in_features=4096, out_features=(4096,), ranks=(16,), tile=128, adapters=4, dropout=True
)  # fmt: skip
A100_KIND = A100.device_kind


def row(call, default="xla", failed=None, jax_version=jax.__version__, **median_us):
    return OpRow(call=call, default=default, median_us=median_us, failed=failed or {}, jax=jax_version)


def table_of(*rows, device=A100_KIND):
    return store.Table(device=device, conditions={"jax": "0", "date": "2026-01-01"}, ops=rows)


@pytest.fixture
def in_use(tmp_path):
    """in_use(rows...) makes them the table of an A100."""

    def use(*rows, device=A100_KIND):
        path = tmp_path / config_store.file_name(device)
        store.save(table_of(*rows, device=device), path)
        return config_store.use(path)

    yield use
    for device in (A100_KIND, H200.device_kind, "cpu"):
        config_store.forget(device)


def chosen(shape, device=A100):
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return select_backend(shape)


@pytest.mark.parametrize(
    ("median_us", "expected"),
    [
        ({"xla": 100.0, "pallas_triton": 98.1}, "xla"),  # 1.9 %: within the margin
        ({"xla": 100.0, "pallas_triton": 98.0}, "pallas_triton"),
        ({"pallas_triton": 200.0, "cudnn": 300.0}, "pallas_triton"),  # the default did not run
        ({"xla": 100.0, "pallas_triton": 100.0, "other": 100.0}, "xla"),
    ],
)
def test_a_winner_beats_the_default_by_the_margin(median_us, expected):
    assert winner(median_us, "xla") == expected


@pytest.mark.parametrize(
    ("changes", "winner"),
    [
        ({}, "exact"),
        ({"rows": 5000}, "exact"),
        ({"rows": 8192}, "wide"),  # both are near enough, this one is nearer
        ({"rows": 16384}, "wide"),
        ({"rows": 17000}, None),  # beyond twice
        ({"rows": 2048}, "exact"),
        ({"rows": 2047}, None),
        ({"out_features": (2048,)}, "exact"),
        ({"ranks": (64,)}, None),
        ({"ranks": (8,)}, "exact"),  # padded to 16
        ({"dropout": False}, None),
        ({"adapters": 1}, None),
        ({"adapters": 300}, "exact"),
        ({"dtype": "float32"}, None),
        ({"out_features": (2048, 2048), "ranks": (8, 8)}, None),
    ],
)
def test_a_call_takes_the_nearest_row_within_a_factor_of_two(changes, winner):
    rows = [
        row(LAYER.op_call, xla=1.0, exact=0.5),
        row(dataclasses.replace(LAYER, rows=8192).op_call, xla=1.0, wide=0.5),
    ]
    near = nearest(rows, dataclasses.replace(LAYER, **changes).op_call)
    assert (near and near.winner) == winner


def test_equally_near_rows_are_taken_in_the_order_of_the_table():
    rows = [row(dataclasses.replace(LAYER, rows=n).op_call, xla=1.0, **{f"of_{n}": 0.5}) for n in (2048, 8192)]
    assert nearest(rows, LAYER.op_call).winner == "of_2048"
    assert nearest(rows[::-1], LAYER.op_call).winner == "of_8192"


def test_the_table_of_a_device_decides_its_default(in_use):
    far = dataclasses.replace(LAYER, rows=512)
    assert (chosen(LAYER), chosen(LAYER, H200)) == ("xla", "pallas_mosaic_gpu")
    in_use(row(LAYER.op_call, xla=100.0, pallas_triton=80.0))
    assert (chosen(LAYER), chosen(far), chosen(LAYER, H200)) == ("pallas_triton", "xla", "pallas_mosaic_gpu")
    in_use(row(LAYER.op_call, default="pallas_mosaic_gpu", xla=80.0, pallas_mosaic_gpu=90.0), device=H200.device_kind)
    assert (chosen(LAYER), chosen(LAYER, H200)) == ("pallas_triton", "xla")
    config_store.forget(A100_KIND)
    assert chosen(LAYER) == "xla"


def test_an_implementation_that_is_asked_for_wins_over_the_table(in_use):
    in_use(row(LAYER.op_call, xla=100.0, pallas_triton=80.0))
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=A100)):
        assert select_backend(LAYER, "xla") == "xla"
        with pytest.raises(NotImplementedError, match="it needs a Hopper GPU"):
            select_backend(LAYER, "pallas_mosaic_gpu")


@pytest.mark.parametrize("name", ["pallas_mosaic_gpu", "a backend of another process"])
def test_a_winner_that_does_not_serve_the_call_leaves_it_to_the_rule(in_use, name):
    in_use(row(LAYER.op_call, xla=100.0, **{name: 80.0}))
    assert chosen(LAYER) == "xla"


def test_norms_follow_the_table(in_use):
    x, weight = jnp.ones((4096, 1024), jnp.bfloat16), jnp.ones(1024, jnp.bfloat16)

    def kernels():
        return num_kernels(lowered(A100, lambda x, w: add_rms_norm(x, x, w, eps=1e-5), x, weight))

    assert kernels() == (0, 0)
    in_use(row(norm_call(rows=4096, width=1024, dtype="bfloat16"), xla=100.0, pallas_triton=50.0))
    assert kernels() == (1, 0)


def test_the_mlp_is_one_op_only_where_its_calls_are_hoppers(in_use):
    gate_up = dataclasses.replace(LAYER, out_features=(14336, 14336), ranks=(16, 16))
    down = dataclasses.replace(LAYER, in_features=14336)

    def fused(measured):
        return policy.mlp_is_fused(gate_up, down, None, hopper=True, measured=measured)

    assert fused(policy.nothing_measured)
    assert not fused(lambda call: policy.TRITON if call == down.op_call else None)


def test_a_table_round_trips_with_its_implementations(tmp_path):
    path = tmp_path / "t.json"
    table = table_of(row(LAYER.op_call, failed={"other": "not here"}, xla=10.0, pallas_triton=5.5))
    store.save(table, path)
    assert store.load(path) == config_store.load(path) == table
    raw = json.loads(path.read_text())
    assert raw["ops"][0]["winner"] == "pallas_triton"
    assert (raw["format"], raw["digest"]) == (2, table.digest)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda raw: raw | {"device": "NVIDIA L40S"}, "its digest is not that of its content"),
        (lambda raw: raw | {"conditions": {"jax": "9"}}, "its digest is not that of its content"),
        (lambda raw: raw | {"format": 3}, "its format is 3, this version reads 2"),
        (lambda raw: {name: raw[name] for name in ("device", "conditions", "entries")}, "it has no 'format'"),
        (lambda raw: raw | {"ops": [raw["ops"][0] | {"winner": "xla"}]}, "'xla' does not win by its times"),
        (lambda raw: raw | {"ops": [raw["ops"][0] | {"median_us": {}}]}, "must be positive numbers"),
        (lambda raw: raw | {"ops": [raw["ops"][0] | {"median_us": {"xla": -1.0}}]}, "must be positive numbers"),
        (lambda raw: raw | {"ops": ["?"]}, "is no tuning table"),
        (lambda raw: [raw], "is no tuning table"),
    ],
)
def test_a_broken_table_is_refused_and_not_used(tmp_path, spoil, words):
    path = tmp_path / "t.json"
    store.save(table_of(row(LAYER.op_call, xla=10.0, pallas_triton=5.0)), path)
    path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=words) as caught:
        config_store.use(path)
    assert str(path) in str(caught.value)
    assert chosen(LAYER) == "xla"


def test_a_cut_file_and_no_file_are_refused(tmp_path):
    path = tmp_path / "t.json"
    store.save(table_of(row(LAYER.op_call, xla=10.0, pallas_triton=5.0)), path)
    path.write_text(path.read_text()[:300])
    with pytest.raises(ValueError, match="is no tuning table"):
        config_store.use(path)
    with pytest.raises(ValueError, match="does not exist"):
        config_store.use(tmp_path / "none.json")


def timed(times):
    """A timer that gives every call the time in the list, after it was compiled and run."""
    return lambda calls, **rest: {name: Timing(p20_us=0.0, p50_us=times[name], p80_us=0.0) for name in calls}


def small_case(call, **changes):
    def step(name):
        if name == "elsewhere":
            raise NotImplementedError("it needs a Hopper GPU")
        if name == "breaks":
            return lambda x: (_ for _ in ()).throw(RuntimeError("no room in /home/somebody/kernel.cu:3"))
        return lambda x: x

    case = OpCase(
        call=call, order=("elsewhere", "xla"), implementations=("xla", "fast", "elsewhere", "breaks"),
        draw=lambda: (jnp.ones(2),), step=step,
    )  # fmt: skip
    return dataclasses.replace(case, **changes)


def test_every_implementation_that_runs_is_timed_and_the_others_say_why():
    result = measure(small_case(LAYER.op_call), timer=timed({"xla": 10.0, "fast": 9.0}))
    assert (result.default, result.winner) == ("xla", "fast")  # the first of the order that runs
    assert result.failed == {"elsewhere": "it needs a Hopper GPU", "breaks": "RuntimeError: no room in (path):3"}
    assert measure(small_case(LAYER.op_call, implementations=("xla", "breaks")), timer=timed({})) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ptxas /tmp/tempfile-host-1/a.ptx, line 3", "RuntimeError: ptxas (path), line 3"),
        (r"in C:\Users\ann\x.cu: no", "RuntimeError: in (path): no"),
        ("~/cache 10 GB/s 1/2", "RuntimeError: (path) 10 GB/s 1/2"),
    ],
)
def test_reasons_hold_no_paths(text, told):
    assert reason(RuntimeError(text + "\nmore")) == told


def test_tuning_is_continued_and_repeated_for_another_jax(tmp_path, in_use):
    path, seen = tmp_path / "cpu.json", []
    calls = [dataclasses.replace(LAYER, rows=n).op_call for n in (2048, 4096, 8192)]
    cases, timer = [small_case(call) for call in calls], timed({"xla": 10.0, "fast": 5.0})
    old = row(calls[0], xla=1.0, fast=3.0), row(calls[1], jax_version="0.0.1", xla=1.0, fast=3.0)
    store.save(table_of(*old, device="cpu"), path)
    table = tune_ops(cases, path, timer=timer, progress=lambda case, row: seen.append((case.call, row.winner)))
    assert seen == [(calls[0], "xla"), (calls[1], "fast"), (calls[2], "fast")]
    assert store.load(path) == table
    assert config_store.fastest("cpu", calls[2]) == "fast"  # in use at once
    assert table.conditions["jax"] == f"0, {jax.__version__}"


def test_a_real_call_is_measured_by_its_backends_and_taken_from_then_on(tmp_path, in_use):
    shape = dataclasses.replace(LAYER, rows=64, in_features=64, out_features=(64, 64), ranks=(8, 0), tile=16)
    case = dataclasses.replace(linear_case(shape), implementations=("xla", "pallas_triton", "pallas_mosaic_gpu"))
    table = tune_ops([case], tmp_path / "cpu.json", timer=timed({"xla": 10.0, "pallas_triton": 5.0}))
    assert table.ops[0].failed.keys() == {"pallas_mosaic_gpu"}
    assert select_backend(shape) == "pallas_triton"


@pytest.mark.parametrize("least_rank", [0, 100, 128], ids=["ranks not known", "different ranks", "equal ranks"])
def test_a_timed_call_knows_the_ranks_that_the_job_knows(least_rank):
    shape = dataclasses.replace(LAYER, rows=64, in_features=64, out_features=(64,), ranks=(128,), tile=16)
    shape, seen = dataclasses.replace(shape, least_rank=least_rank), []

    def look(static, ops):
        seen.append(linear_shape(static, ops))
        return "it only looks"

    backend.register("looking", SimpleNamespace(unsupported_reason=look, forward=xla.forward, backward=xla.backward))
    try:
        case = linear_case(shape)
        with pytest.raises(NotImplementedError, match="it only looks"):
            jax.eval_shape(case.step("looking"), *jax.eval_shape(case.draw))
    finally:
        backend.unregister("looking")
    assert seen == [shape]


@pytest.mark.parametrize(("least_rank", "expected"), [(0, "xla"), (128, "pallas_mosaic_gpu")])
def test_a_described_call_knows_the_ranks_that_the_job_knows(least_rank, expected):
    """Large ranks alone are plain products; the fused ones of few ranks leave too many multiprocessors idle here."""
    shape = LinearShape(rows=2048, in_features=5120, out_features=(5120,), ranks=(128,), tile=128, adapters=2)
    assert chosen(dataclasses.replace(shape, least_rank=least_rank), H200) == expected


def test_a_norm_is_timed_as_a_model_calls_it():
    """Its gradients come from elsewhere, and nothing is copied to be returned twice."""
    case = norm_case(rows=8, width=16, dtype="float32")
    x, delta, ds, dy, weight = arguments = case.draw()
    (s, y), gradient = case.step("xla")(*arguments)
    outs, pullback = jax.vjp(lambda x, delta: add_rms_norm(x, delta, weight, eps=1e-5), x, delta)
    results, expected = (s, y, gradient), (*outs, pullback((ds, dy))[0])
    assert all(jnp.allclose(a, b, rtol=1e-5) for a, b in zip(results, expected, strict=True))
