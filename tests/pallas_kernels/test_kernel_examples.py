"""Docstring examples of the kernels."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "attention.hopper.blocks",
        "cost",
        "cost_ops",
        "device",
        "dropout",
        "linear.api",
        "mlp.api",
        "norm.api",
        "policy",
        "sizes",
    ],
)
def test_examples_of(name):
    failed, attempted = doctest.testmod(import_module(f"pallas_kernels.{name}"))
    assert attempted
    assert not failed
