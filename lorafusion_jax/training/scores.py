"""Scores of answers to held-out prompts, by a function of the user: `eval.score`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lorafusion_jax.config.rollout_section import Reward
from lorafusion_jax.data.prepare import tokenizer_of
from lorafusion_jax.data.rollouts import PromptRow
from lorafusion_jax.generation.engine import Request
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.rollout.functions import Functions
from lorafusion_jax.rollout.rewards import rewards_of
from lorafusion_jax.session.session import Session
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.text_samples import LiveGenerator, prompt_of


class Scores:
    """Generates greedy answers and calls the functions.

    Args:
        folder: for what they print.
    """

    def __init__(self, job: Job, session: Session, folder: Path, generator: LiveGenerator):
        self._job, self._session, self._folder, self._generator = job, session, folder, generator
        self._functions: dict[str, Functions] = {}

    def score(self, name: str) -> float | None:
        """Returns the mean score of an adapter; None without a function.

        Raises:
            RunError: `rollout.function`, `rollout.reward`.
        """
        settings = self._job.config.adapter(name).eval
        if settings.score is None:
            return None
        prompts = self._prompts(name)[: settings.samples]
        sampling = Sampling(max_tokens=settings.max_tokens)
        adapter = self._session.index[name]
        requests = [Request(tokens=row.tokens, adapter=adapter, sampling=sampling) for row in prompts]
        self._session.executor.wait_dispatched()
        with self._session.executor.blaming(None, None, [name]):
            generator = self._generator()
            answers = generator(requests)
        texts = [generator.text(*pair) for pair in zip(requests, answers, strict=True)]
        score = Reward(kind="function", value=settings.score)
        scores = rewards_of([score], prompts, texts, self._functions_of(name))
        valid_scores = scores[~np.isnan(scores)]
        return float(valid_scores.mean()) if len(valid_scores) else None

    def close(self) -> None:
        for functions in self._functions.values():
            functions.close()

    def _prompts(self, name: str) -> list[PromptRow]:
        """The prompts of the held-out rows that leave room for an answer."""
        data, adapter = self._job.prepared.adapters[name], self._job.config.adapter(name)
        longest = self._session.stages[0].parts.model.positions - 1
        if data.rollout is not None:
            return [row for row in data.rollout.held_out if len(row.tokens) <= longest]
        assert data.eval is not None
        tokenizer = tokenizer_of(adapter, self._job.prepared.tokenizer)
        rows: list[PromptRow] = []
        for number in range(len(data.eval)):
            tokens = prompt_of(data.eval, number)
            sample, learned = data.eval.sample(number)
            columns: Mapping[str, Any] = {"answer": tokenizer.text(sample[learned].tolist())}
            if 0 < len(tokens) <= longest:
                rows.append(PromptRow(prompt=tokenizer.text(tokens), tokens=tokens, row=columns))
        return rows

    def _functions_of(self, name: str) -> Functions:
        if name not in self._functions:
            settings, folder = self._job.config.adapter(name).eval, Path(self._job.config.directory)
            self._folder.mkdir(exist_ok=True)
            self._functions[name] = Functions(settings, folder, self._folder / f"{name}.log")
        return self._functions[name]
