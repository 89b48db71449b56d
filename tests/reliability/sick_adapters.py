"""Ways in which one adapter of a run gets sick: a table, and how each entry is brought about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from lorafusion_jax.session.assembler import Batches
from lorafusion_jax.session.stage import Stage

SICK = 0  # place of the sick adapter of two
NAN, INF = float("nan"), float("inf")

Wound = Callable[[Stage, Any], Any]  # (stage, its microbatch) → the microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to get sick.

    Attributes:
        name: of the case.
        optim: optimizer settings of the sick adapter; they need not be ones that a job file may have.
        wound: changes arrays of a stage just before its forward pass of slot `at`.
        at: slot; 4 belongs to its second batch, on one device and on two by two.
        stage: where, of two; with one stage, there.
        rows: changes the sick adapter's rows of a microbatch on the host: (name of the array, value).
        reason: part of what the run says of it.
        hurt: its weights themselves are what is not finite, so that they cannot be exported.
    """

    name: str
    optim: Mapping[str, Any] = field(default_factory=dict)
    wound: Wound | None = None
    at: int = 4
    stage: int = 0
    rows: tuple[str, float] | None = None
    reason: str = "not finite"
    hurt: bool = False


def weights(value: float, part: str, stage: Stage, batch: Any) -> Any:
    """One entry of the sick adapter's A or B."""
    stage.lora = {
        name: leaf.at[0, *first_entry(stage, name)].set(value) if name.endswith(part) else leaf
        for name, leaf in stage.lora.items()
    }
    return batch


def first_entry(stage: Stage, name: str) -> tuple[int, int]:
    """Index of the sick adapter's first number in the array of one layer."""
    columns = stage.parts.leaves.columns[name]
    return (0, columns.first[SICK]) if columns.axis else (columns.first[SICK], 0)


def gradients(value: float, stage: Stage, batch: Any) -> Any:
    """One entry of its gradient sums on every replica."""
    stage.sums = {name: leaf.at[:, 0, *first_entry(stage, name)].set(value) for name, leaf in stage.sums.items()}
    return batch


def optimizer(value: float, stage: Stage, batch: Any) -> Any:
    """One entry of every array of its optimizer's state."""

    def wounded(leaf: Any) -> Any:
        return leaf.at[(0,) * leaf.ndim].set(value) if leaf.ndim else leaf

    stage.optimizers = stage.optimizers | {"bad": jax.tree.map(wounded, stage.optimizers["bad"])}
    return batch


UNUSED_FROM = 2946  # tokens of the vocabulary that the words of other adapters do not have


def base_rows(value: float, stage: Stage, batch: Any) -> Any:
    """The base model's rows of tokens that only the sick adapter's samples have."""
    assert stage.weights.embed is not None
    stage.weights.embed = stage.weights.embed.at[UNUSED_FROM + 1 :].set(value)
    return batch


def install(monkeypatch: Any, case: Case) -> None:
    """Makes runs get sick in this way."""
    if case.wound is not None:
        forward = Stage.forward

        def wounded(self: Stage, slot: int, batch: Any, x: Any) -> Any:
            last = self.weights.head is not None
            if slot == case.at and (last if case.stage else self.weights.embed is not None):
                assert case.wound is not None
                batch = case.wound(self, batch)
            return forward(self, slot, batch, x)

        monkeypatch.setattr(Stage, "forward", wounded)
    if case.rows is not None:
        of, (array, value) = Batches.of, case.rows

        def sick_rows(self: Batches, slot: int) -> Any:
            batch = of(self, slot)
            sick_rows = (batch.row_adapter == SICK) & (slot >= case.at)
            held = getattr(batch, array)
            return batch._replace(**{array: np.where(sick_rows, np.asarray(value, held.dtype), held)})

        monkeypatch.setattr(Batches, "of", sick_rows)


def settings(case: str, reason: str = "not finite", **optim: Any) -> Case:
    return Case(name=case, optim={"schedule": "constant", **optim}, reason=reason)


