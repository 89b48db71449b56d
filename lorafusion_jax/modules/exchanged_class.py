"""Subclasses of a model's classes that are called otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from flax import nnx


@cache
def exchanged_class(
    cls: type, prefix: str, call: Callable[..., Any], attribute: Callable[[Any, str], Any] | None = None
) -> type:
    """Returns a subclass of a module's class that is called otherwise: `isinstance` still holds.

    Args:
        attribute: replaces `__getattribute__`.
    """

    def __call__(module: Any, *args: Any, **options: Any) -> Any:  # named like any module's, for `nnx.tabulate`
        return call(module, *args, **options)

    def reduce(module: Any, protocol: Any) -> tuple:
        """Names how the class is made: pickle looks a class up by its name, and no module has this one."""
        return (_new, (cls, prefix, call, attribute), *super(cls_with_call, module).__reduce_ex__(protocol)[2:])

    members = {"__call__": __call__, "lora_class": cls, "__module__": cls.__module__, "__reduce_ex__": reduce}
    members |= {} if attribute is None else {"__getattribute__": attribute}
    cls_with_call = type(f"{prefix}{cls.__name__}", (cls,), members)
    return cls_with_call


def _new(cls: type, prefix: str, call: Callable[..., Any], attribute: Callable[[Any, str], Any] | None) -> Any:
    subclass: Any = exchanged_class(cls, prefix, call, attribute)
    return subclass.__new__(subclass)


def own_class(module: nnx.Module) -> type:
    """Returns the class of a module before its call was exchanged."""
    return getattr(type(module), "lora_class", type(module))
