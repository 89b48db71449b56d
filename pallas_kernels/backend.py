"""What a backend of the linear ops is, which ones there are, and the one place where a call gets its backend.

A backend from outside this package is an object with the three functions of `Backend`:

    register("mine", MyBackend())
    multi_lora_linear(..., implementation="mine")

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast, runtime_checkable

import jax

from pallas_kernels import config_store, policy
from pallas_kernels.device import device_kind, is_hopper, num_sms
from pallas_kernels.measured import OpCall
from pallas_kernels.problem import Operands, Static, linear_shape

_BUILT_IN = {
    policy.XLA: "pallas_kernels.linear.xla",
    policy.TRITON: "pallas_kernels.linear.triton.backend",
    policy.HOPPER: "pallas_kernels.linear.hopper.backend",
}
_QUANTISED = {policy.HOPPER: "pallas_kernels.quantised.hopper"}  # for weights that multiply by themselves
_registered: dict[str, Backend] = {}

type Arrays = tuple[jax.Array, ...]
type ByProjection = dict[int, jax.Array]


@runtime_checkable
class Backend(Protocol):
    """Evaluates and differentiates one call; pure functions over arrays. Modules serve as well as objects."""

    def unsupported_reason(self, static: Static, ops: Operands) -> str | None:
        """Says why the call cannot be served, before anything is traced; None if it can."""
        ...

    def forward(self, static: Static, ops: Operands) -> tuple[Arrays, Arrays, jax.Array | None]:
        """Returns y of every projection, and what backward needs: S, and packed keep bits or None."""
        ...

    def backward(
        self, static: Static, ops: Operands, ss: Arrays, bits: jax.Array | None, dys: Arrays
    ) -> tuple[jax.Array, ByProjection, ByProjection]:
        """Returns dx, and dA and dB (float32) by the number of the projection."""
        ...


def register(name: str, backend: Backend) -> None:
    """Makes a backend available as `implementation=name`; no message offers one whose name begins with `_`.

    Raises:
        ValueError: the name is taken.
        TypeError: the object lacks a function of `Backend`.
    """
    if name in names():
        raise ValueError(f"implementation {name!r} exists already; choose another name")
    if not isinstance(backend, Backend):
        raise TypeError(f"{backend!r} is no backend: it needs unsupported_reason, forward and backward")
    _registered[name] = backend


def unregister(name: str) -> None:
    """Removes a registered backend."""
    del _registered[name]


def names() -> tuple[str, ...]:
    """Names of all backends, built in and registered."""
    return (*_BUILT_IN, *_registered)


def load(name: str, *, quantised: bool = False) -> Backend:
    """Returns a backend; one of this package is imported when it is first asked for.

    Args:
        quantised: the one of that name that serves quantised weights, where there are two.

    Raises:
        ValueError: there is no backend of that name.
    """
    if name in _registered:
        return _registered[name]
    if name not in _BUILT_IN:
        public_names = sorted(public for public in names() if not public.startswith("_"))
        raise ValueError(f"unknown implementation {name!r}; choose one of {', '.join(public_names)} or None")
    homes = _BUILT_IN | _QUANTISED if quantised else _BUILT_IN
    return cast(Backend, importlib.import_module(homes[name]))


def select(static: Static, ops: Operands, wanted: str | None) -> Backend:
    """Returns the backend of a call; see `select_name`."""
    return load(select_name(static, ops, wanted), quantised=ops.quantised)


def select_name(static: Static, ops: Operands, wanted: str | None) -> str:
    """Returns the wanted backend's name, or the first of the policy's order that serves the call.

    Raises:
        ValueError: there is no backend of the wanted name.
        NotImplementedError: the wanted backend cannot serve the call; the message says why.
    """
    order = (wanted,) if wanted is not None else preferred(static, ops)
    reasons = []
    for name in order:
        reason = load(name, quantised=ops.quantised).unsupported_reason(static, ops)
        if reason is None:
            return name
        reasons.append(f"implementation={name!r} cannot serve this call: {reason}")
    raise NotImplementedError("; ".join(reasons))


def preferred(static: Static, ops: Operands) -> tuple[str, ...]:
    """The policy's order for a call on this device."""
    measured = policy.nothing_measured if ops.quantised else measured_backend
    return policy.preferred(linear_shape(static, ops), hopper=is_hopper(), num_sms=num_sms(), measured=measured)


def measured_backend(call: OpCall) -> str | None:
    """The backend that measured fastest on this device, if there is one of that name. A `Lookup`."""
    name = config_store.fastest(device_kind(), call)
    return name if name in names() else None


def kernels_are_preferred() -> bool:
    """Whether there are calls that this device serves by kernels if nothing else is asked for."""
    rows = (row for source in config_store.sources(device_kind()) for row in source.table.ops)
    return is_hopper() or any(row.call.op == "linear" and row.winner != policy.XLA for row in rows)


def split_is_faster(static: Static, ops: Operands) -> bool:
    """Whether this device runs the projections of a call faster one by one."""
    return policy.split_is_faster(linear_shape(static, ops), hopper=is_hopper(), num_sms=num_sms())
