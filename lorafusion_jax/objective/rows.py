"""Losses of rows that a client sends with all their numbers: sums over positions, without a mean. Never imports jax.

A row is one sequence of N tokens. Each position has K targets, and a loss that is a function of their log-probabilities
and of the position's own numbers. So the kind of loss and its thresholds are data, and all kinds share one program.

p log-probability of a target · q that of the sampler · r = exp(p - q) · A advantage · w weight

| loss | of a position | inputs |
|---|---|---|
| cross_entropy | -Σ_k w_k p_k | weights (1) |
| importance_sampling | -w r A | logprobs (q), advantages, weights (1) |
| ppo | -w min(r A, clip(r, low, high) A) | those, and clip thresholds (0.8, 1.2) |
| cispo | -w clip(r, low, high) A p, the ratio without a gradient | those of ppo |
| dro | -w (p A - β/2 (p - q)²) | those of importance_sampling; β (0.05) |
| gspo | that of ppo with r = exp(mean of p - q over the sequence), and each token's own gradient | those of ppo, and \
sequence_ratio_mask |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lorafusion_jax.errors import CallError, did_you_mean

MOST_TARGETS = 64
TARGETS, WEIGHTS, OLD, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
LOW, HIGH, RATIO_MASK, BETA = "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask", "beta"
CLIPS = {LOW: 0.8, HIGH: 1.2}
# How the loss of a position follows from its numbers; see `position_terms`. 0: the position has no row.
NO_ROW, LINEAR, RATIO, CLIPPED, SEQUENCE = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoss:
    """A loss that calls can name.

    Args:
        kind: how it follows from the numbers of a position.
        needs: inputs besides the targets.
        config: settings of a call with their defaults.
    """

    kind: int
    needs: tuple[str, ...] = (OLD, ADVANTAGES)
    config: Mapping[str, float]


LOSSES: Mapping[str, RowLoss] = {
    "cross_entropy": RowLoss(kind=LINEAR, needs=(), config={}),
    "importance_sampling": RowLoss(kind=RATIO, config={}),
    "ppo": RowLoss(kind=RATIO, config=CLIPS),
    "cispo": RowLoss(kind=CLIPPED, config=CLIPS),
    "dro": RowLoss(kind=LINEAR, config={BETA: 0.05}),
    "gspo": RowLoss(kind=SEQUENCE, needs=(OLD, ADVANTAGES, RATIO_MASK), config=CLIPS),
}


class RowNumbers(NamedTuple):
    """The numbers of a row's positions: what decides its loss, given the log-probabilities.

    Attributes:
        targets: int32 [N, K].
        factors: float32 [N, K], w_k of cross-entropy; else w A.
        old: float32 [N], q.
        low, high: float32 [N], the ratio is clipped to them.
        beta: float32 [N], w β.
        in_ratio: bool [N], tokens of the sequence's ratio.
    """

    kind: int
    targets: np.ndarray
    factors: np.ndarray
    old: np.ndarray
    low: np.ndarray
    high: np.ndarray
    beta: np.ndarray
    in_ratio: np.ndarray

    @property
    def learned(self) -> np.ndarray:
        """Positions with a gradient, bool [N]."""
        return (self.factors != 0).any(-1) | (self.beta != 0)


def position_terms(
    xp: Any, kind: Any, factors: Any, old: Any, low: Any, high: Any, beta: Any, logprobs: Any, sequence: Any
) -> tuple[Any, Any]:
    """Returns the losses of positions, [n, K], and their derivatives with respect to the log-probabilities.

    Args:
        xp: numpy or jax.numpy.
        kind, old, low, high, beta: [n], see `RowNumbers`.
        factors, logprobs: [n, K].
        sequence: [n], log of the sequence's ratio; used by `SEQUENCE` only.
    """
    p, factor = logprobs[:, 0], factors[:, 0]
    difference = p - old
    ratio = xp.exp(xp.where(kind == SEQUENCE, sequence, difference))
    clipped = xp.clip(ratio, low, high)
    outside = ((factor > 0) & (ratio > high)) | ((factor < 0) & (ratio < low)) | (factor == 0)
    by_ratio = xp.where(outside, clipped, ratio) * factor
    is_linear, is_clipped = (kind == LINEAR), (kind == CLIPPED)
    # Of a loss of ratios, 0 · infinity would be NaN; a factor of 0 has no loss.
    by_ratio = xp.where(factor == 0, 0.0, by_ratio)
    cispo = xp.where(factor == 0, 0.0, clipped * factor)
    loss = xp.where(is_clipped, -cispo * p, -by_ratio)
    slope = xp.where(is_clipped, -cispo, xp.where(outside, 0.0, -by_ratio))
    quadratic = xp.where(beta == 0, 0.0, beta * difference)
    first = xp.arange(factors.shape[1]) == 0
    linear = xp.where(factors == 0, 0.0, -factors * logprobs) + xp.where(
        first, (0.5 * quadratic * difference)[:, None], 0
    )
    linear_slope = -factors + xp.where(first, quadratic[:, None], 0)
    linear_rows = is_linear[:, None]
    losses = xp.where(linear_rows, linear, xp.where(first, loss[:, None], 0.0))
    return losses, xp.where(linear_rows, linear_slope, xp.where(first, slope[:, None], 0.0))


def row_losses(numbers: RowNumbers, logprobs: np.ndarray) -> np.ndarray:
    """Returns the losses of a row's positions from its log-probabilities [N, K], float64 [N, K].

    >>> row = read_row({"target_tokens": np.array([1, 2])}, "cross_entropy", {}, num_tokens=2, vocab_size=4)
    >>> row_losses(row, np.array([[-1.0], [-0.5]]))[:, 0].tolist()
    [1.0, 0.5]
    """
    wide = np.asarray(logprobs, np.float64)
    sequence = 0.0
    if numbers.kind == SEQUENCE:
        sequence = float((wide[:, 0] - numbers.old)[numbers.in_ratio].mean())
    kind, sequence = np.full(len(wide), numbers.kind), np.full(len(wide), sequence)
    factors, old, low, high, beta = (np.asarray(array, np.float64) for array in numbers[2:7])
    with np.errstate(over="ignore", invalid="ignore"):  # a ratio may overflow: then the loss is infinite
        return position_terms(np, kind, factors, old, low, high, beta, wide, sequence)[0]


def loss_of(name: str) -> RowLoss:
    """Finds a loss by its name.

    Raises:
        CallError: `call.loss`.
    """
    if (entry := LOSSES.get(name)) is not None:
        return entry
    raise CallError(
        "call.loss",
        f"the loss '{name}' is not served; {did_you_mean(name, LOSSES)}".rstrip("; ") + ".",
        why=f"losses are {', '.join(LOSSES)}",
        fix="one of them, or forward_backward_custom, which takes any function of the log-probabilities",
    )


def read_config(name: str, config: Mapping[str, float | str] | None) -> dict[str, float]:
    """Returns the settings of a call.

    Raises:
        CallError: `call.loss`, `call.loss-config`.
    """
    entry, numbers = loss_of(name), {}
    for key, value in (config or {}).items():
        if key not in entry.config:
            has = f"the settings {', '.join(entry.config)}" if entry.config else "no settings"
            raise CallError("call.loss-config", f"loss_fn_config has '{key}', and {name} has {has}.", fix="remove it")
        numbers[key] = _number(name, key, value)
    return numbers


def read_row(
    inputs: Mapping[str, np.ndarray],
    name: str,
    config: Mapping[str, float],
    *,
    num_tokens: int,
    vocab_size: int,
    where: str = "",
) -> RowNumbers:
    """Reads the inputs of a loss of one row.

    Args:
        config: from `read_config`.
        num_tokens: N.
        where: names the row in messages.

    Raises:
        CallError: `call.loss`, `call.inputs`, `call.targets`.
    """
    entry = loss_of(name)
    _check_names(inputs, name, entry, where)
    targets = _targets(inputs[TARGETS], name, num_tokens, vocab_size, where)
    read_input = _reader(inputs, targets.shape, where)
    weights = read_input(WEIGHTS, 1.0) if targets.ndim == 1 else read_input(WEIGHTS, 1.0, by_target=True)
    nothing = np.zeros(num_tokens, np.float32)
    old, beta = nothing, nothing
    low, high = np.zeros(num_tokens, np.float32), np.full(num_tokens, np.inf, np.float32)
    if ADVANTAGES in entry.needs:
        if (weights < 0).any():
            why = "weights of advantages only choose positions"
            raise CallError(
                "call.inputs", f"weights of {name} are below 0.", where=where, why=why, fix="change advantages"
            )
        old = read_input(OLD)
        beta = weights * np.float32(config.get(BETA, entry.config.get(BETA, 0.0)))
        weights = weights * read_input(ADVANTAGES)
    if LOW in entry.config:
        low, high = (_threshold(inputs, read_input, config, key, where) for key in (LOW, HIGH))
        if (low < 0).any() or (low > high).any():
            raise CallError("call.inputs", f"not 0 ≤ {LOW} ≤ {HIGH} at every position.", where=where)
    in_ratio = np.zeros(num_tokens, bool)
    if RATIO_MASK in entry.needs:
        in_ratio = read_input(RATIO_MASK) != 0
        if not in_ratio.any():
            why, fix = "the ratio of a sequence is a mean over its tokens", "1 where a token was sampled"
            raise CallError("call.inputs", f"{RATIO_MASK} marks no token.", where=where, why=why, fix=fix)
    by_target = (num_tokens, -1)
    return RowNumbers(
        entry.kind, targets.reshape(by_target), weights.reshape(by_target), old, low, high, beta, in_ratio
    )


def _check_names(inputs: Mapping[str, np.ndarray], name: str, entry: RowLoss, where: str) -> None:
    required_names = (TARGETS, *entry.needs)
    if missing := [key for key in required_names if key not in inputs]:
        raise CallError("call.inputs", f"{name} needs the inputs {', '.join(missing)}.", where=where)
    allowed = (*required_names, WEIGHTS, *(key for key in entry.config if key in CLIPS))
    if unknown := [key for key in inputs if key not in allowed]:
        raise CallError(
            "call.inputs",
            f"{name} has no inputs {', '.join(unknown)}.",
            where=where,
            why=f"it has {', '.join(allowed)}",
            fix="remove what it does not use",
        )


def _targets(array: np.ndarray, name: str, num_tokens: int, vocab_size: int, where: str) -> np.ndarray:
    targets = np.asarray(array)
    needs = LOSSES[name].needs
    if targets.ndim not in ((1,) if needs else (1, 2)) or targets.shape[:1] != (num_tokens,):
        shapes = "[N]" if needs else "[N] or [N, K]"
        raise CallError(
            "call.targets",
            f"{TARGETS} has the shape {list(targets.shape)}, and model_input has {num_tokens} tokens.",
            where=where,
            why=f"{name} takes targets of shape {shapes}, one row for each token",
        )
    if targets.ndim == 2 and not 0 < targets.shape[1] <= MOST_TARGETS:
        raise CallError(
            "call.targets", f"{targets.shape[1]} targets at each position, not 1 to {MOST_TARGETS}.", where=where
        )
    if targets.dtype.kind not in "iu":
        raise CallError("call.targets", f"{TARGETS} holds {targets.dtype}, not whole numbers.", where=where)
    if targets.size and not 0 <= targets.min() <= targets.max() < vocab_size:
        wrong = targets[(targets < 0) | (targets >= vocab_size)].flat[0]
        why = f"the model predicts the tokens 0 to {vocab_size - 1}"
        raise CallError("call.targets", f"{TARGETS} holds {wrong}.", where=where, why=why)
    return targets.astype(np.int32)


def _reader(inputs: Mapping[str, np.ndarray], shape: Sequence[int], where: str) -> Callable[..., np.ndarray]:
    """Returns a function that reads an input of finite numbers, float32 of the shape of the targets or [N]."""

    def read(key: str, default: float | None = None, *, by_target: bool = False) -> np.ndarray:
        input_shape = tuple(shape) if by_target else tuple(shape[:1])
        if key not in inputs and default is not None:
            return np.full(input_shape, default, np.float32)
        array = np.asarray(inputs[key])
        if array.dtype.kind not in "fiub":
            raise CallError("call.inputs", f"{key} holds {array.dtype}, not numbers.", where=where)
        if array.shape != input_shape:
            shapes = f"{key} has the shape {list(array.shape)}, and {TARGETS} has {list(shape)}."
            raise CallError("call.inputs", shapes, where=where, fix=f"shape {list(input_shape)}")
        if not np.isfinite(array).all():
            at = int(np.argmin(np.isfinite(array).reshape(len(array), -1).all(1)))
            raise CallError("call.inputs", f"{key} is not finite at position {at}.", where=where)
        return array.astype(np.float32)

    return read


def _threshold(
    inputs: Mapping[str, np.ndarray], read: Callable[..., np.ndarray], config: Mapping[str, float], key: str, where: str
) -> np.ndarray:
    values = read(key, config.get(key, CLIPS[key]))
    if key in inputs and key in config and (values != np.float32(config[key])).any():
        raise CallError("call.inputs", f"{key} of loss_fn_inputs differs from that of loss_fn_config.", where=where)
    return values


def _number(name: str, key: str, value: float | str) -> float:
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not np.isfinite(number):
        raise CallError("call.loss-config", f"{key} of {name} is {value!r}, not a finite number.")
    return number
