"""Evaluates adapters on their held-out samples, and estimates how long an evaluation takes."""

from __future__ import annotations

import time
from collections.abc import Hashable

from lorafusion_jax.config.schema import HELD_OUT_LOSS
from lorafusion_jax.config.selection_checks import REWARD, SCORE
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.planning.held_out import first_loss_key
from lorafusion_jax.report.events import AdapterEvaluated, CheckSkipped, Listener, PhaseBegun
from lorafusion_jax.session.evaluation import Evaluation
from lorafusion_jax.session.session import Session
from lorafusion_jax.signals import stop_if_asked
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.rollouts import Rollouts
from lorafusion_jax.training.scores import Scores
from lorafusion_jax.training.text_samples import LiveGenerator, TextSamples


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
