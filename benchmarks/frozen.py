"""The frozen base without LoRA, in the product's own stages.

Adapters without targets have no leaves, so every projection is a plain product, without gradients or optimizer steps.
Slots, embedding, attention, norms, loss and head stay the same, as do the programs per block, the threads per stage and
the loop. Backward still computes the gradient of every block's input, down to the embedding's output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.session.stage import Stage
from scheduling.pipeline import Program


class FrozenStage(Stage):
    """A stage of adapters without leaves."""

    def compile_steps(self, num_stages: int) -> None:
        del num_stages  # no optimizer steps


def without_lora(specs: Sequence[AdapterSpec]) -> tuple[AdapterSpec, ...]:
    """The same adapters without targets; the loss still separates their rows."""
    return tuple(dataclasses.replace(spec, targets=("nothing",), dropout=0.0) for spec in specs)


def without_updates(program: Program) -> Program:
    return tuple(tuple(event for event in events if event.kind != "update") for events in program)
