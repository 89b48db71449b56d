"""The keys of a model's config.json that affect its computation, with their types and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# The limits are far above all existing models. They prevent endless computation on a corrupt file.
Width = Annotated[int, Field(ge=1, le=2**20)]
Entries = Annotated[int, Field(ge=1, le=2**24)]
Depth = Annotated[int, Field(ge=1, le=4096)]
Positions = Annotated[int, Field(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Field(ge=1e-30, le=1e30, allow_inf_nan=False)]
SHOWN = 60  # characters of an invalid value to show in a message


class HFConfig(BaseModel):
    """Values of config.json; None for missing keys. Other keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    architectures: list[str] | None = None
    model_type: str | None = None
    vocab_size: Entries | None = None
    hidden_size: Width | None = None
    intermediate_size: Width | None = None
    num_hidden_layers: Depth | None = None
    num_attention_heads: Width | None = None
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    rms_norm_eps: Positive | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    max_position_embeddings: Positions | None = None
    rope_theta: Positive | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    sliding_window: Positions | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Field(ge=0)] | None = None
    layer_types: list[str] | None = None
    hidden_act: str | None = None
    quantization_config: dict[str, Any] | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    is_encoder_decoder: bool | None = None


class RopeValues(BaseModel):
    """Parameters of rotary embeddings, in both formats."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    rope_theta: Positive | None = None
    rope_type: str | None = None
    type: str | None = None
    partial_rotary_factor: float | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Positions | None = None


def parse_part[M: BaseModel](model: type[M], values: Mapping[str, Any], problems: list[str]) -> M:
    """Validates values. Errors are added to `problems`, and their keys count as missing."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as found:
        wrong = {str(detail["loc"][0]) for detail in found.errors()}
        problems += list(dict.fromkeys(_problem(detail, values) for detail in found.errors()))
    return model.model_validate({key: value for key, value in values.items() if key not in wrong})


def _problem(detail, values: Mapping[str, Any]) -> str:
    key = str(detail["loc"][0])
    value = values[key]
    wanted = {
        "int_type": "a positive integer",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "string_type": "a text" if len(detail["loc"]) == 1 else "a list of texts",
        "list_type": "a list of texts",
        "dict_type": "an object",
    }.get(detail["type"])
    if detail["type"] == "greater_than_equal" and isinstance(value, int):
        wanted = "a positive integer"
    limits = detail.get("ctx", {})
    wanted = wanted or f"{limits['ge']} or more" if "ge" in limits else wanted or f"{limits.get('le')} or less"
    return f"{key}={shortened(value)} is not {wanted}"


def shortened(value: object) -> str:
    """An invalid value for a message; values that cannot be shown are replaced by their type."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, endlessly nested lists
        return f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
