"""Which backend serves a call: the names, and the choice when the caller names none."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Literal

from pallas_kernels.problem import Operands, Static
from pallas_kernels.tuning.choice import preferred

Implementation = Literal["xla", "pallas_triton", "pallas_mosaic_gpu"]

_MODULES = {
    "xla": "pallas_kernels.xla",
    "pallas_triton": "pallas_kernels.triton.backend",
    "pallas_mosaic_gpu": "pallas_kernels.mosaic_gpu.backend",
}


def load(name: str) -> ModuleType:
    """Imports a backend: functions `refusal`, `forward` and `backward` over (Static, Operands)."""
    if name not in _MODULES:
        raise ValueError(f"unknown implementation {name!r}; choose one of {', '.join(sorted(_MODULES))} or None")
    return importlib.import_module(_MODULES[name])


def choose(implementation: str | None, static: Static, ops: Operands) -> str:
    """Returns the backend's name; None takes the one that measured fastest for this device and shape."""
    if implementation is None:
        return next(name for name in preferred(static, ops) if load(name).refusal(static, ops) is None)
    load(implementation)
    return implementation


def check(static: Static, ops: Operands) -> None:
    """Raises NotImplementedError with the reason when the chosen backend cannot serve the call."""
    reason = load(static.backend).refusal(static, ops)
    if reason is not None:
        raise NotImplementedError(f"implementation={static.backend!r} cannot serve this call: {reason}")
