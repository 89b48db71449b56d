"""8-bit floats (e4m3) with a float32 scale per output channel: W[k, n] ≈ values[n, k] · scales[n].

A quarter of float32's bytes, half of bfloat16's. Products read them as they are, see `pallas_kernels.quantised.fp8`.
Experts have scales of their own, see `pallas_kernels.experts.fp8`. jax is imported on use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def quantise(kernel_KN: Any) -> dict[str, Any]:
    """The nearest 8-bit float, ties to even, where a channel's scale is the power of two that fits its largest."""
    from pallas_kernels.quantised.fp8 import quantise

    weight = quantise(kernel_KN)
    return {"values": weight.values, "scales": weight.scales}


def dequantise(arrays: Mapping[str, Any], dtype: Any) -> Any:
    """values · scales, multiplied in float32 and rounded once."""
    from pallas_kernels.quantised.fp8 import dequantise

    return dequantise(operand(arrays), dtype)


def quantise_experts(kernels: Any, experts: int) -> dict[str, Any]:
    """The same of each expert's kernel; they lie one below the other, [E · K, N]."""
    from pallas_kernels.experts.fp8 import quantise

    weight = quantise(kernels, experts=experts)
    return {"values": weight.values, "scales": weight.scales}


def operand(arrays: Mapping[str, Any]) -> Any:
    """What multiplies without being dequantised."""
    from pallas_kernels.quantised.fp8 import Fp8Weight

    return Fp8Weight(values=arrays["values"], scales=arrays["scales"])


def dequantise_experts(arrays: Mapping[str, Any], dtype: Any) -> Any:
    """[E · K, N]"""
    return experts_operand(arrays).dense(dtype)


def experts_operand(arrays: Mapping[str, Any]) -> Any:
    """What the products of experts read."""
    from pallas_kernels.experts.fp8 import Fp8Experts

    return Fp8Experts(values=arrays["values"], scales=arrays["scales"])
