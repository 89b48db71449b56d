"""The examples in docstrings run."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "api.curves",
        "api.jobs",
        "modules.apply",
        "modules.context",
        "adapters.init",
        "modules.linear",
        "modules.linen",
        "modules.lora",
        "modules.product",
        "modules.quantised_base",
        "modules.report",
        "adapters.spec",
        "modules.tree",
        "modules.use",
        "checkpoint.digests",
        "checkpoint.new_folder",
        "config.peft_config",
        "checkpoint.run_lock",
        "files",
        "objective.loss",
        "objective.protocol",
        "planning.blocks",
        "layout.extent",
        "optim.per_adapter",
        "pipeline.failures",
        "planning.stages",
        "planning.rebalance",
        "report.ranking",
        "report.summary",
        "report.trackers.series",
    ],
)
def test_examples_of(name):
    failed, attempted = doctest.testmod(import_module(f"lorafusion_jax.{name}"))
    assert attempted
    assert not failed
