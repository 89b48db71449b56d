"""The sections of a job file: those of the whole run, and defaults that adapters may override."""

from __future__ import annotations

from pydantic import BaseModel

from lorafusion_jax.config import schema

SHARED: dict[str, type[BaseModel]] = {  # one value for the whole run
    "base": schema.BaseSettings,
    "batch": schema.BatchSettings,
    "mesh": schema.MeshSettings,
    "save": schema.SaveSettings,
    "train": schema.TrainSettings,
    "halving": schema.HalvingSettings,
    "report": schema.ReportSettings,
}
DEFAULTS: dict[str, type[BaseModel]] = {  # shared defaults that every adapter may override
    "data": schema.DataSettings,
    "lora": schema.LoraSettings,
    "optim": schema.OptimSettings,
    "objective": schema.ObjectiveSettings,
    "rollout": schema.RolloutSettings,
    "eval": schema.EvalSettings,
    "early_stop": schema.EarlyStopSettings,
}
SINGLE_DEFAULTS = ("epochs", "seed", "weight", "priority")
ADAPTER_KEYS = ("name", *DEFAULTS, "batch", *SINGLE_DEFAULTS)
