"""What a stage computes in a pass, of its arrays: with programs of their own, or as parts of one that is traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jax import Array

from lorafusion_jax.adapters.tokens import Table
from lorafusion_jax.families.per_layer_input import POSITIONS, TABLE
from lorafusion_jax.generation.choose import Chosen
from lorafusion_jax.generation.programs import Position, Slots
from lorafusion_jax.models.stream import activations, joined
from lorafusion_jax.session.inputs import Inputs

type Sharing = Sequence[Mapping[str, tuple[int, int]]]  # see `StagePasses.sharing`


class StageArrays(NamedTuple):
    """What the programs of a stage read besides its caches.

    Attributes:
        weights, leaves, numbers: frozen weights, adapters and number of the first layer of each block of layers.
        token_rows: trained tokens, by table.
        ends: embedding, what makes the inputs of layers beside it, final norm and head.
    """

    weights: list[tuple[Any, ...]]
    leaves: list[tuple[Any, ...]]
    numbers: list[Array]
    slots: Slots
    token_rows: dict[Table, tuple[Array, Array | None]]
    ends: tuple[Any, dict[str, Array], Any, Any]


def next_activations(
    programs: Any, arrays: StageArrays, sharing: Sharing, caches: list[Any], tokens_B: Array, at: Position, x: Any
) -> tuple[Any, Position, list[Any]]:
    """Runs the next token of every sequence through a stage."""
    inputs, after = programs.next_inputs(at, arrays.slots)
    if arrays.ends[0] is not None:
        x, inputs = embedded(programs, arrays, inputs, tokens_B, at.slot_B, at.position_B)
    x, caches = through_layers(programs, arrays, sharing, caches, x, inputs)
    return x, after, caches


def choose_next(
    programs: Any, arrays: StageArrays, x: Any, last_B: Array | None, before: Chosen, number_B: Array,
    options: tuple[Any, ...], edits: Any,
) -> tuple[Chosen, Array, Any]:  # fmt: skip
    """Chooses the next token of every sequence; `last_B` names its row (None: it is its only one)."""
    choices, slot_B, mode, listed = options
    head = programs.head(mode, edits is not None, listed, last_B is None)
    last_B = number_B if last_B is None else last_B
    return head(*arrays.ends[2:], x, last_B, before, number_B, choices, edits, slot_B, *arrays.token_rows["head"])


def embedded(
    programs: Any, arrays: StageArrays, inputs: Inputs, tokens_T: Array, slot_T: Array, position_T: Array
) -> tuple[Array, Inputs]:
    table, weights, *_ = arrays.ends
    x_TD = programs.embed(table, tokens_T, slot_T, *arrays.token_rows["embed"])
    if POSITIONS in weights:
        x_TD = programs.add_positions(weights[POSITIONS], x_TD, position_T)
    if TABLE not in weights:
        return x_TD, inputs
    of_layers = programs.own_inputs(weights, tokens_T, x_TD)
    return x_TD, inputs._replace(layers=replace(inputs.layers, of_layers=of_layers))


def through_layers(
    programs: Any, arrays: StageArrays, sharing: Sharing, caches: list[Any], x: Any, inputs: Any
) -> tuple[Array, list[Any]]:
    caches = [*caches]
    for index, (weights, leaves, number) in enumerate(zip(arrays.weights, arrays.leaves, arrays.numbers, strict=True)):
        earlier = {module: caches[block][layer] for module, (block, layer) in sharing[index].items()}
        output, filled = programs.run_block(weights, leaves, caches[index], earlier, number, x, inputs)
        caches[index] = tuple(filled)
        x = joined(output, x)
    return activations(x), caches
