"""The kernel checks detect wrong values, leaks between adapters, and unexpected errors."""

from concurrent.futures import Future
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import H200
from host_arrays import on_device
from jax.sharding import AbstractMesh, use_abstract_mesh
from more_cases import nightly

from benchmarks import kernel_calls, kernel_checks
from benchmarks.kernel_calls import formula, gradients


# linear/test_lowering.py has calls of every kind that are served; tracing them all takes long
@pytest.mark.parametrize(
    ("backend", "served"),
    [("pallas_mosaic_gpu", False), *(nightly(backend, True) for backend in kernel_checks.BACKENDS)],
)
def test_unsupported_cases_on_h200_are_the_expected_ones(backend, served, monkeypatch):
    monkeypatch.setattr(
        kernel_calls, "_normal", lambda random, *shape, dtype, **_: on_device(np.zeros(shape), dtype)
    )  # shapes
    names = [name for other, name in kernel_checks.pairs() if other == backend]
    wrong = {}
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        expected_of = {name: kernel_checks.expected_reason(backend, name) for name in names}
        cases = {name: reason for name, reason in expected_of.items() if served == (reason is None)}
        assert cases
        for name, expected in cases.items():
            actual = None
            try:
                jax.eval_shape(partial(gradients, backend), *kernel_checks.call(name, tiny=False))
            except NotImplementedError as refused:
                actual = str(refused)
            if actual != expected and (expected is None or actual is None or expected not in actual):
                wrong[name] = expected, actual
    assert wrong == {}


def test_every_record_has_a_name_of_its_own():
    names = kernel_checks.names()
    assert len(set(names)) == len(names) > 80


class Records(dict):
    def add(self, *, name, ok, detail):
        self[name] = ok


@pytest.mark.parametrize(
    ("job", "expected", "ok"),
    [
        ("it needs a Hopper GPU (sm_90)", "a Hopper GPU", True),
        ("no tiles fit", "a Hopper GPU", False),
        ("no tiles fit", None, False),
        (Future(), "a Hopper GPU", False),  # served
    ],
)
def test_unexpected_reasons_are_failures(job, expected, ok):
    records = Records()
    kernel_checks._check(records, "case", job, expected, lambda run: (True, "right"))
    assert records == {"case": ok}


@pytest.fixture(scope="module")
def call():
    return kernel_checks.call("bf16 A4 r16 p.1", tiny=True)


@pytest.fixture(scope="module")
def run():
    return jax.jit(partial(gradients, "xla"))


@pytest.mark.parametrize(("change", "ok"), [(1.0, True), (1.02, False)])
def test_values_that_are_off_by_two_percent_are_wrong(call, run, change, ok):
    def scaled(*inputs):
        ys, dx, das, dbs = run(*inputs)
        return ys, dx, [da * change for da in das], dbs

    assert kernel_checks.values(scaled, call, formula(*call))[0] == ok


def test_runs_that_differ_are_wrong(call, run):
    drift = iter([0.0, 1e-6])

    def drifting(*inputs):
        ys, dx, das, dbs = run(*inputs)
        return ys, dx, [da.astype(jnp.float32) + next(drift) for da in das], dbs

    assert not kernel_checks.values(drifting, call, formula(*call))[0]


@pytest.mark.parametrize("check", [kernel_checks.isolation, kernel_checks.company])
@pytest.mark.parametrize("leaks", [False, True])
def test_leaks_between_adapters_are_detected(call, run, check, leaks):
    def leaky(arguments, dys):
        ys, dx, das, dbs = run(arguments, dys)
        met = jnp.mean(ys[0].astype(jnp.float32))
        return ys, dx, das, [db + met.astype(db.dtype) for db in dbs] if leaks else dbs

    assert check(leaky, call)[0] is not leaks
