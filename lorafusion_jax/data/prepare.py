"""Prepares the data of a job for planning and training: token sets and the order of samples."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.schema import AdapterConfig, DataSettings, JobConfig
from lorafusion_jax.data.hold_out import hold_out
from lorafusion_jax.data.model_fit import model_problems, read_shape
from lorafusion_jax.data.sources import find_file
from lorafusion_jax.data.tokenized import load_samples
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.data.tokenizer import Tokenizer, load_tokenizer
from lorafusion_jax.errors import ConfigError, DataError, ErrorList, LoraFusionError, raise_all
from scheduling.types import MOST_SAMPLES


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterData:
    """An adapter's samples and the order in which it trains on them.

    Attributes:
        order: index into `train` for every position of the adapter's stream. Each epoch is shuffled separately, from
            the adapter's seed.
        first: the order at the start of the run; it differs from `order` if the stream was extended later.
        cuts: positions at which the stream was extended. A batch begins at each.
    """

    train: TokenizedSet
    eval: TokenizedSet | None
    order: np.ndarray
    first: np.ndarray | None = None
    cuts: tuple[int, ...] = ()

    def batch_starts(self, global_batch: int) -> np.ndarray:
        """Returns the first position of every global batch."""
        edges = pairwise([0, *self.cuts, len(self.order)])
        return np.concatenate([np.arange(start, end, global_batch) for start, end in edges])

    def sample_at(self, position: int) -> tuple[int, int]:
        """Returns the epoch of a position of the stream, and its index into `train`.

        Plans know positions only: the epochs of a job are one stream there.
        """
        return position // len(self.train.lengths), int(self.order[position])

    def stream_tokens(self) -> np.ndarray:
        return self.train.lengths[self.order]

    @property
    def digest(self) -> str:
        """Digest of the samples and their first order. Extensions are part of the adapter's settings instead."""
        first = self.order if self.first is None else self.first
        return hashlib.sha256(self.train.digest.encode() + first.tobytes()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All data of a run, ready for planning."""

    tokenizer: Tokenizer
    adapters: dict[str, AdapterData]

    def digests(self) -> dict[str, str]:
        return {name: data.digest for name, data in self.adapters.items()}


def prepare(config: JobConfig, *, progress: Callable[[str], None] = lambda text: None) -> Prepared:
    """Tokenises every adapter's data and fixes the order of samples.

    Raises:
        DataError, CheckpointError, ErrorList: every problem of every adapter.
    """
    try:
        directory = base_directory(config)
    except LoraFusionError as problem:  # without its tokenizer nothing can be read
        raise_all([problem, *missing_files(config)])
        raise
    tokenizer, model = load_tokenizer(directory), read_shape(directory)
    errors: list[LoraFusionError] = []
    adapters: dict[str, AdapterData] = {}
    for adapter in config.adapters:
        progress(f"reading {adapter.data.train}")
        try:
            data = adapters[adapter.name] = _adapter_data(config, adapter, tokenizer)
            for samples in (data.train, data.eval):
                if model is not None and samples is not None:
                    errors += model_problems(
                        samples, model, tokenizer=tokenizer, adapter=adapter.name, directory=directory
                    )
        except ErrorList as problem:
            errors += problem.errors
        except LoraFusionError as problem:
            errors.append(problem)
            if problem.code == "data.template-limit":  # all adapters share the template
                break
    raise_all(list({str(error): error for error in errors}.values()))
    return Prepared(tokenizer=tokenizer, adapters=adapters)


def missing_files(config: JobConfig) -> list[LoraFusionError]:
    """Returns an error for each data file that does not exist."""
    errors: dict[str, LoraFusionError] = {}
    for adapter in config.adapters:
        for source in (adapter.data.train, adapter.data.eval):
            if isinstance(source, str) and not source.startswith("hf:"):
                try:
                    find_file(source, Path(config.directory))
                except DataError as problem:
                    errors[source] = problem
    return list(errors.values())


def _adapter_data(config: JobConfig, adapter: AdapterConfig, tokenizer: Tokenizer) -> AdapterData:
    def load(source: str, settings: DataSettings) -> TokenizedSet:
        return load_samples(
            source,
            settings=settings,
            tokenizer=tokenizer,
            adapter=adapter.name,
            base_dir=Path(config.directory),
            objective=adapter.objective.chosen,
        )

    train, wanted = _reviewed(load(adapter.data.train, adapter.data), adapter), adapter.data.eval
    if isinstance(wanted, str):
        held_out = load(wanted, adapter.data)
    elif wanted is None:
        held_out = None
    else:
        train, held_out = hold_out(train, wanted, adapter.name)
    return in_order(adapter, train, held_out, config.train.max_steps)


def _reviewed(samples: TokenizedSet, adapter: AdapterConfig) -> TokenizedSet:
    """Returns the samples with the notes of the adapter's objective on their numbers.

    Raises:
        DataError: `objective.data`.
    """
    chosen = adapter.objective.chosen
    if chosen.objective.review is None:
        return samples
    try:
        notes = chosen.objective.review(samples.numbers, chosen.options)
    except ValueError as problem:
        raise DataError(
            "objective.data",
            f"{adapter.name}: its data cannot be trained with objective {chosen.name}.",
            where=samples.report.source,
            why=str(problem),
        ) from None
    report = dataclasses.replace(samples.report, notes=(*samples.report.notes, *notes))
    return dataclasses.replace(samples, report=report)


def in_order(
    adapter: AdapterConfig, train: TokenizedSet, held_out: TokenizedSet | None, max_steps: int | None
) -> AdapterData:
    """Orders an adapter's samples according to its settings.

    Raises:
        ConfigError: see `sample_order`.
    """
    first = adapter.model_copy(update={"extended": ()})
    return AdapterData(
        train=train,
        eval=held_out,
        order=sample_order(adapter, len(train.lengths), max_steps),
        first=sample_order(first, len(train.lengths), max_steps),
        cuts=tuple(extension.after for extension in adapter.extended),
    )


def sample_order(adapter: AdapterConfig, num_samples: int, max_steps: int | None = None) -> np.ndarray:
    """Draws the adapter's stream of samples: `epochs` permutations, cut after `max_steps` global batches.

    The order depends only on the adapter's own seed and size, not on other adapters. An extended stream continues in
    the same permutation, then in further ones.

    Raises:
        ConfigError: `config.too-many-samples`, before anything is drawn.
    """
    wanted = adapter.epochs * num_samples
    if max_steps is not None:
        wanted = min(wanted, max_steps * adapter.global_samples)
    if adapter.extended:
        wanted = adapter.extended[-1].after + adapter.extended[-1].samples
    if wanted > MOST_SAMPLES:
        raise ConfigError(
            "config.too-many-samples",
            f"{adapter.name}: {adapter.epochs} epochs of {num_samples} rows are {wanted} samples."
            if not adapter.extended
            else f"{adapter.name} would have {wanted} samples.",
            why=f"a plan holds at most {MOST_SAMPLES} of an adapter",
            fix="fewer epochs, or train.max_steps",
        )
    drawn = range(-(-wanted // num_samples))
    epochs = [np.random.default_rng((adapter.seed, epoch)).permutation(num_samples) for epoch in drawn]
    return np.concatenate(epochs)[:wanted]
