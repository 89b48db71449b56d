"""Assigns layers to stages so that the slowest stage is as fast as possible.

The embedding is on the first stage and costs almost nothing. Norm, head and loss are on the last stage and cost as much
as one or two layers, so stages have different numbers of layers. If whole layers balance badly, a stage boundary lies
between the attention and the MLP of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from lorafusion_jax.errors import ConfigError, LoraFusionError, raise_all
from lorafusion_jax.families.attention import Attention
from lorafusion_jax.families.delta_net import DeltaNet
from lorafusion_jax.families.latent_attention import LatentAttention
from lorafusion_jax.families.layer import Layer
from lorafusion_jax.families.mamba import Mamba
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.layout.extent import Extent, counts_of, extents
from lorafusion_jax.layout.layer import HALVES, Half
from lorafusion_jax.weights.table import StoredKind
from scheduling.cost_parts import deal_layers

# Some parts of a layer take longer than their FLOPs at the rate of a device's large products. They count as more
# weights, as measured on one H200 (`benchmarks/results/experts_h200_2026-11-24/`, `delta_net_h200_2026-11-27/`).
EXPERTS = 2.0  # products of experts: rows are sorted and padded, and tiles are small
# The gated delta rule: float32, and one step per chunk, forward and backward on average; by kernels and in XLA's form.
RULE, XLA_RULE = 46.0, 108.0
# Elementwise passes (LoRA's passes, norms, gate) per token and column of D + F, in FLOPs of equal time. Fitted to 8B
# training runs on an H200.
PASSES = 16_000
SAMPLE_TOKENS = 1024  # typical fine-tuning sample
WORTH_A_CUT = 0.995  # a split layer compiles two more programs and reads its activations once more


class PartCosts(NamedTuple):
    """Costs of the parts of a model, in any unit.

    Args:
        layer: a whole layer.
        attention: the part of a layer before the MLP (None: layers are not split).
        embed, head: extra costs of the first and the last stage.
    """

    layer: float = 1.0
    attention: float | None = None
    embed: float = 0.0
    head: float = 0.0


EQUAL = PartCosts()


def stage_layers(
    model: ModelConfig, num_stages: int, wanted: Sequence[int | float] | None = None, *, capacity_tokens: int = 8192
) -> tuple[Extent, ...]:
    """Layers of each stage: the job's own numbers, or the optimum for modelled costs.

    Raises:
        ConfigError: `mesh.layers` or `mesh.stages`, numbers that do not fit the model, or a model that has one stage.
    """
    if num_stages > 1 and model.crossing:
        raise ConfigError(
            "mesh.stages",
            f"mesh.stages={num_stages}, and the layers of this base ({model.family}) have {model.crossing}.",
            why="stages pass on activations only",
            fix="mesh.stages: 1, and mesh.data or mesh.fsdp for more devices",
        )
    if wanted is not None:
        if model.undivided and any(count % 1 for count in wanted):
            raise ConfigError(
                "mesh.layers",
                f"mesh.layers: {list(wanted)}, and attention and MLP of this base ({model.family}) read one input, or "
                "are layers of their own.",
                why="half a layer passes on one array",
                fix="whole numbers of layers, or leave mesh.layers out",
            )
        return check_layers(wanted, num_layers=model.num_layers, num_stages=num_stages)
    costs = modelled_costs(model, sample_tokens=min(SAMPLE_TOKENS, capacity_tokens))
    return split_layers(model.num_layers, num_stages, costs)


def split_layers(num_layers: int, num_stages: int, costs: PartCosts = EQUAL) -> tuple[Extent, ...]:
    """Splits layers into contiguous stages, minimising the cost of the slowest.

    cost(s) = layer · layers(s) + embed on the first + head on the last;  layers(s) ≥ 1

    A layer is split in two only if that makes the slowest stage at least half a per cent faster.

    Raises:
        ConfigError: `mesh.stages`, more stages than layers.

    >>> [stage.count for stage in split_layers(32, 4, PartCosts(head=2.4))]
    [8, 9, 9, 6]
    >>> [stage.count for stage in split_layers(5, 2, PartCosts(attention=0.5))]
    [2.5, 2.5]
    """
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            "mesh.stages",
            f"{num_layers} layers cannot be cut into {num_stages} stages.",
            why="every stage needs at least one layer",
            fix=f"mesh.stages: 1 to {num_layers}",
        )
    if min(costs.layer, costs.embed, costs.head) < 0 or not costs.layer:
        raise ValueError(f"costs must be positive: {costs}")
    by_layer = extents(deal_layers(num_layers, num_stages, layer=costs.layer, embed=costs.embed, head=costs.head))
    if costs.attention is None:
        return by_layer
    by_half = _fill(num_layers, num_stages, costs)
    return by_half if slowest(by_half, costs) < WORTH_A_CUT * slowest(by_layer, costs) else by_layer


def slowest(stages: Sequence[Extent], costs: PartCosts) -> float:
    """Cost of the most expensive stage."""
    return max(stage_loads(stages, costs))


def stage_loads(stages: Sequence[Extent], costs: PartCosts) -> list[float]:
    """Cost of each stage, including the ends."""
    loads = [stage_cost(stage, costs) for stage in stages]
    loads[0] += costs.embed
    loads[-1] += costs.head
    return loads


def stage_cost(stage: Extent, costs: PartCosts) -> float:
    """Cost of a stage's layers, without the ends."""
    attention = costs.layer / 2 if costs.attention is None else costs.attention
    by_half = {"attention": attention, "mlp": costs.layer - attention, None: costs.layer}
    return sum(by_half[piece.half] for piece in stage.pieces)


