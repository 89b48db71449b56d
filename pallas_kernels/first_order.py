"""What can be differentiated once: a kernel has no derivative of its own, and the derivative of an op is kernels."""

from __future__ import annotations

from typing import Any

import jax


@jax.custom_jvp
def first_order(arrays: Any) -> Any:
    """Returns the arrays; whoever differentiates what is computed from them gets NotImplementedError, with a way on."""
    return arrays


@first_order.defjvp
def _jvp_rule(primals, tangents):
    del primals, tangents
    raise NotImplementedError(
        "the Triton kernels have first derivatives in reverse mode only (jax.grad, jax.vjp): for second derivatives, "
        'jax.jvp, jax.hessian or jax.linearize pass implementation="xla"'
    )
