"""Generates for many requests: rows that are done take the next request of their adapter. B sequences"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np

from lorafusion_jax.config.model import ModelConfig
from lorafusion_jax.errors import CheckpointError, ConfigError, LoraFusionError, RunError, raise_all
from lorafusion_jax.generation.choose import NOT_FINITE, Choices, Chosen
from lorafusion_jax.generation.conversation import Conversation
from lorafusion_jax.generation.packing import PromptPass, continue_prompt, pack_prompts
from lorafusion_jax.generation.passes import Batch
from lorafusion_jax.generation.places import BASE, bucket, make_places, share_rows
from lorafusion_jax.generation.programs import GenerationPrograms
from lorafusion_jax.generation.sampling import GREEDY, MODES, Sampling
from lorafusion_jax.session.stage import Stage

MOST_SEQUENCES = 64  # that are generated at a time
CHUNK = 8  # passes between two looks at their tokens
SHORTEST_CACHE = 64  # tokens

End = Literal["stop", "length", "context"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt for one adapter.

    Args:
        tokens: the prompt.
        adapter: index, or `places.BASE`.
        where: name of the prompt in messages.
    """

    tokens: Sequence[int]
    adapter: int = BASE
    sampling: Sampling = GREEDY
    where: str = "the prompt"


@dataclass(slots=True, kw_only=True)
class Answer:
    """Tokens that were generated for a request, without the token that ended them.

    Attributes:
        logprobs: log p of each token under the adapter, without temperature, top k and top p.
        end: "stop": a stop token or text; "length": `max_tokens`; "context": the model's last position; None while
            tokens are still to come.
        end_token, end_logprob: the stop token that ended them, and its log p; None if none did.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: End | None = None
    end_token: int | None = None
    end_logprob: float | None = None


class Generator:
    """Generates with the current weights of adapters on the stages of a model.

    Args:
        stages: with the model, whose adapters have weights.
        stop_tokens: tokens that end every answer.
        ends_with: (tokens, stop texts) → whether the tokens end with one of the texts.
        special_texts: text → id of special tokens; one ends the answers that have its text as a stop text.

    Raises:
        ConfigError: `generate.no-cache`, a mechanism of the model keeps nothing for its next tokens.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        stop_tokens: Sequence[int] = (),
        ends_with: Callable[[Sequence[int], Sequence[str]], bool] = lambda tokens, texts: False,
        special_texts: Mapping[str, int] = MappingProxyType({}),
    ):
        self._stages = tuple(stages)
        self._model, self._specs = stages[0].parts.model, stages[0].parts.specs
        check_caches(self._model)
        self._programs = [GenerationPrograms(stage) for stage in stages]
        self._stop_tokens, self._ends_with = frozenset(stop_tokens), ends_with
        self._special_texts = special_texts

    def __call__(
        self,
        requests: Sequence[Request],
        on_tokens: Callable[[int, Answer], None] = lambda index, answer: None,
        *,
        most: int = MOST_SEQUENCES,
        conversation: Conversation | None = None,
    ) -> list[Answer]:
        """Generates an answer to each request.

        Args:
            on_tokens: called with the index of a request and its answer so far, whenever it has grown or ended.
            most: sequences at a time.
            conversation: caches of the last call, for one request of each adapter; the weights must be the same.

        Raises:
            LoraFusionError: see `check_requests`; `generate.not-finite`, logits of an adapter are not numbers.
        """
        check_requests(requests, self._model)
        answers = [Answer() for _ in requests]
        adapters = list(dict.fromkeys(request.adapter for request in requests))
        for start in range(0, len(adapters), most):
            chosen = {*adapters[start : start + most]}
            numbers = [index for index, request in enumerate(requests) if request.adapter in chosen]
            _Rows(self, requests, answers, numbers, on_tokens, most, conversation).run()
        return answers

    def open_batch(self, places, tokens: int) -> Batch:
        return Batch(self._stages, self._programs, places, tokens)

    def ended(self, request: Request, answer: Answer, token: int, logprob: float) -> bool:
        """Adds a token to an answer. Returns whether this ends the answer."""
        if token == NOT_FINITE:
            name = "the base" if request.adapter == BASE else self._specs[request.adapter].name
            message = f"{name}: the logits of a token are not numbers."
            raise RunError("generate.not-finite", message, where=request.where)
        stops = request.sampling.stop
        if token in self._stop_tokens or any(self._special_texts.get(text) == token for text in stops):
            answer.end, answer.end_token, answer.end_logprob = "stop", token, logprob
            return True
        answer.tokens.append(token)
        answer.logprobs.append(logprob)
        if stops and self._ends_with(answer.tokens, stops):
            answer.end = "stop"
        elif len(answer.tokens) == request.sampling.max_tokens:
            answer.end = "length"
        elif len(request.tokens) + len(answer.tokens) >= self._model.positions:
            answer.end = "context"
        return answer.end is not None