def _fill(num_layers: int, num_stages: int, costs: PartCosts) -> tuple[Extent, ...]:
    """Finds the smallest cost limit at which the stages, filled from last to first, hold all halves."""
    assert costs.attention is not None
    halves = [costs.attention, costs.layer - costs.attention] * num_layers
    upto = list(accumulate(halves, initial=0.0))

    def filled(limit: float) -> list[int] | None:
        """Edges of the stages; None if halves are left over."""
        edges = [len(halves)]
        for stage in reversed(range(num_stages)):
            room = limit - (costs.head if stage == num_stages - 1 else 0.0) - (costs.embed if stage == 0 else 0.0)
            stop, least = edges[0], 2 * stage  # this stage and all earlier ones need two halves each
            start = stop - 2
            if start < least or upto[stop] - upto[start] > room:
                return None
            while start > least and upto[stop] - upto[start - 1] <= room:
                start -= 1
            edges.insert(0, start)
        return edges if edges[0] == 0 else None

    low, high = 0.0, upto[-1] + costs.embed + costs.head
    best = filled(high * (1 + 1e-9))
    while high - low > 1e-9 * upto[-1]:
        middle = (low + high) / 2
        solution = filled(middle)
        low, high, best = (low, middle, solution) if solution else (middle, high, best)
    assert best is not None, "each stage can take two halves"
    return tuple(Extent(start, stop) for start, stop in pairwise(best))


def check_layers(layers: Sequence[int | float], *, num_layers: int, num_stages: int) -> tuple[Extent, ...]:
    """Converts a job's own numbers of layers per stage to extents; half a layer is its attention or its MLP.

    Raises:
        ConfigError: `mesh.layers`, with every mistake: number of stages, a stage without a layer, sum.

    >>> check_layers([2.5, 1.5], num_layers=4, num_stages=2)
    (Extent(start=0, stop=5), Extent(start=5, stop=8))
    """
    setting = f"mesh.layers: {list(layers)}"
    even = counts_of(split_layers(num_layers, num_stages))  # also checks the number of stages
    fix = f"mesh.layers: {even}, or leave it out"
    total = sum(layers)
    problems = [
        (len(layers) != num_stages, f"it names {len(layers)} stages and mesh.stages is {num_stages}."),
        (any(count < 1 for count in layers), "a stage has no layer."),
        (total != num_layers, f"it adds up to {total} layers and the model has {num_layers}."),
    ]
    errors: list[LoraFusionError] = [
        ConfigError("mesh.layers", message, where=setting, fix=fix) for wrong, message in problems if wrong
    ]
    raise_all(errors)
    return extents(layers)


