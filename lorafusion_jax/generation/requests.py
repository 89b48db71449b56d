"""Requests of an engine and its answers. Never imports jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lorafusion_jax.errors import CheckpointError, ConfigError, LoraFusionError, raise_all
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.generation.packing import BASE
from lorafusion_jax.generation.sampling import GREEDY, Sampling
from lorafusion_jax.generation.slots import Sampler

type End = Literal["stop", "length", "context", "cancelled", "error"]
type Listing = list[tuple[int, float]]  # tokens and their log p, most probable first


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt for one adapter.

    Args:
        tokens: the prompt.
        sampler: of the engine; None: `adapter` says which.
        adapter: index, or `BASE`, for a `Generator`.
        where: name of the prompt in messages.
    """

    tokens: Sequence[int]
    sampler: Sampler | None = None
    adapter: int = BASE
    sampling: Sampling = GREEDY
    where: str = "the prompt"


@dataclass(slots=True, kw_only=True)
class Answer:
    """Tokens that were generated for a request, without the token that ended them.

    log p is that under the adapter: without temperature, edits and filters.

    Attributes:
        logprobs: log p of each token.
        end: "stop": a stop token or text; "length": `max_tokens`; "context": the model's last position; "cancelled";
            "error"; None while tokens are still to come.
        end_token, end_logprob: the stop token that ended them, and its log p; None if none did.
        listed: the most probable tokens at each drawn one, the one that ended them included.
        prompt_logprobs: of each token of the prompt; None for the first, and for those that nobody asked for.
        prompt_listed, prompt_targets: the same for its most probable tokens, and for `Sampling.prompt_targets`.
        error: why there is no more.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: End | None = None
    end_token: int | None = None
    end_logprob: float | None = None
    listed: list[Listing] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_listed: list[Listing | None] = field(default_factory=list)
    prompt_targets: list[list[float | None] | None] = field(default_factory=list)
    error: LoraFusionError | None = None

    @property
    def drawn_tokens(self) -> list[int]:
        """All drawn tokens, the one that ended the answer included."""
        return [*self.tokens, *(() if self.end_token is None else (self.end_token,))]

    @property
    def drawn_logprobs(self) -> list[float]:
        """log p of `drawn_tokens`."""
        return [*self.logprobs, *(() if self.end_logprob is None else (self.end_logprob,))]


def first_scored(request: Request) -> int | None:
    """Index of the first token of a prompt that gets log p; None: none does."""
    sampling, length = request.sampling, len(request.tokens)
    if sampling.prompt_logprobs is None:
        return None
    return max(1, length - (sampling.prompt_last or length))


def turned_lengths(model: ModelConfig) -> list[int]:
    """Lengths from which on longer sequences turn all keys otherwise."""
    scalings = [rope.scaling for rope in model.ropes if rope.scaling and rope.scaling.kind == "longrope"]
    return [scaling.original_max_positions for scaling in scalings]


def check_requests(requests: Sequence[Request], model: ModelConfig) -> None:
    """Checks the lengths and the tokens of prompts.

    Raises:
        LoraFusionError, ErrorList: `generate.empty-prompt`, `generate.token`, `generate.too-long`, `generate.longrope`.
    """
    errors: list[LoraFusionError] = []
    for request in requests:
        length, where, sampling = len(request.tokens), request.where, request.sampling
        scored = () if sampling.prompt_logprobs is None else request.tokens[1:][-(sampling.prompt_last or length) :]
        predicted = {
            "its allowed_tokens": sampling.allowed_tokens or (),
            "its logit_bias": tuple(sampling.logit_bias),
            "its prompt_targets": tuple(t for tokens in sampling.prompt_targets for t in tokens if t != -1),
            "its prompt, whose log p it asks for,": scored,
        }
        tokens_by_name = {where: request.tokens, f"{where}: its stop_tokens": sampling.stop_tokens or ()}
        if not length:
            message = f"{where} has no token."
            errors.append(ConfigError("generate.empty-prompt", message, fix="a text, or at least one message"))
        elif length >= model.positions:
            message = f"{where} has {length} tokens, and the model knows {model.positions} positions."
            errors.append(CheckpointError("generate.too-long", message, fix="a shorter prompt"))
        for name, tokens in tokens_by_name.items():
            if outside := _outside(tokens, model.vocab_size):
                message = f"{name} has the token {outside[0]}, and the model has tokens 0 to {model.vocab_size - 1}."
                errors.append(ConfigError("generate.token", message, fix="the tokens of this base's tokenizer"))
        for name, tokens in predicted.items():
            if outside := _outside(tokens, model.num_outputs):
                message = f"{where}: {name} has {outside[0]}, and the model predicts {model.num_outputs - 1} at most."
                errors.append(ConfigError("generate.token", message, fix="tokens from 0 to this one"))
        total = length + sampling.max_tokens
        for original in turned_lengths(model):
            if length <= original < min(total, model.positions):
                message = f"{where} and its answer may cross {original} positions."
                why = "longrope turns all earlier keys by other angles from there on"
                most = original - length
                fix = f"max_tokens={most}" if most else "a longer or shorter prompt"
                errors.append(ConfigError("generate.longrope", message, why=why, fix=fix))
    raise_all(errors)


def _outside(tokens: Sequence[Any], size: int) -> list[Any]:
    """What is no token of a vocabulary."""

    def is_token(token: Any) -> bool:
        is_int = isinstance(token, int | np.integer) and not isinstance(token, bool)
        return is_int and 0 <= int(token) < size

    return [token for token in tokens if not is_token(token)]
