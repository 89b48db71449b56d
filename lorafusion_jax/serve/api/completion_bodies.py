"""Bodies of completions, with the names of OpenAI's API. What is not served is refused by its name."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, WithJsonSchema, model_validator

from lorafusion_jax.generation.sampling import MOST_SEED, Sampling
from lorafusion_jax.serve.api.chat_messages import (
    LONGEST_TEXT,
    ChatMessage,
    Label,
    NotServed,
    NotServedTable,
    conversation,
)

MOST_ANSWERS, MOST_PROMPTS = 128, 128
MOST_STOPS, LONGEST_STOP = 16, LONGEST_TEXT
_STOP = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}
STOPS = {"anyOf": [_STOP, {"type": "array", "maxItems": MOST_STOPS, "items": _STOP}, {"type": "null"}]}
_TEXT = {"type": "string", "maxLength": LONGEST_TEXT}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_MANY = {"type": "array", "minItems": 1, "maxItems": MOST_PROMPTS}
PROMPTS = {"anyOf": [_TEXT, _IDS, _MANY | {"items": _TEXT}, _MANY | {"items": _IDS}]}
Count = Annotated[int, Field(ge=1, le=2**31)]
Number = Annotated[float, Field(allow_inf_nan=False)]


def _stops(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return None
    if not isinstance(texts, list) or len(texts) > MOST_STOPS:
        raise ValueError(f"a text, or a list of at most {MOST_STOPS} texts")
    if not all(isinstance(text, str) and 0 < len(text) <= LONGEST_STOP for text in texts):
        raise ValueError(f"texts of 1 to {LONGEST_STOP} characters")
    return texts


Stops = Annotated[Any, BeforeValidator(_stops), WithJsonSchema(STOPS)]


def _prompts(value: Any) -> Any:
    """Returns a list of prompts: of texts, or of lists of token ids."""
    values = value if isinstance(value, list) else [value]
    is_tokens = bool(values) and all(map(_is_token, values))
    prompts = [values] if is_tokens else values
    for_text = [isinstance(prompt, str) and len(prompt) <= LONGEST_TEXT for prompt in prompts]
    for_ids = [isinstance(prompt, list) and bool(prompt) and all(map(_is_token, prompt)) for prompt in prompts]
    if not 0 < len(prompts) <= MOST_PROMPTS or not (all(for_text) or all(for_ids)):
        many = f"1 to {MOST_PROMPTS} of either in a list"
        raise ValueError(f"a text of at most {LONGEST_TEXT} characters, a list of token ids (from 0), or {many}")
    return prompts


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


Prompts = Annotated[Any, BeforeValidator(_prompts), WithJsonSchema(PROMPTS)]


class StreamOptions(BaseModel):
    """Of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: NotServed = None


class Body(BaseModel):
    """What both kinds of completions have. `user`, `metadata` and the like are labels, which nothing depends on.

    `top_k`, `min_p` and `repetition_penalty` are no part of OpenAI's API; servers of open models have them.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    model: Label
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    seed: int | None = None
    stop: Stops = None
    logit_bias: dict[Label, Number] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Label | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    prompt_cache_options: dict[str, Any] | None = None
    presence_penalty: NotServed = None
    frequency_penalty: NotServed = None

    @model_validator(mode="after")
    def _check_stream(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream")
        return self

    def sampling(self, max_tokens: int | None, logprobs: int) -> dict[str, Any]:
        """The settings of `Sampling` that it names; the seed is drawn if it names none.

        Raises:
            ConfigError, ErrorList: `generate.setting`.
        """
        values: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "seed": secrets.randbelow(2**63) if self.seed is None else self.seed % (MOST_SEED + 1),
            "stop": tuple(self.stop or ()),
            "logit_bias": self.logit_bias,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
        }
        values = {name: value for name, value in values.items() if value is not None}
        Sampling(**values)
        return values


class CompletionBody(Body):
    """A text that goes on."""

    prompt: Prompts
    max_tokens: Count | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    echo: NotServed = None
    suffix: NotServed = None

    @model_validator(mode="after")
    def _check_best(self) -> Any:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of: this service does not choose among answers; it must be n, or left out")
        return self

    def values(self) -> dict[str, Any]:
        """What the worker reads."""
        sampling = self.sampling(16 if self.max_tokens is None else self.max_tokens, self.logprobs or 0)
        return {"messages": None, "prompts": self.prompt, "sampling": sampling, "scored": self.logprobs is not None}


def _form(value: Any) -> Any:
    if value not in (None, {"type": "text"}):
        raise ValueError('texts are not forced into a form: {"type": "text"}, or leave it out')
    return value


ResponseFormat = Annotated[Any, BeforeValidator(_form), WithJsonSchema({"type": "object"})]


class ChatBody(Body):
    """A conversation, of which the model writes the next message."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat = None
    tools: NotServed = None
    tool_choice: NotServed = None
    functions: NotServed = None
    function_call: NotServed = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    audio: NotServedTable = None
    prediction: NotServedTable = None
    reasoning_effort: NotServed = None
    verbosity: NotServed = None
    web_search_options: NotServedTable = None
    service_tier: Literal["auto", "default"] | None = None
    store: NotServed = None
    moderation: NotServedTable = None
    _turns: list[dict[str, Any]] = PrivateAttr()

    @model_validator(mode="after")
    def _check_pairs(self) -> Any:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens say one thing: give one, or equal ones")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        self._turns = conversation(self.messages)
        return self

    def values(self) -> dict[str, Any]:
        """What the worker reads."""
        sampling = self.sampling(self.max_completion_tokens or self.max_tokens, self.top_logprobs or 0)
        return {"messages": self._turns, "prompts": [], "sampling": sampling, "scored": bool(self.logprobs)}
