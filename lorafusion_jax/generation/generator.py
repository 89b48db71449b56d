"""Generates for a closed list of requests, with the weights that adapters have at each call.

What a turn of a conversation has computed serves the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from lorafusion_jax.generation.capacity import blocks_that_fit
from lorafusion_jax.generation.engine import FEWEST_ROWS, SLOTS, Engine
from lorafusion_jax.generation.packing import BASE, power_of_two
from lorafusion_jax.generation.programs import GenerationPrograms
from lorafusion_jax.generation.requests import Answer, Request, check_requests
from lorafusion_jax.models.cache import BLOCK
from lorafusion_jax.session.stage import Stage

MOST_SEQUENCES = 64  # that are generated at a time
FEWEST_BLOCKS, FEWEST_SLOTS = 16, 4  # of a cache and a bank: other numbers compile all programs again
TURNS = 4  # a conversation has room for so many times the tokens of its first turn


class Generator:
    """Generates with the current weights of adapters on the stages of a model.

    Args:
        stages: with the model, whose adapters have weights.
        stop_tokens, ends_with, special_texts: see `Engine`.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        stop_tokens: Sequence[int] = (),
        ends_with: Callable[[Sequence[int], Sequence[str]], bool] | None = None,
        special_texts: Mapping[str, int] = MappingProxyType({}),
    ):
        self._stages, self._model = tuple(stages), stages[0].parts.model
        self._programs = [GenerationPrograms(stage) for stage in stages]
        self._options = {"stop_tokens": stop_tokens, "ends_with": ends_with, "special_texts": special_texts}

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
            conversation: blocks of earlier calls, which hold the beginnings of these prompts; the weights must be the
                same.

        Raises:
            LoraFusionError: see `check_requests`; `generate.not-finite`, logits of an adapter are not numbers.
        """
        check_requests(requests, self._model)
        spare = 1 if conversation is None else TURNS
        conversation = conversation or Conversation()
        engine = self._engine(requests, most, conversation, spare)
        samplers = conversation.samplers
        for adapter in dict.fromkeys(request.adapter for request in requests):
            if adapter not in samplers:
                samplers[adapter] = engine.base if adapter == BASE else engine.snapshot(adapter)
        answers = [
            engine.submit(
                Request(
                    tokens=request.tokens,
                    sampler=samplers[request.adapter],
                    sampling=request.sampling,
                    where=request.where,
                )
            )
            for request in requests
        ]
        index_of = {id(answer): index for index, answer in enumerate(answers)}
        while engine.busy:
            for answer in engine.step():
                if answer.error is not None:
                    conversation.forget()
                    raise answer.error
                on_tokens(index_of[id(answer)], answer)
        return answers

    def _engine(self, requests: Sequence[Request], most: int, conversation: Conversation, spare: int) -> Engine:
        """The engine of a conversation, or a new one with room for what the requests ask for, so many times."""
        tokens = [min(len(r.tokens) + r.sampling.max_tokens, self._model.positions) for r in requests]
        blocks = sorted(-(-length // BLOCK) for length in tokens)
        num_blocks = sum(blocks[-most:])
        engine = conversation.engine
        if engine is None or engine.pool.number < num_blocks:
            adapters = len({request.adapter for request in requests} - {BASE})
            conversation.forget()
            limit = max(blocks_that_fit(self._stages), blocks[-1])
            engine = conversation.engine = Engine(
                self._stages,
                rows=max(power_of_two(min(len(requests), most)), FEWEST_ROWS),
                blocks=min(max(power_of_two(spare * num_blocks), FEWEST_BLOCKS), limit),
                slots=power_of_two(min(max(adapters, FEWEST_SLOTS), SLOTS)),
                programs=self._programs,
                **self._options,
            )
        return engine


if TYPE_CHECKING:
    from lorafusion_jax.generation.engine import Engine
    from lorafusion_jax.generation.slots import Sampler


class Conversation:
    """An engine between two calls of a `Generator`. Its blocks hold the beginnings of the next prompts.

    Attributes:
        samplers: by adapter.
    """

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.samplers: dict[int, Sampler] = {}

    def forget(self) -> None:
        """Frees the engine."""
        self.engine, self.samplers = None, {}
