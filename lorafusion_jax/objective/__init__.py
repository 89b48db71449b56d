"""What training minimises: token losses by row and by adapter.

The names are looked up when they are used, so that `lorafusion_jax.objective.chunks` can be imported without jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lorafusion_jax.objective.loss import adapter_losses as adapter_losses
    from lorafusion_jax.objective.loss import token_losses as token_losses

__all__ = ["adapter_losses", "token_losses"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.loss"), name)


def __dir__() -> list[str]:
    return __all__
