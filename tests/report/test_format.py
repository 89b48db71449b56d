"""Docstring examples of the report package."""

from __future__ import annotations

import doctest
import importlib


def test_there_are_examples_of_every_format():
    examples = doctest.DocTestFinder().find(importlib.import_module("lorafusion_jax.report.format"))
    public = [test.name.rsplit(".", 1)[-1] for test in examples if test.examples]
    assert {"count", "exact", "duration", "percent", "rate", "layout"} <= set(public)
