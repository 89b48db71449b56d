"""Sampling from adapters that train in a session: snapshots that do not move while their adapter trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lorafusion_jax.config.stack import without_places
from lorafusion_jax.data.tokenizer import Tokenizer
from lorafusion_jax.generation.answer_text import text_options
from lorafusion_jax.generation.generator import Generator, Request
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.session import Session, Task
from lorafusion_jax.session.base import stages_for
from lorafusion_jax.session.distant_stage import local_stages

SLOTS = 4  # snapshots on the devices at a time; others wait on the host


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings of samples, as in Tinker's SDK.

    Args:
        max_tokens: new tokens at most.
        seed: of the first sample; the others have the seeds after it (None: 0 for the first sample of a session, and
            then one after another).
        stop: texts, or token ids, that end a sample (None: the model's own tokens; []: nothing ends it early).
        temperature: divides the logits; 0 always takes the most probable token.
        top_k: keeps the k most probable tokens (-1: all).
        top_p: keeps the fewest tokens whose probabilities sum to at least this.
    """

    max_tokens: int = 128
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One sample.

    Attributes:
        tokens: drawn ones; the last is the one that ended the sample, if one did.
        logprobs: of each token under the adapter, without temperature and filters.
        stop_reason: "stop" or "length".
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str


class SamplerBank:
    """Snapshots of adapters of one shape on the stages of a session. Its methods run in the session's thread."""

    def __init__(self, session: Session, task: Task, tokenizer: Tokenizer):
        specs = [replace(task.spec, name=f"snapshot-{slot}") for slot in range(SLOTS)]
        adapters = tuple(task.adapter.model_copy(update={"name": spec.name}) for spec in specs)
        config = without_places(task.config.model_copy(update={"adapters": adapters}))
        self._stages = list(local_stages(stages_for(session.stages, config, specs)).values())
        self._names = [spec.name for spec in specs]
        self._slots: dict[int, str] = {}  # snapshot → its slot, the least recently used first
        self._leaves: dict[str, Mapping[str, np.ndarray]] = {}
        self._generator = Generator(self._stages, tokenizer.stop_ids, **text_options(tokenizer))

    def sample(
        self,
        number: int,
        weights: Mapping[str, np.ndarray],
        prompt: Sequence[int],
        samples: int,
        params: SamplingParams,
    ) -> list[SampledSequence]:
        """Draws samples from a snapshot.

        Args:
            number: of the snapshot.
            weights: its leaves.
        """
        index = self._names.index(self._slot_of(number, weights))
        settings = Sampling(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            **_stops(params.stop),
        )
        requests = [
            Request(tokens=list(prompt), adapter=index, sampling=replace(settings, seed=(params.seed or 0) + at))
            for at in range(samples)
        ]
        return [
            SampledSequence(
                tokens=answer.drawn_tokens,
                logprobs=answer.drawn_logprobs,
                stop_reason="stop" if answer.end == "stop" else "length",
            )
            for answer in self._generator(requests)
        ]

    def _slot_of(self, number: int, weights: Mapping[str, np.ndarray]) -> str:
        name = self._slots.pop(number, None)
        if name is None:
            free = [name for name in self._names if name not in self._slots.values()]
            name = free[0] if free else self._slots.pop(next(iter(self._slots)))
            self._leaves[name] = weights
            for stage in self._stages:
                stage.take_weights(self._leaves)
        self._slots[number] = name
        return name


def _stops(stop: Any) -> dict[str, Any]:
    """Returns the settings of `Sampling` for texts and tokens that end a sample."""
    if stop is None:
        return {}
    entries = [stop] if isinstance(stop, str) else list(stop)
    texts = tuple(entry for entry in entries if isinstance(entry, str))
    ids = (entry.item() if isinstance(entry, np.integer) else entry for entry in entries if not isinstance(entry, str))
    return {"stop": texts, "stop_tokens": tuple(ids)}
