"""Attention as a call that the tuner times.

The documents of a microbatch are unequal, as packed samples are: two of a quarter of its rows, two of an eighth, four
of a sixteenth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp

from lorafusion_jax.models.attention.api import attention, default_by_rule, support_problem
from lorafusion_jax.models.segments import Segments
from pallas_kernels.policy import AttentionImplementation, attention_call
from pallas_kernels.tuning.ops import OpCase

SHARES = (4, 4, 8, 8, 16, 16, 16, 16)


def attention_case(*, rows: int, heads: int, key_heads: int, width: int, dtype: str) -> OpCase:
    """A call of `attention`, forward and backward."""
    shapes = [jax.ShapeDtypeStruct((rows, count, width), jnp.dtype(dtype)) for count in (heads, key_heads, key_heads)]
    q, k, _ = shapes

    def draw() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 3)
        arrays = [jax.random.normal(key, shape.shape, shape.dtype) for key, shape in zip(keys, shapes, strict=True)]
        segments = Segments.from_lengths([max(1, rows // share) for share in SHARES], rows)
        return *arrays, jax.tree.map(jnp.asarray, segments)

    def step(name: str) -> Callable[..., Any]:
        implementation = cast(AttentionImplementation, name)
        if reason := support_problem(implementation, q, k):
            raise NotImplementedError(reason)

        def both_passes(q, k, v, segments):
            o, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, segments, implementation=implementation), q, k, v)
            return o, pullback(o)

        return jax.jit(both_passes)

    return OpCase(
        call=attention_call(rows=rows, heads=heads, key_heads=key_heads, width=width, dtype=dtype),
        order=(default_by_rule(q, k), "xla"),
        implementations=get_args(AttentionImplementation),
        draw=draw,
        step=step,
    )
