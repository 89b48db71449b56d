"""Calls of a training client: what it asks for, what comes back, and what is refused. Never imports jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from lorafusion_jax.errors import CallError
from lorafusion_jax.objective.rows import MOST_TARGETS, RowNumbers, read_config, read_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence with the inputs of its loss.

    Args:
        tokens: N of them.
        inputs: by the names of Tinker's `loss_fn_inputs`; see `objective.rows`.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """Adds the gradients of the sum of the rows' losses, or computes their log-probabilities alone.

    Args:
        loss: see `objective.rows.LOSSES`.
        config: settings of the loss, `loss_fn_config`.
        forward_only: nothing is added.
    """

    rows: Sequence[Row]
    loss: str = "cross_entropy"
    config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """A step of AdamW with what was added since the last one; without any of it, with zeros.

    Args:
        grad_clip_norm: 0: no clipping.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """Reads the state of the adapter, with gradients that no step has used yet.

    Args:
        optimizer: False: the weights alone.
    """

    optimizer: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """Replaces the state of the adapter.

    Args:
        state: an `AdapterState`.
        optimizer: False: the optimizer begins anew, and gradients that no step has used are dropped.
    """

    state: Any
    optimizer: bool = True


type Call = ForwardBackward | OptimStep | SaveState | LoadState


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsResult:
    """Result of `ForwardBackward`.

    Attributes:
        outputs: of each row "logprobs", float32 of the shape of its targets; of cross-entropy "elementwise_loss", too.
        metrics: "loss:sum"; the part behind the colon says how results of parts of a call are combined.
    """

    outputs: list[dict[str, np.ndarray]]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """Result of `OptimStep`; `step` counts from 1."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a row must fit into: tokens of a microbatch, and those that the model reads and predicts."""

    tokens: int
    vocab_size: int
    num_outputs: int


def read_rows(call: ForwardBackward, capacity: Capacity) -> list[tuple[np.ndarray, RowNumbers]]:
    """Checks the rows of a call. Returns their tokens and numbers.

    Raises:
        CallError: `call.loss`, `call.loss-config`, `call.inputs`, `call.targets`, `call.tokens`, `call.too-long`.
    """
    config = read_config(call.loss, call.config)
    if not len(call.rows):
        raise CallError("call.inputs", "a call without data.", fix="at least one datum")
    rows: list[tuple[np.ndarray, RowNumbers]] = []
    for number, row in enumerate(call.rows):
        where = f"datum {number}"
        tokens = _tokens(row.tokens, capacity, where)
        sizes = {"num_tokens": len(tokens), "vocab_size": capacity.num_outputs}
        rows.append((tokens, read_row(row.inputs, call.loss, config, where=where, **sizes)))
    return rows


def check_step(call: OptimStep) -> None:
    """Checks the numbers of a step.

    Raises:
        CallError: `call.optimizer`.
    """
    for entry in fields(call):
        value, top = getattr(call, entry.name), 1.0 if entry.name.startswith("beta") else np.inf
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < top or (entry.name == "eps" and not np.float32(value)):
            valid_range = "a number from 0 to below 1" if top == 1 else "a finite number of at least 0"
            raise CallError(
                "call.optimizer",
                f"{entry.name} is {value!r}, not {'a number above 1e-45' if entry.name == 'eps' else valid_range}.",
            )


def dense(
    values: np.ndarray, crow: np.ndarray, col: np.ndarray, shape: Sequence[int], pad: float = 0, *, where: str = ""
) -> np.ndarray:
    """Returns a matrix from its compressed rows (CSR), with `pad` where nothing is listed.

    Raises:
        CallError: `call.inputs`, the arrays are no such matrix, or it is wider than targets may be.

    >>> dense(np.array([5, 6]), np.array([0, 1, 1, 2]), np.array([1, 0]), (3, 2)).tolist()
    [[0, 5], [0, 0], [6, 0]]
    """
    values, crow, col = (np.asarray(array).reshape(-1) for array in (values, crow, col))
    rows, columns = shape if len(shape) == 2 else (-1, 0)
    fits = 0 <= rows == len(crow) - 1 and 0 < columns <= MOST_TARGETS and len(values) == len(col)
    if fits:
        counts = np.diff(crow)
        fits = crow[0] == 0 and crow[-1] == len(col) and (counts >= 0).all() and (counts <= columns).all()
        fits = bool(fits) and (not len(col) or 0 <= col.min() <= col.max() < columns)
    if not fits:
        why = f"shape {list(shape)}, {len(values)} values, {len(crow)} row pointers, {len(col)} columns"
        raise CallError("call.inputs", "a sparse tensor is not a valid CSR matrix.", where=where, why=why)
    matrix = np.full((rows, columns), pad, values.dtype)
    matrix[np.repeat(np.arange(rows), np.diff(crow)), col] = values
    return matrix


def _tokens(array: np.ndarray, capacity: Capacity, where: str) -> np.ndarray:
    tokens = np.asarray(array)
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
        shape = f"the shape {list(tokens.shape)} and type {tokens.dtype}"
        raise CallError("call.tokens", f"model_input has {shape}, not one row of token ids.", where=where)
    if len(tokens) > capacity.tokens:
        raise CallError(
            "call.too-long",
            f"model_input has {len(tokens)} tokens, and a microbatch of the session holds {capacity.tokens}.",
            where=where,
            fix=f"shorter data, or a session with batch.capacity_tokens of at least {len(tokens)}",
        )
    if not 0 <= tokens.min() <= tokens.max() < capacity.vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= capacity.vocab_size)][0]
        why = f"the model has the tokens 0 to {capacity.vocab_size - 1}"
        raise CallError("call.tokens", f"model_input holds the token {wrong}.", where=where, why=why)
    return tokens.astype(np.int32)
