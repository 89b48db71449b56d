"""Every LoRA kernel on a real GPU, by the benchmark's own checks: values, determinism, isolation, unsupported cases.

Run by `make gpu-test`.
"""

import pytest

from benchmarks import kernel_checks

pytestmark = pytest.mark.gpu


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
def kernel_results():
    kernel_results = Found()
    kernel_checks.run(kernel_results, tiny=False)
    return kernel_results


@pytest.mark.parametrize("name", kernel_checks.names())
def test_correct_deterministic_and_isolated(kernel_results, name):
    ok, detail = kernel_results[name]
    assert ok, detail
