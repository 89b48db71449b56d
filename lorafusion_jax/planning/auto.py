"""Sets what a job leaves to the planner, from the same comparison as `lorafusion plan --gpus`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.auto import CAPACITY, MESH, QUANTIZE
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.planning.choices import Choice, compare_choices
from lorafusion_jax.planning.network import Network
from lorafusion_jax.planning.prediction import known_device, this_device

GIB = 2**30


def resolve_auto(
    config: JobConfig,
    prepared: Prepared,
    *,
    device: str,
    gpus: int = 1,
    memory_bytes: int | None = None,
    network: Network | None = None,
) -> tuple[JobConfig, str]:
    """Returns the job with a value for each `auto`, and a sentence that says what was chosen and why.

    Args:
        device: whose rates predict, one of `prediction.DEVICES`.
        gpus: number of devices, for `mesh: auto`.
        memory_bytes: of a device (None: of its data sheet).
        network: of the processes that share the devices (None: one process).

    Raises:
        ConfigError: `auto.memory`, nothing fits.
        CheckpointError: the base is of an unknown kind.
    """
    if not config.auto:
        return config, ""
    model = ModelConfig.from_hf(base_directory(config))
    choices = compare_choices(
        config,
        model,
        prepared,
        device=device,
        gpus=gpus,
        vary=config.auto,
        memory_bytes=memory_bytes,
        network=network,
    )
    best = choices.best
    if best is None:
        least = min(choices.choices, key=lambda choice: choice.memory_bytes)
        raise ConfigError(
            "auto.memory",
            f"no choice for {', '.join(config.auto)} fits into the memory of {gpus} × {device}.",
            why=f"the smallest needs {least.memory_bytes / GIB:.1f} GiB on its fullest device",
            fix="more devices, shorter samples (data.max_length), or fewer or smaller adapters",
        )
    settings = ", ".join(f"{key}={value}" for key, value in _values(best, config).items())
    return with_choice(config, best), f"{settings}: {choices.why or 'nothing else was compared'} (predicted)"


def with_choice(config: JobConfig, choice: Choice) -> JobConfig:
    """Returns the job with the values of a choice for each `auto`."""
    update: dict[str, Any] = {"auto": ()}
    if MESH in config.auto:
        update["mesh"] = config.mesh.model_copy(update=choice.mesh._asdict() | {"layers": None})
    if CAPACITY in config.auto:
        update["batch"] = config.batch.model_copy(update={"capacity_tokens": choice.capacity_tokens})
    if QUANTIZE in config.auto:
        update["base"] = config.base.model_copy(update={"quantize": choice.quantize})
    return config.model_copy(update=update)


def device_for_rates(kind: str) -> str:
    """The known device whose rates are nearest to a kind of device, as its driver calls it.

    >>> device_for_rates("NVIDIA H100 80GB HBM3"), device_for_rates("NVIDIA RTX 6000 Ada Generation")
    ('h100', 'rtx6000-ada')
    """
    return known_device(kind) or this_device()


def _values(choice: Choice, config: JobConfig) -> Mapping[str, object]:
    mesh = f"{choice.stages} × {choice.data} × {choice.fsdp}" + (f" × {choice.tensor}" if choice.tensor > 1 else "")
    values = {CAPACITY: choice.capacity_tokens, MESH: mesh, QUANTIZE: choice.quantize}
    return {key: value for key, value in values.items() if key in config.auto}
