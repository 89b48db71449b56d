"""Docstring examples of the report package."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from lorafusion_jax import report

MODULES = [f"lorafusion_jax.report.{module.name}" for module in pkgutil.iter_modules(report.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples_of_every_format():
    examples = doctest.DocTestFinder().find(importlib.import_module("lorafusion_jax.report.format"))
    public = [test.name.rsplit(".", 1)[-1] for test in examples if test.examples]
    assert {"count", "exact", "duration", "percent", "rate", "layout"} <= set(public)