class _Rows:
    """The requests of some adapters, in the rows of one batch."""

    def __init__(
        self,
        generator: Generator,
        requests,
        answers,
        numbers: Sequence[int],
        on_tokens,
        most: int,
        conversation: Conversation | None,
    ):
        self._generator, self._requests, self._answers, self._on_tokens = generator, requests, answers, on_tokens
        waiting = Counter(requests[number].adapter for number in numbers)
        self._places = make_places(share_rows(waiting, most))
        self._queues = {
            adapter: deque(number for number in numbers if requests[number].adapter == adapter) for adapter in waiting
        }
        B = self._places.count
        self._request: list[int | None] = [None] * B
        self._free = {adapter: self._places.rows_of(adapter) for adapter in waiting}
        self._tokens, self._number = np.zeros(B, np.int32), np.zeros(B, np.int32)
        self._position = np.full(B, -1, np.int32)
        self._choices = Choices(
            np.zeros(B, np.float32), np.zeros(B, np.int32), np.ones(B, np.float32), np.zeros(B, np.uint32)
        )
        model = generator._model
        chosen = [requests[number] for number in numbers]
        self._mode = max((request.sampling.mode for request in chosen), key=MODES.index)
        longest = max(len(request.tokens) + request.sampling.max_tokens for request in chosen)
        self._conversation, room = conversation, bucket(min(longest, model.positions), SHORTEST_CACHE)
        self._written: dict[int, list[int]] = {}  # tokens in the cache of each row
        taken = None if conversation is None else conversation.take(self._places, room)
        if conversation is not None and taken is None:
            room = bucket(min(2 * longest, model.positions), SHORTEST_CACHE)  # for turns to come
        self._batch, self._room = taken or (generator.open_batch(self._places, room), room)

    def run(self) -> None:
        while self._fill():
            steps = min(CHUNK, max(self._left(row) for row in self._used))
            if steps:
                used, before = self._used, self._tokens.copy()
                chosen = self._batch.next_tokens(
                    steps, self._tokens, self._position, self._number, self._choices, self._mode
                )
                for row in used:
                    self._written[row] += [int(before[row]), *(int(step.tokens_B[row]) for step in chosen[:-1])]
                self._position[used] += steps
                self._take(used, chosen)
        if self._conversation is not None:
            self._conversation.keep(self._batch, self._places, self._room, self._written)

    @property
    def _used(self) -> list[int]:
        return [row for row, number in enumerate(self._request) if number is not None]

    def _left(self, row: int) -> int:
        request = self._requests[self._request[row]]
        return request.sampling.max_tokens - int(self._number[row])

    def _fill(self) -> bool:
        """Gives free rows to waiting requests and reads their prompts. Returns whether rows are in use."""
        while started := self._start_requests():
            chosen = self._batch.read_prompts(
                self._pack(started), self._tokens, self._number, self._choices, self._mode
            )
            self._take(started, [chosen])
        return bool(self._used)

    def _pack(self, rows: Sequence[int]) -> list[PromptPass]:
        """Packs the prompts of some rows without the tokens that are in their caches."""
        prompts = {row: self._requests[self._request[row]].tokens for row in rows}
        self._written |= {row: list(prompt) for row, prompt in prompts.items()}
        passes = []
        if self._conversation is not None:
            model = self._generator._model
            for row, prompt in list(prompts.items()):
                if kept := self._conversation.kept(row, prompt, model):
                    passes += continue_prompt(row, prompts.pop(row), kept, self._places)
        return [*passes, *(pack_prompts(prompts, self._places) if prompts else ())]

    def _start_requests(self) -> list[int]:
        started = []
        for adapter, queue in self._queues.items():
            while queue and self._free[adapter]:
                row, number = self._free[adapter].pop(0), queue.popleft()
                request = self._requests[number]
                self._request[row] = number
                self._position[row], self._number[row] = len(request.tokens), 0
                sampling = request.sampling
                settings = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)
                for values, value in zip(self._choices, settings, strict=True):
                    values[row] = value
                started.append(row)
        return started

    def _take(self, rows: Sequence[int], chosen: Sequence[Chosen]) -> None:
        """Adds tokens to the answers of some rows, and frees the rows whose answers end."""
        tokens, logprobs = (np.stack(values) for values in zip(*chosen, strict=True))  # [steps, B]
        for row in rows:
            number = self._request[row]
            assert number is not None
            request, answer = self._requests[number], self._answers[number]
            self._tokens[row] = tokens[-1, row]
            self._number[row] += len(tokens)
            new = zip(tokens[:, row].tolist(), logprobs[:, row].tolist(), strict=True)
            if any(self._generator.ended(request, answer, *token) for token in new):
                self._request[row], self._position[row] = None, -1
                self._free[request.adapter].append(row)
            self._on_tokens(number, answer)