WRITES = "would write"  # finite gradients, and weights or state that are not
# The first four are configurations that once ended a run and every resume.
SETTINGS = [
    settings("adamw eps 1e-50", WRITES, eps=1e-50),
    settings("adamw eps 1e-320", WRITES, eps=1e-320),
    settings("adamw lr 1e39", WRITES, lr=1e39),
    settings("adafactor lr 1e39", WRITES, name="adafactor", lr=1e39),
    settings("lion lr 1e39", WRITES, name="lion", lr=1e39),
    settings("sgd lr 1e39", WRITES, name="sgd", lr=1e39, clip=0.0),
    settings("sgd lr 1e30", name="sgd", lr=1e30, clip=0.0),
    settings("adamw lr 1e38", lr=1e38),
    settings("decay 1e39", WRITES, weight_decay=1e39),
    settings("lr 1e20 and decay 1e30", WRITES, lr=1e20, weight_decay=1e30),
    settings("lr inf", WRITES, lr=INF),
    settings("lr NaN", WRITES, lr=NAN),
    settings("lion lr NaN", WRITES, name="lion", lr=NAN),
    settings("decay NaN", WRITES, weight_decay=NAN),
    settings("sgd decay 1e39", WRITES, name="sgd", weight_decay=1e39),
    settings("lion decay inf", WRITES, name="lion", weight_decay=INF),
    settings("adafactor lr inf", WRITES, name="adafactor", lr=INF),
    settings("adamw b1 of 1", WRITES, b1=1.0),
    settings("adamw b2 of NaN", WRITES, b2=NAN),
]
WOUNDS = [
    Case(name="rows: weight NaN", rows=("weights", NAN)),
    Case(name="rows: weight inf", rows=("weights", INF)),
    Case(name="rows: weight -inf", rows=("weights", -INF)),
    Case(name="rows: weight 1e38", rows=("weights", 1e38)),
    Case(name="rows: weight 1e30, norm beyond float32", rows=("weights", 1e30), reason="norm of the gradient"),
    Case(name="A NaN", wound=partial(weights, NAN, "lora_a"), hurt=True),
    Case(name="A NaN on the last stage", wound=partial(weights, NAN, "lora_a"), stage=1, hurt=True),
    Case(name="B NaN on the first stage", wound=partial(weights, NAN, "lora_b"), hurt=True),
    Case(name="B NaN on the last stage", wound=partial(weights, NAN, "lora_b"), stage=1, hurt=True),
    Case(name="B inf", wound=partial(weights, INF, "lora_b"), hurt=True),
    Case(name="A 3e38", wound=partial(weights, 3e38, "lora_a")),
    Case(name="gradient NaN on the first stage", wound=partial(gradients, NAN), reason="gradient not finite"),
    Case(name="gradient NaN on the last stage", wound=partial(gradients, NAN), stage=1, reason="gradient not finite"),
    Case(name="gradient inf on the first stage", wound=partial(gradients, INF), reason="gradient not finite"),
    Case(name="gradient inf on the last stage", wound=partial(gradients, INF), stage=1, reason="gradient not finite"),
    Case(name="optimizer NaN on the first stage", wound=partial(optimizer, NAN), reason=WRITES),
    Case(name="optimizer NaN on the last stage", wound=partial(optimizer, NAN), stage=1, reason=WRITES),
    Case(name="optimizer inf on the first stage", wound=partial(optimizer, INF), reason=WRITES),
    Case(name="optimizer inf on the last stage", wound=partial(optimizer, INF), stage=1, reason=WRITES),
    Case(name="base rows NaN", wound=partial(base_rows, NAN), at=0),
    Case(name="base rows inf", wound=partial(base_rows, INF), at=0),
]
CASES = SETTINGS + WOUNDS
# One of each kind is in every run of the tests; `-m nightly` and tests/campaigns/sick_adapters.py run the others.
ALWAYS = {
    "adamw eps 1e-50",
    "sgd lr 1e39",
    "rows: weight NaN",
    "rows: weight 1e30, norm beyond float32",
    "A NaN",
    "B NaN on the last stage",
    "gradient inf on the last stage",
    "optimizer NaN on the first stage",
    "base rows NaN",
}
ALWAYS_ON_A_MESH = {
    "adamw lr 1e39",
    "B NaN on the last stage",
    "gradient NaN on the first stage",
    "optimizer NaN on the last stage",
}


def with_optim(config, name: str, changes: dict):
    """The job with other settings of one adapter's optimizer, also those that a job file may not hold."""
    adapters = tuple(
        adapter.model_copy(update={"optim": adapter.optim.model_copy(update=changes)})
        if adapter.name == name
        else adapter
        for adapter in config.adapters
    )
    return config.model_copy(update={"adapters": adapters})