def modelled_costs(model: ModelConfig, *, sample_tokens: float = SAMPLE_TOKENS, loss_share: float = 1.0) -> PartCosts:
    """Counts FLOPs of forward + backward per token over a frozen base (no weight gradients).

    layer = 4 · weights of its linears + 7 · n · H · C + PASSES · (D + F),  attention = the same without the MLP,
    head = 4 · D · V · loss_share,  embedding = 0,  a mean over the layers of the model

    Causal attention over samples of n tokens takes 2 · n · H · C FLOPs per token in forward (half a square, two
    products) and 2.5 times as much in backward. The loss makes two passes of the head's product over rows that have
    a target, and none over others. With a window, n is what `Attention.reach` says.

    Args:
        sample_tokens: n, Σ length² / Σ length of the samples.
        loss_share: share of rows that have a target.

    >>> config = ModelConfig(family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
    ...                      num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)
    >>> costs = modelled_costs(config)
    >>> round(costs.head / costs.layer, 1)
    1.8
    """
    reach = mean_over_layers(model, lambda layer: attention_elements(layer, sample_tokens))
    weights = {half: mean_over_layers(model, partial(row_weights, half=half)) for half in HALVES}
    mlp = 4 * weights["mlp"] + PASSES * mean_over_layers(model, lambda layer: layer.gated_elements)
    attention = 4 * weights["attention"] + 7 * reach + PASSES * model.hidden_size
    return PartCosts(
        layer=attention + mlp,
        attention=None if model.undivided else attention,
        head=4 * model.hidden_size * model.num_outputs * loss_share,
    )


def worth_in_layers(model: ModelConfig, stages: Sequence[Extent]) -> list[float]:
    """Cost of each stage's layers, in layers; half a layer counts by its FLOPs."""
    costs = modelled_costs(model)
    return [stage_cost(stage, costs) / costs.layer for stage in stages]


def row_weights(
    layer: Layer, half: Half | None = None, *, hopper: bool = True, kind: StoredKind | None = None
) -> float:
    """Weights of a layer or half that a row passes through: 2 FLOPs each in forward, and again in backward.

    Args:
        hopper: whether the devices are Hopper GPUs, which have kernels for the gated delta rule.
        kind: how projections are stored, if their products then take another time; None: as for plain ones.
    """
    products = 0.0
    for linear in layer.linears_of(half):
        speed = 1.0 if kind is None else kind.of(linear.experts).product_speed
        products += prod(linear.row_shape) * (EXPERTS if linear.experts else 1) / speed
    return products + (_rule(layer.second or layer.attention, hopper) if half != "mlp" else 0)


def attention_elements(layer: Layer, sample_tokens: float) -> float:
    """Products per row of scores and of their values, whose time grows with a sample: reach · H · C."""
    mixer = layer.attention
    return mixer.reach(sample_tokens) * mixer.queries if isinstance(mixer, Attention | LatentAttention) else 0.0


def mean_over_layers(model: ModelConfig, value: Callable[[Layer], float]) -> float:
    """The mean of a value over the layers of a model."""
    by_kind = [value(layer) for layer in model.kinds]
    return sum(by_kind[model.kind_of(number)] for number in range(model.num_layers)) / model.num_layers


def _rule(mixer: object, hopper: bool) -> float:
    rule = RULE if hopper else XLA_RULE
    if isinstance(mixer, Mamba):  # whose space is computed by XLA everywhere
        return XLA_RULE * mixer.reach(1) * mixer.queries
    return rule * mixer.reach(1) * mixer.queries if isinstance(mixer, DeltaNet) else 0.0
