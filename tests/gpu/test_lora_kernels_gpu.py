"""Every LoRA kernel on a real GPU, by the benchmark's own checks: values, determinism, isolation: make gpu-test."""

import pytest

from benchmarks import kernel_checks

pytestmark = pytest.mark.gpu

BACKENDS = ("pallas_mosaic_gpu", "pallas_triton")
NAMES = [f"{backend} {case}" for backend in BACKENDS for case in (*kernel_checks.cases(tiny=False), "isolation")]


class Found(dict):
    """What the checks say, by name."""

    def plan(self, group, names):
        """The names are those of the parameters."""

    def add(self, *, name, ok, detail):
        self[name] = (ok, detail)

    def attempt(self, name, work):
        try:
            work()
        except Exception as problem:  # the other cases still count
            self[name] = (False, repr(problem))


@pytest.fixture(scope="module")
def found():
    found = Found()
    kernel_checks.run(found, tiny=False)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_right_repeatable_and_isolated(found, name):
    ok, detail = found[name]
    assert ok, detail
