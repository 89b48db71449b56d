"""Evaluates adapters on their held-out samples, and estimates how long an evaluation takes.

Answers to held-out prompts are scored by a function of the user: `eval.score`.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lorafusion_jax.config.rollout_section import Reward
from lorafusion_jax.config.run_sections import HELD_OUT_LOSS
from lorafusion_jax.config.validate import REWARD, SCORE
from lorafusion_jax.data.prepare import tokenizer_of
from lorafusion_jax.data.rollouts import PromptRow
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.generation.engine import Request
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.planning.held_out import first_loss_key
from lorafusion_jax.report.events import AdapterEvaluated, CheckSkipped, Listener, PhaseBegun
from lorafusion_jax.rollout.functions import Functions
from lorafusion_jax.rollout.rewards import rewards_of
from lorafusion_jax.session.evaluation import Evaluation
from lorafusion_jax.session.session import Session
from lorafusion_jax.signals import stop_if_asked
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.rollouts import Rollouts
from lorafusion_jax.training.text_samples import LiveGenerator, TextSamples, prompt_of


class Evaluations:
    """Measures held-out losses and reports them to a listener."""

    def __init__(
        self,
        job: Job,
        session: Session,
        listener: Listener,
        generator: LiveGenerator,
        rollouts: Rollouts,
        scores: Scores,
    ):
        self._job, self._session, self._emit = job, session, listener
        self._rollouts, self._scores = rollouts, scores
        self._measured: list[tuple[int, float]] = []  # loss tokens, seconds
        self._first: dict[Hashable, Evaluation] = {}  # before the first step, by `first_loss_key`
        self._samples = TextSamples(job, session, listener, generator)

    @property
    def seconds(self) -> float:
        """Time spent in evaluations so far."""
        return sum(seconds for _, seconds in self._measured)

    def evaluate(self, name: str, step: int, slots_done: int) -> dict[str, float] | None:
        """Evaluates an adapter and returns its metrics; None if it has no held-out samples."""
        stop_if_asked()
        if self._job.config.train.samples:
            self._hold(name)
            self._emit(PhaseBegun(text=f"{name} generates"))
            with self._session.spans.pause(f"evaluating {name}"):
                self._samples.generate(name, step, slots_done)
        if self._job.prepared.adapters[name].eval is None:
            return None
        self._emit(PhaseBegun(text=f"evaluating {name}"))
        score = self._score(name, step, slots_done)
        if self._job.prepared.adapters[name].rollout is not None:
            return self._reward(name, step, slots_done, score)
        evaluation = self._held_out(name, step)
        metrics = {f"eval_{key}": value for key, value in evaluation.metrics.items()} | score
        self._emit(
            AdapterEvaluated(
                slot=slots_done,
                adapter=name,
                step=step,
                eval_loss=evaluation.loss,
                eval_tokens=evaluation.tokens,
                metrics=metrics,
            )
        )
        return metrics | {HELD_OUT_LOSS: evaluation.loss}

    def _hold(self, name: str) -> None:
        """Brings an adapter into a place, if it has none."""
        if not self._session.holds([name]):
            self._session.drain()
            self._session.hold([name])

    def _held_out(self, name: str, step: int) -> Evaluation:
        """Evaluates an adapter on its held-out samples, or returns what another began with if it begins as that."""
        key = None
        if step == 0:
            key = first_loss_key(self._job.config.adapter(name), self._job.prepared.adapters[name].eval)
        if key is not None and key in self._first:
            return self._first[key]
        self._hold(name)
        began = time.perf_counter()
        with self._session.spans.pause(f"evaluating {name}"):
            evaluation = self._session.evaluate(name)
        assert evaluation is not None
        self._measured.append((evaluation.tokens, time.perf_counter() - began))
        if key is not None:
            self._first[key] = evaluation
        return evaluation

    def _score(self, name: str, step: int, slots_done: int) -> dict[str, float]:
        """Scores answers to held-out prompts; empty without a function, or where it fails."""
        if self._job.config.adapter(name).eval.score is None:
            return {}
        self._hold(name)
        try:
            score = self._scores.score(name)
        except LoraFusionError as problem:
            text = f"{name}: it has no eval_score at step {step}: {problem.what}"
            self._emit(CheckSkipped(slot=slots_done, text=text))
            return {}
        return {} if score is None else {SCORE: score}

    def _reward(self, name: str, step: int, slots_done: int, score: dict[str, float]) -> dict[str, float] | None:
        """Rewards answers to held-out prompts. The held-out loss is minus their mean reward."""
        self._hold(name)
        try:
            with self._session.spans.pause(f"evaluating {name}"):
                reward, tokens = self._rollouts.evaluate(name)
        except LoraFusionError as problem:
            text = f"{name}: its held-out prompts are not judged at step {step}: {problem.what}"
            self._emit(CheckSkipped(slot=slots_done, text=text))
            return None
        metrics = {REWARD: reward} | score
        self._emit(
            AdapterEvaluated(
                slot=slots_done, adapter=name, step=step, eval_loss=-reward, eval_tokens=tokens, metrics=metrics
            )
        )
        return metrics | {HELD_OUT_LOSS: -reward}

    def expected_s(self, name: str) -> float | None:
        """Estimates by the fastest time per token so far, because the first evaluation compiles. None if unknown."""
        held_out = self._job.prepared.adapters[name].eval
        if held_out is None or len(self._measured) < 2:
            return None
        token_s = min(seconds / max(tokens, 1) for tokens, seconds in self._measured)
        return token_s * int(held_out.loss_mask.sum())


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
