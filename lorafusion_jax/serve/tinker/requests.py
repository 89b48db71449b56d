"""JSON bodies of the training API, with the names of the SDK."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from lorafusion_jax.serve.api.problems import ApiError

Id = Annotated[str, Field(min_length=1, max_length=200)]
Seq = Annotated[int, Field(ge=0, lt=2**62)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
CHECKPOINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SHORTEST_TTL, LONGEST_TTL = 3600, 315_360_000  # seconds


class Message(BaseModel):
    """A body. Fields of newer clients are refused where they ask for something, and ignored where they are empty."""

    model_config = ConfigDict(protected_namespaces=(), extra="ignore")
    type: str = ""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: Any) -> Any:
        if isinstance(values, dict):
            unknown = [str(key)[:100] for key, value in values.items() if key not in cls.model_fields and value]
            if unknown:
                raise ValueError(f"there is no field {', '.join(sorted(unknown))}")
        return values


class Turn(BaseModel):
    """Which request of which model."""

    model_config = ConfigDict(protected_namespaces=())
    model_id: Id
    seq_id: Seq


class Numbered(Message):
    """A request in the log of a model. A mistake in its values fails it in its turn: later ones would wait for it.

    Attributes:
        mistake: `refused` and why, or nothing; all other values are defaults then.
    """

    _mistake: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def mistake(self) -> dict[str, str]:
        return self._mistake

    @model_validator(mode="wrap")
    @classmethod
    def _keep_turn(cls, values: Any, handler: Callable[[Any], Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as problem:
            try:
                turn = Turn.model_validate(values)
            except ValidationError:
                raise problem from None
            request = cls.model_construct(**turn.model_dump())
            mistakes = (f"{'.'.join(map(str, error['loc']))} {error['msg']}".strip() for error in problem.errors())
            request._mistake = {"refused": "; ".join(mistakes)[:1000]}
            return request


class Loose(BaseModel):
    """A body that is stored or ignored as it is."""

    model_config = ConfigDict(extra="allow")


class ClientConfig(Message):
    sdk_version: Annotated[str, Field(max_length=100)] = ""


class CreateSession(Message):
    tags: Annotated[list[str], Field(max_length=1000)] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: Annotated[str, Field(max_length=100)] = ""
    project_id: str | None = None
    display_name: Annotated[str, Field(max_length=1000)] | None = None


class Heartbeat(Message):
    session_id: Id


class FinishSession(Message):
    reason: dict[str, Any] = {}
    detail: Annotated[str, Field(max_length=10_000)] | None = None


class LoraConfig(Message):
    rank: Annotated[int, Field(ge=1, le=1024)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Loose):
    type: str = "adamw"


class CreateModel(Message):
    session_id: Id
    model_seq_id: Seq
    base_model: Annotated[str, Field(min_length=1, max_length=200)]
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class ModelOnly(Message):
    model_id: Id


class AdamParams(Message):
    learning_rate: Finite = 1e-4
    beta1: Finite = 0.9
    beta2: Finite = 0.95
    eps: Finite = 1e-12
    weight_decay: Finite = 0.0
    grad_clip_norm: Finite = 0.0


class OptimStep(Numbered):
    model_id: Id
    seq_id: Seq
    adam_params: AdamParams | None = None
    optimizer_params: OptimizerConfig | None = None


class LoadWeights(Numbered):
    path: Annotated[str, Field(max_length=1000)]
    optimizer: bool
    model_id: Id | None = None
    seq_id: Seq | None = None
    session_id: Id | None = None
    model_seq_id: Seq | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class Save(Numbered):
    model_id: Id
    seq_id: Seq
    path: Annotated[str, Field(max_length=1000)] | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None


class SaveWeights(Save):
    overwrite: bool = False


class SaveForSampler(Save):
    sampling_session_seq_id: Seq | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class SaveExternal(Save):
    age_encryption_recipients: list[str] | None = None


class Retrieve(Message):
    request_id: Id
    allow_metadata_only: bool = False


class Cancel(Message):
    request_id: Id


class Ttl(Message):
    ttl_seconds: int | None = None


class WeightsInfo(Message):
    tinker_path: Annotated[str, Field(max_length=1000)]


class CreateSampler(Message):
    session_id: Id
    sampling_session_seq_id: Seq
    base_model: Annotated[str, Field(max_length=200)] | None = None
    model_path: Annotated[str, Field(max_length=1000)] | None = None


def check_ttl(seconds: int | None) -> None:
    """Checks how long a checkpoint is to live.

    Raises:
        ApiError: 422, `api.ttl`.
    """
    if seconds is not None and not SHORTEST_TTL <= seconds <= LONGEST_TTL:
        message = f"ttl_seconds is {SHORTEST_TTL} to {LONGEST_TTL}, not {seconds}."
        raise ApiError(422, "api.ttl", message, fix="a time in these bounds, or none: it is kept")
