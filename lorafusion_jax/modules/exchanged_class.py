"""Subclasses of a model's classes that are called otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from flax import nnx


@cache
def exchanged_class(cls: type, prefix: str, call: Callable[..., Any]) -> type:
    """Returns a subclass of a module's class that is called otherwise: `isinstance` still holds."""
    return type(f"{prefix}{cls.__name__}", (cls,), {"__call__": call, "lora_class": cls, "__module__": cls.__module__})


def own_class(module: nnx.Module) -> type:
    """Returns the class of a module before its call was exchanged."""
    return getattr(type(module), "lora_class", type(module))