def check_caches(model: ModelConfig) -> None:
    """Checks that generation serves all layers of a model.

    Raises:
        ConfigError: `generate.no-cache`.
    """
    lacking = dict.fromkeys(layer.uncached for layer in model.kinds if layer.uncached)
    if lacking:
        raise ConfigError(
            "generate.no-cache",
            f"generation does not serve this model: {', '.join(lacking)} of its layers have no cache.",
            fix="lorafusion export RUN ADAPTER --to FOLDER, and generate with transformers and peft",
        )


def check_requests(requests: Sequence[Request], model: ModelConfig) -> None:
    """Checks the lengths and the tokens of prompts.

    Raises:
        LoraFusionError, ErrorList: `generate.empty-prompt`, `generate.token`, `generate.too-long`, `generate.longrope`.
    """
    errors: list[LoraFusionError] = []
    scalings = [rope.scaling for rope in model.ropes if rope.scaling and rope.scaling.kind == "longrope"]
    for request in requests:
        length, where = len(request.tokens), request.where
        if not length:
            message = f"{where} has no token."
            errors.append(ConfigError("generate.empty-prompt", message, fix="a text, or at least one message"))
        elif outside := [token for token in request.tokens if not 0 <= token < model.vocab_size]:
            message = f"{where} has the token {outside[0]}, and the model has tokens 0 to {model.vocab_size - 1}."
            errors.append(ConfigError("generate.token", message, fix="the tokens of this base's tokenizer"))
        elif length >= model.positions:
            message = f"{where} has {length} tokens, and the model knows {model.positions} positions."
            errors.append(CheckpointError("generate.too-long", message, fix="a shorter prompt"))
        total = length + request.sampling.max_tokens
        for scaling in scalings:
            if length <= scaling.original_max_positions < min(total, model.positions):
                message = f"{where} and its answer may cross {scaling.original_max_positions} positions."
                why = "longrope turns all earlier keys by other angles from there on"
                most = scaling.original_max_positions - length
                fix = f"max_tokens={most}" if most else "a longer or shorter prompt"
                errors.append(ConfigError("generate.longrope", message, why=why, fix=fix))
    raise_all(errors)
