"""The calls of linear layers and norms that the tuner times.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp

from pallas_kernels import backend, policy
from pallas_kernels.device import compiler_options, is_hopper, num_sms
from pallas_kernels.dropout import Dropout
from pallas_kernels.linear.api import multi_lora_linears
from pallas_kernels.linear.describe import Arguments, describe
from pallas_kernels.norm.api import add_rms_norm
from pallas_kernels.policy import LinearShape, NormImplementation
from pallas_kernels.tuning.ops import OpCase

RATE = 0.1  # of dropout, where a call has any


def linear_case(shape: LinearShape) -> OpCase:
    """A call of `multi_lora_linears`."""

    def step(name: str) -> Callable[..., Any]:
        def both_passes(arrays):
            def run(x, as_, bs):
                options = {key: arrays[key] for key in ("tile_adapter", "scale", "dropout")}
                ranks = _ranks(shape, arrays)
                return multi_lora_linears(x, arrays["ws"], as_, bs, ranks=ranks, implementation=name, **options)

            ys, pullback = jax.vjp(run, arrays["x"], arrays["as_"], arrays["bs"])
            return ys, pullback(ys)

        options = None if name == policy.XLA else compiler_options()
        return jax.jit(both_passes, compiler_options=options)

    return OpCase(
        call=shape.op_call,
        order=policy.preferred(shape, hopper=is_hopper(), num_sms=num_sms()),
        implementations=backend.names(),
        draw=lambda: (_linear_arrays(shape),),
        step=step,
    )


def calls_of(shape: LinearShape) -> list[LinearShape]:
    """The call, or its projections one by one where the policy splits it."""
    if policy.split_is_faster(shape, hopper=is_hopper(), num_sms=num_sms()):
        return [shape.select_projection(i) for i in range(len(shape.ranks))]
    return [shape]


def select_backend(shape: LinearShape, implementation: str | None = None) -> str:
    """The backend of a call on this device; computes nothing.

    Raises:
        NotImplementedError: the implementation cannot serve the call.
    """
    names = []

    def look(arrays):
        arguments = Arguments(
            x=arrays["x"],
            ws=tuple(arrays["ws"]),
            as_=tuple(arrays["as_"]),
            bs=tuple(arrays["bs"]),
            biases=(None,) * len(shape.ranks),
            tile_adapter=arrays["tile_adapter"],
            scale=arrays["scale"],
            dropout=arrays["dropout"],
            ranks=_ranks(shape, arrays),
        )
        names.append(backend.select_name(*describe(arguments), implementation))

    jax.eval_shape(look, jax.eval_shape(lambda: _linear_arrays(shape)))
    return names[0]


def norm_case(*, rows: int, width: int, dtype: str) -> OpCase:
    """A call of `add_rms_norm`.

    Its gradients are arguments, as in a model: XLA would fuse the two passes if the first computed them. And of the
    gradients of x and delta one is returned, since they are one array: a program that returns both has to copy it.
    """

    def draw() -> tuple[jax.Array, ...]:
        arrays = (
            jax.random.normal(key, (rows, width), jnp.dtype(dtype)) for key in jax.random.split(jax.random.key(0), 4)
        )
        return *arrays, jnp.ones(width, jnp.dtype(dtype))

    def step(name: str) -> Callable[..., Any]:
        def both_passes(x, delta, ds, dy, weight):
            run = functools.partial(add_rms_norm, weight=weight, eps=1e-5, implementation=cast(Any, name))
            outs, pullback = jax.vjp(run, x, delta)
            return outs, pullback((ds, dy))[0]

        return jax.jit(both_passes)

    preferred = policy.preferred_norm(rows=rows, width=width, dtype=dtype, hopper=is_hopper())
    return OpCase(
        call=policy.norm_call(rows=rows, width=width, dtype=dtype),
        order=(preferred, policy.XLA),
        implementations=get_args(NormImplementation),
        draw=draw,
        step=step,
    )


def _ranks(shape: LinearShape, arrays: dict[str, Any]) -> tuple[int, ...] | jax.Array:
    """The adapters' ranks as the described call has them: known while tracing, or numbers of the program."""
    if not shape.least_rank:
        return arrays["ranks"]
    return (shape.least_rank, *(max(shape.ranks),) * (shape.adapters - 1))


def _linear_arrays(shape: LinearShape) -> dict[str, Any]:
    """Draws normal inputs; tiles of an adapter are contiguous, and all adapters have the largest rank."""
    dtype, tiles = jnp.dtype(shape.dtype), shape.rows // shape.tile
    keys = iter(jax.random.split(jax.random.key(0), 2 + 3 * len(shape.ranks)))

    def normal(*sizes: int, scale: float = 1.0):
        return (jax.random.normal(next(keys), sizes, jnp.float32) * scale).astype(dtype)

    a, k = shape.adapters, shape.in_features
    dropout = None
    if shape.dropout:
        dropout = Dropout(
            rate=jnp.full(a, RATE, jnp.float32),
            key=jnp.arange(1, a + 1, dtype=jnp.uint32),
            row_key=jax.random.bits(next(keys), (shape.rows,), jnp.uint32),
        )
    projections = list(zip(shape.out_features, shape.ranks, strict=True))
    return {
        "x": normal(shape.rows, k),
        "ws": [normal(k, n, scale=k**-0.5) for n, _ in projections],
        "as_": [normal(a, k, r, scale=k**-0.5) if r else None for _, r in projections],
        "bs": [normal(a, r, n, scale=r**-0.5) if r else None for n, r in projections],
        "tile_adapter": (jnp.arange(tiles) * a // tiles).astype(jnp.int32),
        "scale": jnp.ones(a, jnp.float32),
        "ranks": jnp.full(a, max(shape.ranks), jnp.int32),
        "dropout": dropout,
    }
