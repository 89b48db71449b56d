"""What a client asks for, and the job file that it means."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lorafusion_jax.adapters.spec import spelled
from lorafusion_jax.adapters.table import BIASED, PLAIN
from lorafusion_jax.config.chat_templates import NAMED, is_template
from lorafusion_jax.config.load import examine_source
from lorafusion_jax.config.places import ON_EXPERTS
from lorafusion_jax.config.read import source_of
from lorafusion_jax.config.references import BASE, START
from lorafusion_jax.config.schema import JobConfig, ObjectiveSettings, OptimSettings
from lorafusion_jax.config.values import Count, Positive
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.layout.layer import EXPERTS

JOB_NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
DATASET = r"^sha256-[0-9a-f]{64}$"
ARTIFACT = r"^adapter-[0-9a-f]{12}$"

Deadline = Annotated[float, Field(ge=0, le=2**40, allow_inf_nan=False, description="seconds since 1970")]
MOST_PATTERNS, MOST_LAYERS = 64, 999  # each pattern is matched with every projection
MOST_TARGETS, LONGEST_JOB = 512, 32 << 10  # names, and bytes of all values as JSON: the server itself reads them
RUN = "train it in a run: lorafusion train"
NOT_SERVED = {  # keys of a job file that a place of a live session does not have → why
    "lora.trainable_tokens": "a place has no rows of the embedding",
    "early_stop": "a job of a service trains all its steps, until it is cancelled",
    "halving": "jobs of a service do not know of each other",
    "rollout": "a live session samples for clients of the training API only, and runs no functions of users",
    "eval": "a service runs no functions of users",
    "handover": "a service hands over where its operator says: serve --handover",
}


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DataSpec(Part):
    """Data of a job. `train` and `eval` are ids of data sets."""

    train: Annotated[str, Field(pattern=DATASET, examples=["sha256-" + "0" * 64])]
    eval: Annotated[str, Field(pattern=DATASET)] | None = None
    format: str = "auto"
    columns: Annotated[dict[str, str], Field(max_length=MOST_PATTERNS)] = {}
    max_length: Annotated[int, Field(ge=2, le=2**31 - 1)] = 4096
    on_long: Literal["cut", "drop", "error"] = "cut"
    on_bad: Literal["drop", "error"] = "drop"
    loss: Literal["auto", "assistant", "completion", "all"] = "auto"
    chat_template: str | None = Field(default=None, description=f"{', '.join(NAMED)}, or the text of a Jinja template")

    @field_validator("chat_template")
    @classmethod
    def _is_no_file(cls, value: str | None) -> str | None:
        if value is not None and value not in NAMED and not is_template(value):
            raise ValueError(f"{', '.join(NAMED)}, or the text of a template; a service reads no file of its client")
        return value


class BatchSpec(Part):
    """Batch of a job."""

    global_samples: Count = 16


class LoraSpec(Part):
    """As `lora` of a job file; other files are named by `init_from` of the job."""

    kind: str = "lora"
    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    alpha: Positive = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(default=None, description="default 0.05; dora has none")
    targets: str | Annotated[list[str], Field(max_length=MOST_TARGETS)] = "all-linear"
    rslora: bool = False
    rank_pattern: Annotated[dict[str, Annotated[int, Field(ge=1, le=1024)]], Field(max_length=MOST_PATTERNS)] = {}
    alpha_pattern: Annotated[dict[str, Positive], Field(max_length=MOST_PATTERNS)] = {}
    layers_to_transform: (
        Annotated[list[Annotated[int, Field(ge=0, le=MOST_LAYERS)]], Field(min_length=1, max_length=MOST_LAYERS + 1)]
        | None
    ) = None
    exclude: str | Annotated[list[str], Field(max_length=MOST_PATTERNS)] = []
    lora_bias: bool = False


class ObjectiveSpec(ObjectiveSettings):
    """As `objective` of a job file. `reference` is base, start, or the id of an adapter of the same owner."""

    @field_validator("reference")
    @classmethod
    def _is_no_path(cls, reference: str | None) -> str | None:
        if reference not in (None, BASE, START) and not re.fullmatch(ARTIFACT, reference):
            raise ValueError(f"{BASE}, {START} or the id of an adapter, such as adapter-0123456789ab")
        return reference


class JobSpec(Part):
    """An adapter to train. Values have the meaning and the defaults of a job file."""

    name: Annotated[str, Field(pattern=JOB_NAME, examples=["law-1"])]
    base: Annotated[str, Field(min_length=1, max_length=100, examples=["tiny"])]
    data: DataSpec
    lora: LoraSpec = LoraSpec()
    optim: OptimSettings = OptimSettings()
    objective: ObjectiveSpec = ObjectiveSpec()
    batch: BatchSpec = BatchSpec()
    steps: Count | None = Field(default=None, description="optimizer steps; default all epochs")
    epochs: Count = 1
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    weight: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 1.0
    priority: Annotated[int, Field(ge=-100, le=100)] = Field(default=0, description="higher ones are placed first")
    deadline: Deadline | None = None
    max_slowdown: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] | None = Field(
        default=None, description="bound on its time in a group over its time alone on its share; with a policy only"
    )
    init_from: Annotated[str, Field(pattern=ARTIFACT)] | None = Field(
        default=None, description="id of an adapter of the same owner to continue from"
    )

    @field_validator("steps", "epochs", "seed", "weight", "priority", "deadline", "max_slowdown", mode="before")
    @classmethod
    def _check_number(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("true and false are no numbers")
        return value


def job_values(
    spec: dict[str, Any], name: str, *, base: Path, files: dict[str, Path], session: dict[str, Any],
    start: Path | None = None, reference: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Returns the job file of a spec, as `examine` and the worker take it.

    Args:
        name: name of the adapter: in a session its job's id.
        files: path of each data set.
        session: sections base, batch, mesh and train of the session.
        start: PEFT folder to start from.
        reference: PEFT folder that the objective compares with, if that is an adapter.
    """
    data = {key: value for key, value in spec["data"].items() if key not in ("train", "eval") and value is not None}
    data |= {key: str(files[spec["data"][key]]) for key in ("train", "eval") if spec["data"].get(key)}
    lora = {key: value for key, value in spec["lora"].items() if value is not None}
    if start is not None:
        lora = {"init_from": str(start)} | {key: lora[key] for key in ("kind", "dropout") if key in lora}
    objective = {key: value for key, value in spec.get("objective", {}).items() if value is not None}
    if reference is not None:
        objective["reference"] = str(reference)
    adapter = {
        "name": name,
        "data": data,
        "lora": lora,
        "objective": objective,
        "optim": {key: value for key, value in spec["optim"].items() if value is not None},
        "batch": {"global_samples": spec["batch"]["global_samples"]},
        "epochs": spec["epochs"],
        "seed": spec["seed"],
        "weight": spec["weight"],
    }
    train = {**session["train"]} | ({"max_steps": spec["steps"]} if spec["steps"] else {})
    return {
        "base": {**session["base"], "model": str(base)},
        "batch": {**session["batch"]},
        "mesh": {**session["mesh"]},
        "train": train,
        "adapters": [adapter],
    }


