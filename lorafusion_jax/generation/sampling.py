"""How the next token of a sequence is chosen. Never imports jax."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lorafusion_jax.errors import ConfigError, LoraFusionError, raise_all

MOST_SEED = 2**64 - 1
MOST_LISTED = 64  # most probable tokens whose log p an answer can have


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of one request, in the order in which they apply.

    Args:
        max_tokens: new tokens at most; 0 only with `prompt_logprobs`.
        repetition_penalty: divides positive logits of tokens that the prompt or the answer has, and multiplies negative
            ones.
        logit_bias: adds to the logits of tokens, by id.
        allowed_tokens: ids of which every token is one (None: all).
        temperature: divides the logits; 0 always takes the most probable token.
        top_k: keeps the k most probable tokens (0: all).
        top_p: keeps the fewest tokens whose probabilities sum to at least this.
        min_p: keeps tokens that are at least this times as probable as the most probable one.
        seed: of the draws. A request draws the same tokens alone and in every batch, but for rounding of the logits.
        stop: texts that end an answer; they are not part of it.
        stop_tokens: ids that end an answer (None: those of the model).
        logprobs: number of most probable tokens whose log p each token of the answer has beside it.
        prompt_logprobs: the same for tokens of the prompt (0: log p of the prompt's own tokens only; None: nothing).
        prompt_last: tokens at the end of the prompt that have log p (None: all but the first).
        prompt_targets: ids whose log p positions of the prompt have beside it, for each token; -1 for none.

    Raises:
        ConfigError, ErrorList: `generate.setting`, a value is out of range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] | None = None
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_tokens: tuple[int, ...] | None = None
    logprobs: int = 0
    prompt_logprobs: int | None = None
    prompt_last: int | None = None
    prompt_targets: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop  # otherwise its letters would be the texts
        object.__setattr__(self, "stop", tuple(stop) if isinstance(stop, list) else stop)
        for name in ("stop_tokens", "allowed_tokens"):
            if isinstance(ids := getattr(self, name), list):
                object.__setattr__(self, name, tuple(ids))
        if isinstance(self.logit_bias, Mapping):  # keys of JSON are texts
            bias = {int(key) if str(key).isdecimal() else key: value for key, value in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", bias if len(bias) == len(self.logit_bias) else None)
        raise_all(list(self._errors()))

    @property
    def mode(self) -> str:
        """The cheapest program that serves it: "greedy", "sampled", or "filtered", which sorts the vocabulary."""
        if self.temperature == 0:
            return MODES[0]
        return MODES[1] if self.top_k == 0 and self.top_p == 1 and self.min_p == 0 else MODES[2]

    @property
    def edits(self) -> bool:
        """Whether it changes logits other than by the temperature."""
        return self.repetition_penalty != 1 or bool(self.logit_bias) or self.allowed_tokens is not None

    def _errors(self) -> Iterable[LoraFusionError]:
        least = 1 if self.prompt_logprobs is None else 0
        listing_range = f"a whole number from 0 to {MOST_LISTED}"
        checks = (
            ("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= least, f"a whole number from {least}"),
            ("temperature", _is_number(self.temperature) and self.temperature >= 0, "a number from 0"),
            ("top_k", _is_int(self.top_k) and self.top_k >= 0, "a whole number from 0 (0: off)"),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0, at most 1"),
            ("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 to 1 (0: off)"),
            ("seed", _is_int(self.seed) and 0 <= self.seed <= MOST_SEED, f"a whole number from 0 to {MOST_SEED}"),
            ("stop", _are_texts(self.stop), "a text or texts that are not empty"),
            ("stop_tokens", self.stop_tokens is None or _are_ids(self.stop_tokens), "token ids, or None"),
            (
                "repetition_penalty",
                _is_number(self.repetition_penalty) and self.repetition_penalty > 0,
                "a number above 0 (1: off)",
            ),
            ("logit_bias", _is_bias(self.logit_bias), "numbers by token id, each id once"),
            (
                "allowed_tokens",
                self.allowed_tokens is None or (_are_ids(self.allowed_tokens) and bool(self.allowed_tokens)),
                "token ids, at least one, or None",
            ),
            ("logprobs", _is_int(self.logprobs) and 0 <= self.logprobs <= MOST_LISTED, listing_range),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None
                or (_is_int(self.prompt_logprobs) and 0 <= self.prompt_logprobs <= MOST_LISTED),
                f"{listing_range}, or None",
            ),
            (
                "prompt_last",
                self.prompt_last is None or (_is_int(self.prompt_last) and self.prompt_last >= 1),
                "a whole number from 1, or None",
            ),
        )
        for name, holds, valid_values in checks:
            if not holds:
                message = f"{name} must be {valid_values}, not {getattr(self, name)!r}."
                yield ConfigError("generate.setting", message, where=name)


MODES = ("greedy", "sampled", "filtered")  # a later one serves the settings of those before it


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


def _are_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(_is_int(token) and token >= 0 for token in value)


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_int(token) and token >= 0 and _is_number(bias) for token, bias in value.items()
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


GREEDY = Sampling()
