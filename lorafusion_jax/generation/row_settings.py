"""How the next tokens of the rows of an engine are chosen: requests to arrays. B rows"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lorafusion_jax.generation.choose import Choices, Edits
from lorafusion_jax.generation.packing import BASE, power_of_two
from lorafusion_jax.generation.sampling import MODES
from lorafusion_jax.generation.schedule import Running

# Settings beyond these choose the same tokens as the nearest one here, and no logit leaves float32 with these.
TEMPERATURES, PENALTIES, BIASES = (1e-20, 1e20), (1e-9, 1e9), (-1e9, 1e9)
LEAST_P, MOST_K = 1e-30, 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """How the next tokens of all rows are chosen.

    Attributes:
        number_B: of generated tokens.
        slot_B: of adapters, -1 for none.
        seen_BL: tokens that repetition penalties count, -1 for none (None: no logits are edited).
        edits: the others of `Edits`; `seen_BV` is None.
        listed: most probable tokens that are returned.
    """

    number_B: np.ndarray
    slot_B: np.ndarray
    choices: Choices
    mode: str
    seen_BL: np.ndarray | None = None
    edits: Any = None
    listed: int = 0


def row_settings(sequences: Sequence[Running], rows: int) -> RowSettings:
    """The settings of some sequences, each in its row."""
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    choices = Choices(zeros.copy(), np.zeros(rows, np.int32), ones.copy(), zeros.copy(), np.zeros((rows, 2), np.uint32))
    number, slot = np.zeros(rows, np.int32), np.full(rows, BASE, np.int32)
    for sequence in sequences:
        request, _ = sequence.request
        row, sampling = sequence.row, request.sampling
        slot[row], number[row] = sequence.slot, sequence.length - len(request.tokens)
        seed = (sampling.seed >> 32, sampling.seed & 0xFFFFFFFF)
        temperature = _within(sampling.temperature, TEMPERATURES) if sampling.temperature else 0.0
        settings = (temperature, min(sampling.top_k, MOST_K), max(sampling.top_p, LEAST_P), sampling.min_p, seed)
        for values, value in zip(choices, settings, strict=True):
            values[row] = value
    samplings = [sequence.request[0].sampling for sequence in sequences]
    most = max(sampling.logprobs for sampling in samplings)
    edited = any(sampling.edits for sampling in samplings)
    return RowSettings(
        number_B=number,
        slot_B=slot,
        choices=choices,
        mode=max((sampling.mode for sampling in samplings), key=MODES.index),
        listed=power_of_two(most) if most else 0,
        **(_edits(sequences, rows) if edited else {}),
    )


def _edits(sequences: Sequence[Running], rows: int) -> dict[str, Any]:
    """The edits of some sequences, and the tokens that their penalties count."""
    samplings = {sequence.row: sequence.request[0].sampling for sequence in sequences}
    allowed = {row: sampling.allowed_tokens or () for row, sampling in samplings.items()}
    biases = {row: tuple(sampling.logit_bias.items()) for row, sampling in samplings.items()}
    penalty_tokens = {s.row: s.tokens if samplings[s.row].repetition_penalty != 1 else () for s in sequences}

    def table(lists: Mapping[int, Sequence[Any]], fill: Any, dtype: Any) -> np.ndarray:
        array = np.full((rows, power_of_two(max(map(len, lists.values())))), fill, dtype)
        for row, values in lists.items():
            array[row, : len(values)] = values
        return array

    penalty, only = np.ones(rows, np.float32), np.zeros(rows, bool)
    for row, sampling in samplings.items():
        penalty[row], only[row] = _within(sampling.repetition_penalty, PENALTIES), sampling.allowed_tokens is not None
    none: Any = None
    edits = Edits(
        penalty, none, only, table(allowed, -1, np.int32),
        table({row: [token for token, _ in bias] for row, bias in biases.items()}, -1, np.int32),
        table({row: [_within(value, BIASES) for _, value in bias] for row, bias in biases.items()}, 0.0, np.float32),
    )  # fmt: skip
    return {"edits": edits, "seen_BL": table(penalty_tokens, -1, np.int32)}


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])
