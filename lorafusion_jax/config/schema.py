"""The schema of job files: one frozen pydantic model per section; every field has its unit and default.

Sections of adapters are in `adapter_sections`, those of runs in `run_sections`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, field_validator

from lorafusion_jax.config.adapter_sections import DataSettings, LoraSettings, ObjectiveSettings, OptimSettings
from lorafusion_jax.config.rollout_section import EvalSettings, RolloutSettings
from lorafusion_jax.config.run_sections import (
    BaseSettings,
    BatchSettings,
    EarlyStopSettings,
    HalvingSettings,
    HandoverSettings,
    MeshSettings,
    ReportSettings,
    SaveSettings,
    TrainSettings,
)
from lorafusion_jax.config.values import Count, Flag, Positive, Section, Whole

# Safe as a folder name on every system. `=` has an error of its own, see `job_checks`.
ADAPTER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@=+-]{0,99}$"


class Extension(Section):
    """Samples that `lorafusion extend` added to an adapter's stream; a batch and a schedule begin with them.

    Attributes:
        after: samples of the stream before it.
        samples: how many were added.
    """

    after: Count
    samples: Count


class AdapterConfig(Section):
    """One adapter with its own settings and the defaults."""

    name: Annotated[str, Field(pattern=ADAPTER_NAME)]
    data: DataSettings
    lora: LoraSettings = LoraSettings()
    optim: OptimSettings = OptimSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    rollout: RolloutSettings = RolloutSettings()
    eval: EvalSettings = EvalSettings()
    early_stop: EarlyStopSettings = EarlyStopSettings()
    global_samples: Count = 16
    epochs: Count = Field(default=1, description="passes over the adapter's data")
    seed: Annotated[Whole, Field(ge=0, lt=2**32)] = Field(
        default=0, description="seed of the adapter's initial weights, dropout and order of samples"
    )
    weight: Positive = Field(default=1.0, description="share of the machine relative to the other adapters")
    priority: Annotated[Whole, Field(ge=-100, le=100)] = Field(
        default=0, description="of its job in a service, which places higher ones first; a run here has all at once"
    )
    extended: tuple[Extension, ...] = ()  # of a run; job files do not have it
    joined: Flag = False  # the run began without it; job files do not have it

    @field_validator("name")
    @classmethod
    def _no_dots_only(cls, name: str) -> str:
        if set(name) <= {"."}:
            raise ValueError("a name needs a letter or digit")
        return name


class JobConfig(Section):
    """A job: one base model, the adapters, and the settings of the run."""

    base: BaseSettings
    adapters: tuple[AdapterConfig, ...] = Field(min_length=1)
    batch: BatchSettings = BatchSettings()
    mesh: MeshSettings = MeshSettings()
    save: SaveSettings = SaveSettings()
    train: TrainSettings = TrainSettings()
    halving: HalvingSettings = HalvingSettings()
    report: ReportSettings = ReportSettings()
    handover: HandoverSettings = HandoverSettings()
    auto: tuple[str, ...] = Field(default=(), exclude=True, description="keys that the planner sets at the start")
    directory: str = Field(default=".", description="folder of the job file, for relative paths")

    @property
    def ends_early(self) -> bool:
        """Whether an evaluation can end an adapter."""
        return self.halving.is_on or any(adapter.early_stop.patience is not None for adapter in self.adapters)

    def adapter(self, name: str) -> AdapterConfig:
        return next(adapter for adapter in self.adapters if adapter.name == name)


# The sections of a job file: those of the whole run, and defaults that adapters may override.
SHARED: dict[str, type[BaseModel]] = {  # one value for the whole run
    "base": BaseSettings,
    "batch": BatchSettings,
    "mesh": MeshSettings,
    "save": SaveSettings,
    "train": TrainSettings,
    "halving": HalvingSettings,
    "report": ReportSettings,
    "handover": HandoverSettings,
}
DEFAULTS: dict[str, type[BaseModel]] = {  # shared defaults that every adapter may override
    "data": DataSettings,
    "lora": LoraSettings,
    "optim": OptimSettings,
    "objective": ObjectiveSettings,
    "rollout": RolloutSettings,
    "eval": EvalSettings,
    "early_stop": EarlyStopSettings,
}
SINGLE_DEFAULTS = ("epochs", "seed", "weight", "priority")
ADAPTER_KEYS = ("name", *DEFAULTS, "batch", *SINGLE_DEFAULTS)
