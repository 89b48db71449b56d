"""Which layers run on which stage, so that the slowest stage is as quick as it can be.

The embedding belongs to the first stage and costs next to nothing; norm, head and loss belong to the last and cost as
much as some layers (2.4 at Llama-3.1-8B's shape), so stages get uneven numbers of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from lorafusion_jax.config.model import ModelConfig
from lorafusion_jax.errors import ConfigError, LoraFusionError, raise_all

SAMPLE_TOKENS = 1024  # of a usual fine-tuning sample; attention at that length is 4 % of an 8B layer


class PartCosts(NamedTuple):
    """What the parts of a model cost, in one unit of the caller's choice."""

    layer: float
    embed: float = 0.0
    head: float = 0.0


def stage_layers(
    model: ModelConfig, num_stages: int, wanted: Sequence[int] | None = None, *, capacity_tokens: int = 8192
) -> tuple[range, ...]:
    """Layers of each stage: the job's own numbers, or those that modelled costs give.

    Raises:
        ConfigError: `mesh.layers` or `mesh.stages`, numbers that do not fit the model.
    """
    if wanted is not None:
        return check_layers(wanted, num_layers=model.num_layers, num_stages=num_stages)
    costs = modelled_costs(model, sample_tokens=min(SAMPLE_TOKENS, capacity_tokens))
    return split_layers(
        model.num_layers, num_stages, layer_cost=costs.layer, embed_cost=costs.embed, head_cost=costs.head
    )


def split_layers(
    num_layers: int, num_stages: int, *, layer_cost: float = 1.0, embed_cost: float = 0.0, head_cost: float = 0.0
) -> tuple[range, ...]:
    """Cuts layers into contiguous stages, minimising the cost of the slowest.

    cost(s) = layer_cost · layers(s) + embed_cost on the first + head_cost on the last;  layers(s) ≥ 1

    Layers are dealt out one by one, each to the stage that costs least with it. As all layers cost the same, this picks
    the smallest of all costs that stages can reach: no layout has a quicker slowest stage, nor, given that, a quicker
    second slowest. Ties go to the later stage, because an earlier one holds more microbatches in flight.

    Raises:
        ConfigError: `mesh.stages`, more stages than layers.

    >>> [len(stage) for stage in split_layers(32, 4, head_cost=2.4)]
    [8, 9, 9, 6]
    """
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            "mesh.stages",
            f"{num_layers} layers cannot be cut into {num_stages} stages.",
            why="every stage runs one layer at least",
            fix=f"mesh.stages: 1 to {num_layers}",
        )
    if min(layer_cost, embed_cost, head_cost) < 0 or not layer_cost:
        raise ValueError(f"costs must be positive: layer {layer_cost}, embed {embed_cost}, head {head_cost}")
    extra = [0.0] * num_stages
    extra[0] += embed_cost
    extra[-1] += head_cost
    counts = [1] * num_stages
    for _ in range(num_layers - num_stages):
        counts[min(range(num_stages), key=lambda s: (extra[s] + layer_cost * (counts[s] + 1), -s))] += 1
    return _ranges(counts)


def check_layers(layers: Sequence[int], *, num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Turns a job's own numbers of layers per stage into ranges.

    Raises:
        ConfigError: `mesh.layers`, every mistake: another number of stages, a stage without layers, another sum.

    >>> check_layers([3, 1], num_layers=4, num_stages=2)
    (range(0, 3), range(3, 4))
    """
    said = f"mesh.layers: {list(layers)}"
    even = [len(stage) for stage in split_layers(num_layers, num_stages)]  # also refuses too many stages
    fix = f"mesh.layers: {even}, or leave it out"
    problems = [
        (len(layers) != num_stages, f"it names {len(layers)} stages and mesh.stages is {num_stages}."),
        (any(count < 1 for count in layers), "a stage has no layer."),
        (sum(layers) != num_layers, f"it adds up to {sum(layers)} layers and the model has {num_layers}."),
    ]
    errors: list[LoraFusionError] = [
        ConfigError("mesh.layers", what, where=said, fix=fix) for wrong, what in problems if wrong
    ]
    raise_all(errors)
    return _ranges(layers)


def modelled_costs(model: ModelConfig, *, sample_tokens: float = SAMPLE_TOKENS, loss_share: float = 1.0) -> PartCosts:
    """Counts floating-point operations of forward + backward per token over a frozen base (no weight gradients).

    layer = 4 · weights of its linears + 7 · n · H · C,  head = 4 · D · V · loss_share,  embedding = 0

    Causal attention over samples of n tokens takes 2 · n · H · C a token forward (half of a square, two products) and
    2.5 times as much backward. The loss makes two passes of the head's product over rows that count, none over others.
    LoRA's own products are left out: a few per cent of a layer.

    Args:
        sample_tokens: n, Σ length² / Σ length of the samples.
        loss_share: rows that have a target, of all rows.

    >>> config = ModelConfig(family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
    ...                      num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)
    >>> costs = modelled_costs(config)
    >>> round(costs.head / costs.layer, 1)
    2.3
    """
    attention = 7 * sample_tokens * model.num_heads * model.head_dim
    linears = sum(rows * columns for rows, columns in linear_shapes(model).values())
    return PartCosts(
        layer=4 * linears + attention, embed=0.0, head=4 * model.hidden_size * model.vocab_size * loss_share
    )


def linear_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """(in, out) of one layer's seven projections, by name."""
    D, F, C = model.hidden_size, model.intermediate_size, model.head_dim
    query, key = model.num_heads * C, model.num_kv_heads * C
    return {
        "q_proj": (D, query),
        "k_proj": (D, key),
        "v_proj": (D, key),
        "o_proj": (query, D),
        "gate_proj": (D, F),
        "up_proj": (D, F),
        "down_proj": (F, D),
    }


def layer_shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """Shapes of all frozen tensors of one layer: linears, biases, norms."""
    linears = linear_shapes(model)
    biased = {"o_proj": model.o_bias} | dict.fromkeys(("q_proj", "k_proj", "v_proj"), model.qkv_bias)
    biases = [(columns,) for name, (_, columns) in linears.items() if biased.get(name, model.mlp_bias)]
    head_norms = [(model.head_dim,)] * 2 if model.qk_norm else []
    return [*linears.values(), *biases, (model.hidden_size,), (model.hidden_size,), *head_norms]


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(start, end) for start, end in pairwise(accumulate(counts, initial=0)))
