"""Prepares the data of a job for planning and training: token sets and the order of samples."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.chat_templates import template_text
from lorafusion_jax.config.data_sources import Sources, is_file, names
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.data.cache import token_cache
from lorafusion_jax.data.hold_out import hold_out, repeated_samples
from lorafusion_jax.data.join_sets import join_sources
from lorafusion_jax.data.model_fit import model_problems, read_shape
from lorafusion_jax.data.rollouts import PromptRow, RolloutData, argument_problems, load_prompts
from lorafusion_jax.data.sources import expand_source, find_file
from lorafusion_jax.data.tokenized import load_samples
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.data.tokenizer import Tokenizer, load_tokenizer, with_template
from lorafusion_jax.errors import ConfigError, DataError, ErrorList, LoraFusionError, raise_all
from lorafusion_jax.families.model import ModelConfig
from scheduling.types import MOST_SAMPLES


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterData:
    """An adapter's samples and the order in which it trains on them.

    Attributes:
        order: index into `train` for every position of the adapter's stream. Each epoch is shuffled separately, from
            the adapter's seed.
        first: the order at the start of the run; it differs from `order` if the stream was extended later.
        cuts: positions at which the stream was extended. A batch begins at each.
        weights: of each part of `train`.
        mixed_samples: samples of an epoch (None: all of `train`, once).
        repeats: how often the sample of a position occurred before; None where that is the number of the epoch.
        rollout: where the adapter samples its rows; `train` then has room for the longest answers.
    """

    train: TokenizedSet
    eval: TokenizedSet | None
    order: np.ndarray
    first: np.ndarray | None = None
    cuts: tuple[int, ...] = ()
    weights: tuple[float, ...] = (1.0,)
    mixed_samples: int | None = None
    repeats: np.ndarray | None = None
    rollout: RolloutData | None = None

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch."""
        return len(self.train.lengths) if self.mixed_samples is None else self.mixed_samples

    def batch_starts(self, global_batch: int) -> np.ndarray:
        """Returns the first position of every global batch."""
        edges = pairwise([0, *self.cuts, len(self.order)])
        return np.concatenate([np.arange(start, end, global_batch) for start, end in edges])

    def sample_at(self, position: int) -> tuple[int, int]:
        """Returns how often the sample of a position of the stream occurred before, and its index into `train`.

        Plans know positions only: the epochs of a job are one stream there.
        """
        before = position // self.epoch_samples if self.repeats is None else int(self.repeats[position])
        return before, int(self.order[position])

    def stream_tokens(self) -> np.ndarray:
        return self.train.lengths[self.order]

    @property
    def digest(self) -> str:
        """Digest of the samples and their first order. Extensions are part of the adapter's settings instead."""
        first = self.order if self.first is None else self.first
        prompts = "" if self.rollout is None else self.rollout.digest
        return hashlib.sha256(f"{self.train.digest}{prompts}".encode() + first.tobytes()).hexdigest()[:16]


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
    tokenizer, model = tokenizer_of_base(directory)
    if config.train.samples:
        tokenizer.require()  # rows of tokens need none, the texts of samples do
    errors: list[LoraFusionError] = []
    adapters: dict[str, AdapterData] = {}
    reading = ""
    for adapter in config.adapters:
        if (text := f"reading {names(adapter.data.train)}") != reading:  # once for the members of a sweep
            progress(text)
        reading = text
        try:
            adapter_tokenizer = tokenizer_of(adapter, tokenizer)
            data = adapters[adapter.name] = _adapter_data(config, adapter, adapter_tokenizer)
            for samples in (data.train, data.eval):
                if model is not None and samples is not None:
                    errors += model_problems(
                        samples,
                        model,
                        tokenizer=adapter_tokenizer,
                        adapter=adapter.name,
                        directory=directory,
                        reserved=adapter.rollout.reserved_tokens if adapter.rollout.is_on else 0,
                    )
        except ErrorList as problem:
            errors += problem.errors
        except LoraFusionError as problem:
            errors.append(problem)
            if problem.code == "data.template-limit" and adapter.data.chat_template is None:  # others share it
                break
    raise_all(list({str(error): error for error in errors}.values()))
    return Prepared(tokenizer=tokenizer, adapters=adapters)


def tokenizer_of_base(directory: Path) -> tuple[Tokenizer, ModelConfig | None]:
    """Reads the tokenizer of a base model, which advises no length beyond its positions, and the model's shape."""
    model = read_shape(directory)
    return dataclasses.replace(load_tokenizer(directory), positions=None if model is None else model.positions), model


def tokenizer_of(adapter: AdapterConfig, tokenizer: Tokenizer) -> Tokenizer:
    """Returns the base's tokenizer with the adapter's chat template.

    Raises:
        CheckpointError: tokenizer.missing, tokenizer.template.
    """
    template = adapter.data.chat_template
    if template is None:
        return tokenizer
    return with_template(tokenizer, template_text(template), f"data.chat_template of {adapter.name}")


