"""Reports which layers of a model have adapters, and why others have none.

K in · N out · R padded rank
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from lorafusion_jax.modules.linear import Linear
from lorafusion_jax.modules.linen_held import copy_dicts, node_at
from lorafusion_jax.modules.linen_layers import LinenLayer, Ran
from lorafusion_jax.modules.match import EXPERTS, check_model, find_candidates, is_experts
from lorafusion_jax.modules.plan import LoRAPlan
from lorafusion_jax.modules.quantised_base import stored_weight
from lorafusion_jax.modules.stored_weight import StoredWeight
from lorafusion_jax.modules.tree import dotted, own_class
from lorafusion_jax.weights.table import NONE

HEAD = "output head: all-linear leaves it out, name it to adapt it"
UNTARGETED = "no adapter targets it"
_HEADER = ("layer", "class", "K x N", "adapters", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedRow:
    """A layer with adapters: K and N of its product, and the rank of each adapter that targets it."""

    path: str
    kind: str
    in_features: int
    out_features: int
    layers: int
    ranks: dict[str, int]
    stored: str = NONE  # how the frozen weight is stored


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A module with a weight but without adapters."""

    path: str
    kind: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAReport:
    """Result of `lora_report`. Prints as a table, also in notebooks.

    Args:
        parameters: number of parameters of each adapter, without padding.
        frozen: number of the model's other parameters.
    """

    adapted: tuple[AdaptedRow, ...]
    skipped: tuple[SkippedRow, ...]
    parameters: dict[str, int]
    frozen: int

    def __str__(self) -> str:
        rows = [_HEADER, *self._cells()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, "", self._total()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in row)}</tr>" for row in self._cells())
        head = "".join(f"<th>{name}</th>" for name in _HEADER)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table><p>{html.escape(self._total())}</p>"

    def _cells(self) -> Iterator[tuple[str, ...]]:
        for row in self.adapted:
            ranks = ", ".join(f"{name} r={rank}" for name, rank in row.ranks.items())
            notes = [f"{row.layers} layers, stacked"] * (row.layers > 1) + [row.stored] * (row.stored != NONE)
            yield row.path, row.kind, f"{row.in_features} x {row.out_features}", ranks, ", ".join(notes)
        for skipped in self.skipped:
            yield skipped.path, skipped.kind, "", "none", skipped.why

    def _total(self) -> str:
        counts = ", ".join(f"{name} {count:,}" for name, count in self.parameters.items()) or "no adapters"
        return f"trainable: {counts}; frozen: {self.frozen:,}"


def lora_report(model: nnx.Module) -> LoRAReport:
    """Reports which layers of a model have adapters, and why others have none.

    >>> from lorafusion_jax.modules import AdapterSpec, apply_lora
    >>> model = nnx.Dict(up=nnx.Linear(8, 16, rngs=nnx.Rngs(0)), head=nnx.Linear(16, 4, rngs=nnx.Rngs(1)))
    >>> lora_report(apply_lora(model, [AdapterSpec(name="law", rank=2, alpha=4)], targets="all-linear"))
    layer  class   K x N   adapters
    up     Linear  8 x 16  law r=2
    head   Linear          none      output head: all-linear leaves it out, name it to adapt it
    <BLANKLINE>
    trainable: law 48; frozen: 212
    """
    check_model(model)
    adapted: dict[int, AdaptedRow] = {}
    skipped: dict[int, SkippedRow] = {}
    parameters: dict[str, int] = {}
    for candidate in find_candidates(model):
        plan, path, number = getattr(candidate.module, "lora_plan", None), dotted(candidate.path), id(candidate.module)
        if plan is None:
            why = candidate.unsupported_reason if not isinstance(candidate.linear, Linear) else ""
            if isinstance(candidate.linear, Linear):
                why = (
                    HEAD if candidate.is_head else candidate.unsupported_reason if is_experts(candidate) else UNTARGETED
                )
            if (weight := stored_weight(candidate.module)) is not None:
                why = f"{UNTARGETED}, {weight.kind}"
            skipped.setdefault(number, SkippedRow(path=path, kind=own_class(candidate.module).__name__, why=why))
        elif number not in adapted:
            adapted[number] = _row(path, candidate.module, plan)
            for name, count in plan.parameters().items():
                parameters[name] = parameters.get(name, 0) + count
    frozen = jax.tree.leaves(nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))))
    return LoRAReport(
        adapted=tuple(adapted.values()),
        skipped=tuple(skipped.values()),
        parameters=parameters,
        frozen=sum(leaf.size for leaf in frozen) + sum(weight.num_weights for weight in _stored_weights(model)),
    )


def _stored_weights(model: nnx.Module) -> list[StoredWeight]:
    layers = {id(candidate.module): candidate.module for candidate in find_candidates(model)}
    return [weight for layer in layers.values() if (weight := stored_weight(layer)) is not None]


def _row(path: str, module: nnx.Module, plan) -> AdaptedRow:
    weight = stored_weight(module)
    return AdaptedRow(
        path=path,
        kind=own_class(module).__name__,
        in_features=plan.linear.in_features,
        out_features=plan.linear.out_features,
        layers=plan.layers,
        ranks={plan.adapters[index].name: plan.adapters[index].rank for index in plan.members},
        stored=NONE if weight is None else weight.kind,
    )


def report_ran(ran: Ran, plans: Mapping[tuple[str, ...], LoRAPlan | None], params: Any) -> LoRAReport:
    """Reports what ran in a call: layers with adapters, layers without, and other modules with matrices."""
    adapted, skipped, counts = [], [], dict[str, int]()
    for layer in ran.layers:
        plan = plans[layer.path]
        if plan is None:
            why = HEAD if layer.is_head else EXPERTS if layer.experts else UNTARGETED
            skipped.append(SkippedRow(path=layer.name, kind=layer.kind, why=why))
            continue
        adapted.append(_linen_row(layer, plan, params))
        for name, count in plan.parameters().items():
            counts[name] = counts.get(name, 0) + count
    skipped += [SkippedRow(path=other.name, kind=other.kind, why=other.why) for other in ran.others]
    leaves = jax.tree.leaves(nn.meta.unbox(params), is_leaf=lambda leaf: isinstance(leaf, StoredWeight))
    frozen = sum(leaf.num_weights if isinstance(leaf, StoredWeight) else leaf.size for leaf in leaves)
    return LoRAReport(adapted=tuple(adapted), skipped=tuple(skipped), parameters=counts, frozen=frozen)


def _linen_row(layer: LinenLayer, plan: LoRAPlan, params: Any) -> AdaptedRow:
    weight = node_at(copy_dicts(params), layer.scope)[layer.weight]
    return AdaptedRow(
        path=layer.name,
        kind=layer.kind,
        in_features=layer.in_features,
        out_features=layer.out_features,
        layers=plan.layers,
        ranks={plan.adapters[index].name: plan.adapters[index].rank for index in plan.members},
        stored=weight.kind if isinstance(weight, StoredWeight) else NONE,
    )
