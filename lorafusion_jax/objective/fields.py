"""Types of the options of objectives."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]

# TRL's trainers of preferences switch dropout off, because a comparison with it is noisy; and the usual rate of
# supervised fine-tuning is 20 times too high for them.
PREFERENCE_DEFAULTS = {"lora.dropout": 0.0, "optim.lr": 1e-5, "data.max_length": 1024}


def as_tuple(value: object) -> object:
    """Returns one value as a tuple, and a list as it is."""
    return (value,) if isinstance(value, str) else value