def missing_files(config: JobConfig) -> list[LoraFusionError]:
    """Returns an error for each data file that does not exist."""
    errors: dict[str, LoraFusionError] = {}
    for adapter in config.adapters:
        held_out = adapter.data.eval if isinstance(adapter.data.eval, tuple) else ()
        for path in dict.fromkeys(source.path for source in (*adapter.data.train, *held_out)):
            try:
                for file in expand_source(path, Path(config.directory)):
                    if is_file(file):
                        find_file(file, Path(config.directory))
            except DataError as problem:
                errors[path] = problem
    return list(errors.values())


def _adapter_data(config: JobConfig, adapter: AdapterConfig, tokenizer: Tokenizer) -> AdapterData:
    if adapter.rollout.is_on or adapter.rollout.prompts is not None:  # without a reward: `check` says so, once
        return _rollout_data(config, adapter, tokenizer)

    def load(source: str) -> TokenizedSet:
        return load_samples(
            source,
            settings=adapter.data,
            tokenizer=tokenizer,
            adapter=adapter.name,
            base_dir=Path(config.directory),
            objective=adapter.objective.chosen,
        )

    train, weights = load_sources(adapter.data.train, Path(config.directory), load)
    train, eval_setting = _reviewed(train, adapter), adapter.data.eval
    if isinstance(eval_setting, tuple):
        held_out, _ = load_sources(eval_setting, Path(config.directory), load)
        held_out = _compared(held_out, train)
    elif eval_setting is None:
        held_out = None
    else:
        train, held_out = hold_out(train, eval_setting, adapter.name)
    return in_order(adapter, train, held_out, config.train.max_steps, weights)


def _rollout_data(config: JobConfig, adapter: AdapterConfig, tokenizer: Tokenizer) -> AdapterData:
    tokenizer.require()
    rollout, base_dir = RolloutData(prompts=[]), Path(config.directory)

    def load_into(prompts: list[PromptRow], source: str) -> TokenizedSet:
        samples, rows = load_prompts(source, adapter, tokenizer, base_dir)
        prompts += rows
        return samples

    train, weights = load_sources(adapter.data.train, base_dir, partial(load_into, rollout.prompts))
    held_out = None
    if isinstance(adapter.data.eval, tuple):
        held_out, _ = load_sources(adapter.data.eval, base_dir, partial(load_into, rollout.held_out))
    raise_all(argument_problems(adapter, base_dir, rollout))
    return in_order(adapter, train, held_out, config.train.max_steps, weights, rollout)


def load_sources(
    sources: Sources, base_dir: Path, load: Callable[[str], TokenizedSet]
) -> tuple[TokenizedSet, tuple[float, ...]]:
    """Loads all files of several sources. Returns their samples, and the weight of each file.

    Raises:
        DataError, ErrorList: all problems of all files.
    """
    errors: list[LoraFusionError] = []
    sets, weights = [], []
    for source in sources:
        try:
            for file in expand_source(source.path, base_dir):
                sets.append(load(file))
                weights.append(source.weight)
        except ErrorList as problem:
            errors += problem.errors
        except LoraFusionError as problem:
            errors.append(problem)
    raise_all(errors)
    if len(sets) == 1 and weights == [1.0]:
        return sets[0], (1.0,)
    return join_sources(sets, token_cache()), tuple(weights)


def _compared(held_out: TokenizedSet, train: TokenizedSet) -> TokenizedSet:
    """Returns the held-out samples with a note on those that are trained on."""
    repeated = repeated_samples(held_out, train)
    if not len(repeated):
        return held_out
    note = (
        f"[data.eval-in-train] {len(repeated)} of {len(held_out)} held-out samples are training data, too, first row "
        f"{held_out.rows[repeated[0]]}: their loss does not tell how well the adapter does on other text"
    )
    return dataclasses.replace(
        held_out, report=dataclasses.replace(held_out.report, notes=(*held_out.report.notes, note))
    )


def _reviewed(samples: TokenizedSet, adapter: AdapterConfig) -> TokenizedSet:
    """Returns the samples with the notes of the adapter's objective on their numbers.

    Raises:
        DataError: `objective.data`.
    """
    objective = adapter.objective.chosen
    if objective.objective.review is None:
        return samples
    try:
        notes = objective.objective.review(samples.numbers, objective.options)
    except ValueError as problem:
        raise DataError(
            "objective.data",
            f"{adapter.name}: its data cannot be trained with objective {objective.name}.",
            where=samples.report.source,
            why=str(problem),
        ) from None
    report = dataclasses.replace(samples.report, notes=(*samples.report.notes, *notes))
    return dataclasses.replace(samples, report=report)


