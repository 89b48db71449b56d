"""Configuration → what the planner and the trainer need of the data: token sets, sample order, jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lorafusion_jax.checkpoint.base_files import commit_of
from lorafusion_jax.config.schema import AdapterConfig, DataSettings, JobConfig
from lorafusion_jax.data.model_fit import model_problems, read_shape
from lorafusion_jax.data.tokenized import TokenizedSet, load_samples
from lorafusion_jax.data.tokenizer import Tokenizer, load_tokenizer
from lorafusion_jax.errors import CheckpointError, ErrorList, LoraFusionError, raise_all
from scheduling import AdapterJob, Plan, make_plan

# Search effort is counted, not timed: the same job gives the same plan on a busy machine. A quiet core does about
# twice as many evaluations per second; the clock is only a far stop.
EVALUATIONS_PER_S = 36_000
CLOCK_SLACK = 30
ALLOWED = ["*.json", "*.safetensors", "*.jinja"]  # files of a hub model


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterData:
    """An adapter's samples and the order in which it meets them.

    Attributes:
        order: index into `train` for every position of the adapter's stream; epochs follow each other, each
            shuffled anew from the adapter's seed. Position i belongs to epoch i // len(train).
    """

    train: TokenizedSet
    eval: TokenizedSet | None
    order: np.ndarray

    def stream_tokens(self) -> np.ndarray:
        return self.train.lengths[self.order]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.train.digest.encode() + self.order.tobytes()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All data of a run, ready for planning."""

    tokenizer: Tokenizer
    adapters: dict[str, AdapterData]

    def digests(self) -> dict[str, str]:
        return {name: data.digest for name, data in self.adapters.items()}


def base_directory(config: JobConfig) -> Path:
    """Finds the base model's directory.

    Raises:
        CheckpointError: neither a directory nor a hub name that can be resolved.
    """
    direct = Path(config.directory) / config.base.model
    if direct.is_dir():
        return direct
    if "/" in config.base.model and not config.base.model.startswith((".", "/")) and config.base.model.count("/") == 1:
        return _from_hub(config.base.model, config.base.revision)
    raise CheckpointError(
        "model.missing",
        f"there is no model directory {direct}.",
        fix="base.model: a folder with config.json and *.safetensors, or org/name of a hub",
    )


def pin_base(config: JobConfig) -> JobConfig:
    """The same job with the hub model's commit as `base.revision`, so that a resumed run meets the same weights."""
    commit = commit_of(base_directory(config))
    if commit is None or (Path(config.directory) / config.base.model).is_dir():
        return config
    return config.model_copy(update={"base": config.base.model_copy(update={"revision": commit})})


def _from_hub(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            "model.missing",
            f"'{name}' is no directory, and hub names need the hf extra.",
            fix='pip install "lorafusion-jax[hf]"',
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=ALLOWED))
    except Exception as problem:  # the hub client raises many kinds; each means that there is no model
        raise CheckpointError("model.hub", f"the model '{name}' could not be fetched.", why=str(problem)) from None


def prepare(config: JobConfig, *, progress: Callable[[str], None] = lambda text: None) -> Prepared:
    """Tokenises every adapter's data and fixes the order of samples.

    Raises:
        DataError, CheckpointError, ErrorList: every problem of every adapter.
    """
    directory = base_directory(config)
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
    raise_all(list({str(error): error for error in errors}.values()))
    return Prepared(tokenizer=tokenizer, adapters=adapters)


def _adapter_data(config: JobConfig, adapter: AdapterConfig, tokenizer: Tokenizer) -> AdapterData:
    def load(source: str, settings: DataSettings) -> TokenizedSet:
        return load_samples(
            source, settings=settings, tokenizer=tokenizer, adapter=adapter.name, base_dir=Path(config.directory)
        )

    train = load(adapter.data.train, adapter.data)
    held_out = load(adapter.data.eval, adapter.data) if adapter.data.eval else None
    return AdapterData(
        train=train, eval=held_out, order=sample_order(adapter, len(train.lengths), config.train.max_steps)
    )


def sample_order(adapter: AdapterConfig, num_samples: int, max_steps: int | None = None) -> np.ndarray:
    """Draws the adapter's stream of samples: `epochs` permutations, cut after `max_steps` global batches.

    A function of the adapter's own seed and size, so company cannot change it.
    """
    epochs = [np.random.default_rng((adapter.seed, epoch)).permutation(num_samples) for epoch in range(adapter.epochs)]
    order = np.concatenate(epochs)
    return order if max_steps is None else order[: max_steps * adapter.global_samples]


def train_jobs(config: JobConfig, prepared: Prepared) -> list[AdapterJob]:
    """Describes the adapters to the planner; sample i of a job is position i of the adapter's stream."""
    return [
        AdapterJob(
            name=adapter.name,
            sample_tokens=prepared.adapters[adapter.name].stream_tokens().tolist(),
            global_batch=adapter.global_samples,
            epochs=1,
            weight=adapter.weight,
        )
        for adapter in config.adapters
    ]


def plan_training(config: JobConfig, prepared: Prepared) -> Plan:
    """Plans the run; the plan is verified by the planner."""
    return make_plan(
        train_jobs(config, prepared),
        capacity_tokens=config.batch.capacity_tokens,
        num_stages=config.mesh.stages,
        data_parallel=config.mesh.replicas,
        tile_tokens=config.batch.tile_tokens,
        seed=0,
        **search_effort(config),
    )


def search_effort(config: JobConfig) -> dict[str, Any]:
    """How long the planner may look for a shorter plan."""
    seconds = config.train.plan_seconds
    return {
        "time_limit_s": CLOCK_SLACK * seconds,
        "search_evaluations": round(EVALUATIONS_PER_S * seconds),
    }