def stream_values(spec: dict[str, Any], name: str, owner: str, path: Callable[[str], Path]) -> dict[str, Any]:
    """Returns what the adapter of a model of the training API is, as the worker takes it.

    Args:
        name: of the adapter: in a session its job's id.
        owner: of the model.
        path: (path of the database) → where it is.
    """
    load = spec["stream"]["load"]
    start = None if load is None else load | {"folder": str(path(load["folder"]))}
    return {"stream": {"name": name, "owner": owner, "seed": spec["seed"], "load": start, **spec["lora"]}}


def kind_of(spec: dict[str, Any]) -> str:
    """Kind of the adapter of a spec, as places name it.

    >>> kind_of({"lora": {"kind": "lora", "lora_bias": True}})
    'lora-bias'
    >>> kind_of({"lora": {"targets": ["q_proj", "mlp.experts.down_proj"]}})
    'experts'
    """
    lora = spec.get("lora", {})
    if any(name in EXPERTS for name in spelled(lora.get("targets", ()), ())):
        return ON_EXPERTS
    return BIASED if lora.get("lora_bias") else lora.get("kind", PLAIN)


def examine(values: dict[str, Any]) -> tuple[JobConfig | None, list[LoraFusionError]]:
    """Validates a job file of `job_values`; returns its errors with it."""
    return examine_source(source_of(values))