def in_order(
    adapter: AdapterConfig,
    train: TokenizedSet,
    held_out: TokenizedSet | None,
    max_steps: int | None,
    weights: tuple[float, ...] = (1.0,),
    rollout: RolloutData | None = None,
) -> AdapterData:
    """Orders an adapter's samples according to its settings.

    Args:
        weights: of each part of `train`.
        rollout: see `AdapterData`.

    Raises:
        ConfigError: see `sample_order`.
    """
    mix = Mix(parts=train.parts, num_samples=len(train), weights=weights, seed=adapter.seed)
    order = sample_order(adapter, mix, max_steps)
    first = order
    if adapter.extended:
        first = sample_order(adapter.model_copy(update={"extended": ()}), mix, max_steps)
    group = _group(adapter)
    return AdapterData(
        train=train,
        eval=held_out,
        order=order,
        first=first,
        cuts=tuple(extension.after for extension in adapter.extended),
        weights=weights,
        mixed_samples=mix.epoch_samples * group,
        repeats=mix.repeats(order) if group == 1 else repeats_in(order),
        rollout=rollout,
    )


def _group(adapter: AdapterConfig) -> int:
    """How many samples in a row are answers to one prompt."""
    return adapter.rollout.group if adapter.rollout.is_on else 1


def sample_order(adapter: AdapterConfig, mix: Mix, max_steps: int | None = None) -> np.ndarray:
    """Draws the adapter's stream of samples: `epochs` permutations, cut after `max_steps` global batches.

    The order depends only on the adapter's own seed and data, not on other adapters. An extended stream continues in
    the same permutation, then in further ones. Where an adapter samples its rows, a prompt is as many samples in a row
    as it has answers.

    Raises:
        ConfigError: `config.too-many-samples`, before anything is drawn.
    """
    group = _group(adapter)
    num_samples = mix.epoch_samples * group
    count = adapter.epochs * num_samples
    if max_steps is not None:
        count = min(count, max_steps * adapter.global_samples)
    if adapter.extended:
        count = adapter.extended[-1].after + adapter.extended[-1].samples
    if count > MOST_SAMPLES:
        raise ConfigError(
            "config.too-many-samples",
            f"{adapter.name}: {adapter.epochs} epochs of {num_samples} rows are {count} samples."
            if not adapter.extended
            else f"{adapter.name} would have {count} samples.",
            why=f"a plan holds at most {MOST_SAMPLES} of an adapter",
            fix="fewer epochs, or train.max_steps",
        )
    epochs = range(-(-count // num_samples))
    return np.repeat(np.concatenate([mix.epoch(epoch) for epoch in epochs]), group)[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Draws the samples of each epoch.

    A part with n samples and weight w has round(w n) samples in an epoch, at least one: each of them floor(w) times,
    and the rest in turn, so that all are seen equally often over the epochs.

    Attributes:
        parts: part of each sample, int [n] (None: there is one).
        weights: of each part.

    >>> mix = Mix(parts=np.array([0, 0, 0, 0, 1, 1]), num_samples=6, weights=(0.5, 2.0), seed=0)
    >>> mix.epoch_samples, sorted(np.concatenate([mix.epoch(0), mix.epoch(1)]).tolist())
    (6, [0, 1, 2, 3, 4, 4, 4, 4, 5, 5, 5, 5])
    """

    parts: np.ndarray | None
    num_samples: int
    weights: Sequence[float]
    seed: int

    @property
    def epoch_samples(self) -> int:
        """Number of samples of an epoch."""
        return sum(len(members) * repeats + extra for members, repeats, extra in self._shares())

    def epoch(self, epoch: int) -> np.ndarray:
        """Returns the samples of an epoch in a random order, which depends on seed and epoch only."""
        samples = []
        for part, (members, repeats, extra) in enumerate(self._shares()):
            samples += [members] * repeats
            if extra:
                turn = np.random.default_rng((self.seed, part, len(members))).permutation(members)
                samples.append(np.sort(turn[(epoch * extra + np.arange(extra)) % len(members)]))
        return np.random.default_rng((self.seed, epoch)).permutation(np.concatenate(samples))

    def repeats(self, order: np.ndarray) -> np.ndarray | None:
        """How often the sample at each position occurred before; None if that is the number of the epoch."""
        if all(weight == 1 for weight in self.weights):
            return None
        return repeats_in(order)

    def _shares(self) -> list[tuple[np.ndarray, int, int]]:
        """(samples, times that each occurs, number of those that occur once more) of each part."""
        shares = []
        for part, weight in enumerate(self.weights):
            members = np.arange(self.num_samples) if self.parts is None else np.flatnonzero(self.parts == part)
            if len(members):
                occurrences = max(1, round(weight * len(members)))
                shares.append((members, *divmod(occurrences, len(members))))
        return shares


def repeats_in(order: np.ndarray) -> np.ndarray:
    """How often the sample at each position occurred before.

    >>> repeats_in(np.array([4, 2, 4, 4])).tolist()
    [0, 0, 1, 2]
    """
    by_sample = np.argsort(order, kind="stable")
    begins = np.flatnonzero(np.diff(order[by_sample], prepend=-1))
    counts = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
    repeats = np.empty(len(order), np.int32)
    repeats[by_sample] = counts
    return repeats
