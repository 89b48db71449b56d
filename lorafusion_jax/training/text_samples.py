"""Texts that adapters generate whenever they are evaluated, with the weights of that moment. Training is the same."""

from __future__ import annotations

import numpy as np

from lorafusion_jax.data.prepare import tokenizer_of
from lorafusion_jax.data.prompts import prompt_tokens
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.generation.requests import Request
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.generation.text import TokenGenerator
from lorafusion_jax.report.events import AdapterSampled, Listener
from lorafusion_jax.session.session import Session
from lorafusion_jax.training.job import Job

FIRST_TOKENS = 16  # of a sample that is learned from its first token on


class LiveGenerator:
    """The generator on a session's stages, with the weights that adapters have at each call."""

    def __init__(self, job: Job, session: Session):
        self._job, self._session = job, session
        self._made: tuple[object, TokenGenerator] | None = None

    def __call__(self) -> TokenGenerator:
        """Returns the generator on the stages as they are: adapters that join replace them."""
        stages = self._session.stages
        if self._made is None or self._made[0] is not stages:
            tokenizer = self._job.prepared.tokenizer
            tokenizers = [tokenizer_of(adapter, tokenizer) for adapter in self._job.config.adapters]
            stops = list(
                dict.fromkeys(number for adapter_tokenizer in tokenizers for number in adapter_tokenizer.stop_ids)
            )
            local = list(self._session.executor.local_stages.values())
            self._made = stages, TokenGenerator(local, tokenizer, stops)
        return self._made[1]


class TextSamples:
    """Generates the texts of `train.samples` and reports them to a listener."""

    def __init__(self, job: Job, session: Session, listener: Listener, generator: LiveGenerator):
        self._job, self._session, self._emit, self._generator = job, session, listener, generator
        self._settings = job.config.train

    def generate(self, name: str, step: int, slots_done: int) -> None:
        """Generates the texts of one adapter."""
        prompts = self._prompts(name) if self._settings.samples else []
        if not prompts:
            return
        self._session.executor.wait_dispatched()
        adapter = self._session.index[name]
        sampling = Sampling(max_tokens=self._settings.sample_tokens)
        requests = [Request(tokens=tokens, adapter=adapter, sampling=sampling) for _, tokens in prompts]
        with self._session.executor.blaming(None, None, [name]):
            generator = self._generator()
            answers = generator(requests)
        self._emit(
            AdapterSampled(
                slot=slots_done,
                adapter=name,
                step=step,
                prompts=[prompt for prompt, _ in prompts],
                texts=[generator.text(*pair) for pair in zip(requests, answers, strict=True)],
            )
        )

    def _prompts(self, name: str) -> list[tuple[str, list[int]]]:
        """The prompts of an adapter that fit into the model's positions, as texts and tokens."""
        samples = self._settings.samples
        tokenizer = tokenizer_of(self._job.config.adapter(name), self._job.prepared.tokenizer)
        if isinstance(samples, list):
            prompts = [(text, prompt_tokens(text, tokenizer)) for text in samples]
        else:
            held_out = self._job.prepared.adapters[name].eval
            tokens = [] if held_out is None else [prompt_of(held_out, n) for n in range(min(samples, len(held_out)))]
            prompts = [(tokenizer.text(prompt), prompt) for prompt in tokens]
        num_positions = self._session.stages[0].parts.model.positions
        return [(text, tokens) for text, tokens in prompts if 0 < len(tokens) < num_positions]


def prompt_of(samples: TokenizedSet, index: int) -> list[int]:
    """The tokens of a sample before the first one that is learned."""
    start, stop = samples.offsets[index : index + 2]
    learned = np.flatnonzero(samples.loss_mask[start:stop])
    first = int(learned[0]) if len(learned) else int(stop - start)
    return samples.tokens[start : start + (first if first > 1 else FIRST_TOKENS)].tolist()
