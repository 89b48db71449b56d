"""Completions in a worker: prompts to tokens with an adapter's own chat template, answers to texts while they grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lorafusion_jax.data.prompts import prompt_tokens
from lorafusion_jax.data.tokenizer import Tokenizer
from lorafusion_jax.generation.answer_text import AnswerTexts, TextStream
from lorafusion_jax.generation.requests import Answer, Listing
from lorafusion_jax.generation.sampling import MOST_SEED, Sampling
from lorafusion_jax.serve.wire import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Answers to texts, messages or tokens.

    Args:
        pairs: the tokens of the prompt and the settings of each answer.
        prompt_tokens: of all prompts, each counted once.
        is_streamed: whether parts of answers are told before they end.
        is_scored: whether log p of their tokens is told.
        streams: of the answers.
    """

    pairs: list[tuple[list[int], Sampling]]
    prompt_tokens: int
    is_streamed: bool
    is_scored: bool
    tokenizer: Tokenizer
    streams: list[TextStream]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What an answer has grown by.

    Attributes:
        listed: log p of the most probable tokens at each of its tokens.
        end: why there is no more; None: there may be.
        drawn: tokens of the whole answer, once it has ended.
    """

    index: int
    tokens: list[int]
    logprobs: list[float]
    listed: list[Listing]
    end: str | None
    drawn: int


@dataclass(slots=True)
class Progress:
    """How much of each answer was told."""

    told: list[int] = field(default_factory=list[int])
    ended: set[int] = field(default_factory=set[int])

    def parts(self, answers: Sequence[Answer], *, streamed: bool) -> list[Part]:
        """What is new since the last call. Answers that are not streamed are told when they end."""
        self.told = self.told or [0] * len(answers)
        parts = []
        for index, answer in enumerate(answers):
            position, size = self.told[index], len(answer.tokens)
            has_news = answer.end is not None or (streamed and size > position)
            if index in self.ended or not has_news:
                continue
            parts.append(
                Part(
                    index=index, tokens=answer.tokens[position:], logprobs=answer.logprobs[position:],
                    listed=answer.listed[position:size], end=answer.end, drawn=len(answer.drawn_tokens),
                )
            )  # fmt: skip
            self.told[index] = size
            if answer.end is not None:
                self.ended.add(index)
        return parts


def read_completion(values: Mapping[str, Any], tokenizer: Tokenizer, most_tokens: int) -> CompletionRequest:
    """Reads what a server asks for, see `serve.api.openai`.

    Args:
        tokenizer: with the chat template of the adapter.
        most_tokens: of a prompt and its answer, where the request has no `max_tokens`.

    Raises:
        LoraFusionError: says what is wrong.
    """
    tokenizer.require()
    if values["messages"] is not None:
        prompts = [prompt_tokens(values["messages"], tokenizer, where="messages", by_request=True)]
    else:
        prompts = [prompt_tokens(prompt, tokenizer, raw=True, where="prompt") for prompt in values["prompts"]]
    texts, pairs = AnswerTexts(tokenizer), []
    for prompt in prompts:
        room = max(1, most_tokens - len(prompt))
        sampling = Sampling(**{"max_tokens": room, "stop_tokens": tokenizer.stop_ids} | values["sampling"])
        seeds = [(sampling.seed + number) % (MOST_SEED + 1) for number in range(values["n"])]
        pairs += [(prompt, replace(sampling, seed=seed)) for seed in seeds]
    return CompletionRequest(
        pairs=pairs,
        prompt_tokens=sum(map(len, prompts)),
        is_streamed=values["stream"],
        is_scored=values["scored"],
        tokenizer=tokenizer,
        streams=[TextStream(texts, sampling.stop) for _, sampling in pairs],
    )


def write_part(request: CompletionRequest, part: Part) -> Message:
    """What a server is told of a part."""
    stream = request.streams[part.index]
    text = stream.add(part.tokens) if part.end is None else stream.end(part.tokens)
    message: Message = {"index": part.index, "text": text, "tokens": part.drawn}
    message["end"] = part.end and ("stop" if part.end == "stop" else "length")
    if request.is_scored:
        piece, listings = request.tokenizer.piece, part.listed or [[] for _ in part.tokens]
        message["logprobs"] = [
            [piece(token), logprob, [[piece(alternative), value] for alternative, value in listing]]
            for token, logprob, listing in zip(part.tokens, part.logprobs, listings, strict=True)
        ]
    return message
