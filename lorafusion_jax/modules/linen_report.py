"""The report of a Linen model's adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn

from lorafusion_jax.modules.linen_held import copy_dicts, node_at
from lorafusion_jax.modules.linen_layers import LinenLayer, Ran
from lorafusion_jax.modules.match import EXPERTS
from lorafusion_jax.modules.plan import LoRAPlan
from lorafusion_jax.modules.report import HEAD, UNTARGETED, AdaptedRow, LoRAReport, SkippedRow
from lorafusion_jax.modules.stored_weight import StoredWeight
from lorafusion_jax.weights.table import NONE


def report_ran(ran: Ran, plans: Mapping[tuple[str, ...], LoRAPlan | None], params: Any) -> LoRAReport:
    """Reports what ran in a call: layers with adapters, layers without, and other modules with matrices."""
    adapted, skipped, counts = [], [], dict[str, int]()
    for layer in ran.layers:
        plan = plans[layer.path]
        if plan is None:
            why = HEAD if layer.is_head else EXPERTS if layer.experts else UNTARGETED
            skipped.append(SkippedRow(path=layer.name, kind=layer.kind, why=why))
            continue
        adapted.append(_row(layer, plan, params))
        for name, count in plan.parameters().items():
            counts[name] = counts.get(name, 0) + count
    skipped += [SkippedRow(path=other.name, kind=other.kind, why=other.why) for other in ran.others]
    leaves = jax.tree.leaves(nn.meta.unbox(params), is_leaf=lambda leaf: isinstance(leaf, StoredWeight))
    frozen = sum(leaf.num_weights if isinstance(leaf, StoredWeight) else leaf.size for leaf in leaves)
    return LoRAReport(adapted=tuple(adapted), skipped=tuple(skipped), parameters=counts, frozen=frozen)


def _row(layer: LinenLayer, plan: LoRAPlan, params: Any) -> AdaptedRow:
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
