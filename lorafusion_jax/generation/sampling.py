"""How the next token of a sequence is chosen. Never imports jax."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lorafusion_jax.errors import ConfigError, LoraFusionError, raise_all

MOST_SEED = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of one request, in the order in which they apply.

    Args:
        max_tokens: new tokens at most.
        temperature: divides the logits; 0 always takes the most probable token.
        top_k: keeps the k most probable tokens (0: all).
        top_p: keeps the fewest tokens whose probabilities sum to at least this.
        seed: of the draws. A request draws the same tokens alone and in every batch, but for rounding of the logits.
        stop: texts that end an answer; they are not part of it.

    Raises:
        ConfigError, ErrorList: `generate.setting`, a value is out of range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop  # otherwise its letters would be the texts
        object.__setattr__(self, "stop", tuple(stop) if isinstance(stop, list) else stop)
        raise_all(list(self._errors()))

    @property
    def mode(self) -> str:
        """The cheapest program that serves it: "greedy", "sampled", or "filtered", which sorts the vocabulary."""
        if self.temperature == 0:
            return MODES[0]
        return MODES[1] if self.top_k == 0 and self.top_p == 1 else MODES[2]

    def _errors(self) -> Iterable[LoraFusionError]:
        checks = (
            ("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 1, "a whole number from 1"),
            ("temperature", _is_number(self.temperature) and self.temperature >= 0, "a number from 0"),
            ("top_k", _is_int(self.top_k) and self.top_k >= 0, "a whole number from 0 (0: off)"),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0, at most 1"),
            ("seed", _is_int(self.seed) and 0 <= self.seed <= MOST_SEED, f"a whole number from 0 to {MOST_SEED}"),
            ("stop", _are_texts(self.stop), "a text or texts that are not empty"),
        )
        for name, holds, wanted in checks:
            if not holds:
                message = f"{name} must be {wanted}, not {getattr(self, name)!r}."
                yield ConfigError("generate.setting", message)


MODES = ("greedy", "sampled", "filtered")  # a later one serves the settings of those before it


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


GREEDY = Sampling()
