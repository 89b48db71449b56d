"""Docstring examples of the report package."""

from __future__ import annotations

import doctest
import importlib

from lorafusion_jax.report.block import Row, adapter_lines, plain_state


def test_there_are_examples_of_every_format():
    examples = doctest.DocTestFinder().find(importlib.import_module("lorafusion_jax.report.format"))
    public = [test.name.rsplit(".", 1)[-1] for test in examples if test.examples]
    assert {"count", "exact", "duration", "percent", "rate", "layout", "loss_text"} <= set(public)


def test_a_result_that_rounds_to_zero_has_no_sign():
    """Held-out losses of rewarded adapters are near 0, from both sides."""
    row = Row(num_steps=4, step=2, loss=-4e-6, eval_loss=-4e-6, metrics={"kl": -0.0})
    (line,) = adapter_lines({"law": row}, None, 160)
    assert all(text in line.plain for text in ("loss 0.000", "held-out 0.000", "kl 0"))
    assert "-0" not in line.plain + plain_state({"law": row})
