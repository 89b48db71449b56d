"""Objectives of training, and the token losses that they use.

Names that need jax are imported on use, so that planning can import objectives without jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lorafusion_jax.objective.protocol import Objective as Objective
from lorafusion_jax.objective.protocol import SampleSums as SampleSums
from lorafusion_jax.objective.protocol import Segment as Segment

if TYPE_CHECKING:
    from lorafusion_jax.objective.loss import adapter_losses as adapter_losses
    from lorafusion_jax.objective.loss import token_losses as token_losses

_WITH_JAX = ("adapter_losses", "token_losses")
__all__ = ["Objective", "SampleSums", "Segment", "adapter_losses", "token_losses"]


def __getattr__(name: str):
    if name not in _WITH_JAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.loss"), name)


def __dir__() -> list[str]:
    return __all__
