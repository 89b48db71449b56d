"""The frozen base alone, in the product's own stages: what is left of a training run without any LoRA.

Adapters that target no projection have no leaves, so every projection is its plain product, nothing is summed and
nothing is stepped. Slots, embedding, attention, norms, loss and head stay, as do the programs per block, the threads
per stage and the loop; backward still gives the gradient of every block's input, down to the embedding's output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lorafusion_jax.modules.spec import AdapterSpec
from lorafusion_jax.pipeline.stage import Stage
from scheduling.pipeline import Program


class FrozenStage(Stage):
    """A stage of adapters without leaves."""

    def compile_steps(self, num_stages: int) -> None:
        del num_stages  # there is nothing to step


def without_lora(specs: Sequence[AdapterSpec]) -> tuple[AdapterSpec, ...]:
    """The same adapters, targeting nothing: the loss still knows whose row is whose."""
    return tuple(dataclasses.replace(spec, targets=("nothing",), dropout=0.0) for spec in specs)


def without_updates(program: Program) -> Program:
    return tuple(tuple(event for event in events if event.kind != "update") for events in program)
