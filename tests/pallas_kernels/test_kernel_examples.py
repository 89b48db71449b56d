"""The examples in the kernels' docstrings run."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("name", ["api", "attention.blocks", "cost", "cost_ops", "device", "dropout", "mlp", "norm"])
def test_examples_of(name):
    failed, attempted = doctest.testmod(import_module(f"pallas_kernels.{name}"))
    assert attempted
    assert not failed
