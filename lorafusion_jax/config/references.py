"""References of adapters: which weights an objective compares with, from the key `objective.reference`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal, NamedTuple

from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.errors import did_you_mean
from lorafusion_jax.peft.read_config import CONFIG_FILE, did_you_mean_adapter
from lorafusion_jax.readable import has_file

BASE, START = "base", "start"


class ReferenceWeights(NamedTuple):
    """Weights of a reference.

    Attributes:
        kind: the base alone, an adapter of the job before its first step, or a PEFT folder.
        name: of the adapter, or path of the folder as the job file spells it.
    """

    kind: Literal["base", "adapter", "folder"]
    name: str = ""

    def __str__(self) -> str:
        return self.name if self.kind == "folder" else f"{self.name} at its start" if self.name else "the base"


def reference_of(adapter: AdapterConfig, names: Collection[str]) -> ReferenceWeights | None:
    """Returns the reference of an adapter; None if its objective needs none.

    Args:
        names: adapters of the job.

    >>> from lorafusion_jax.config.schema import DataSettings
    >>> reference_of(AdapterConfig(name="law", data=DataSettings(train="law.jsonl")), ["law"])
    """
    objective = adapter.objective.chosen
    if not objective.compares:
        return None
    name = objective.reference or (BASE if adapter.lora.init_from is None else START)
    if name == BASE:
        return ReferenceWeights("base")
    if name == START:
        return ReferenceWeights("adapter", adapter.name)
    return ReferenceWeights("adapter" if name in names else "folder", name)


def unknown_reference(adapter: AdapterConfig, names: Collection[str], directory: Path) -> str | None:
    """Explains a reference that does not exist; None if it does."""
    reference = reference_of(adapter, names)
    if reference is None or reference.kind != "folder" or has_file(directory / reference.name / CONFIG_FILE):
        return None
    near = did_you_mean(reference.name, [BASE, START, *names])
    near = near or did_you_mean_adapter(directory / reference.name, reference.name)
    message = f"there is no adapter '{reference.name}' in the job, and no PEFT folder of that name"
    return f"{message}; {near}" if near else message


def reference_sources(config: JobConfig) -> dict[str, str]:
    """Returns what the reference of each adapter is that needs one, in words."""
    names = [adapter.name for adapter in config.adapters]
    return {
        adapter.name: str(reference)
        for adapter in config.adapters
        if (reference := reference_of(adapter, names)) is not None
    }


def adapters_with_references(config: JobConfig) -> list[str]:
    """Returns the adapters whose samples need a reference; that of rollouts is computed as they are drawn."""
    return [
        adapter.name for adapter in config.adapters if adapter.objective.chosen.compares and not adapter.rollout.is_on
    ]
