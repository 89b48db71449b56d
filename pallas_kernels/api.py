"""The public ops: a frozen linear layer plus the LoRA of one or many adapters.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import backends, vjp
from pallas_kernels.backends import Implementation
from pallas_kernels.device import interprets
from pallas_kernels.dropout import Dropout
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.problem import Operands, Static
from pallas_kernels.tiles import rows_per_tile
from pallas_kernels.tuning.choice import better_apart, only


def lora_linear(
    x: jax.Array,
    w: jax.Array,
    a: jax.Array,
    b: jax.Array,
    *,
    scale: jax.Array | float,
    dropout: Dropout | None = None,
    bias: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Applies a frozen linear layer plus the LoRA of one adapter.

    y = x W + scale * (drop(x) A) B (+ bias), with x, W, S = drop(x) A and scale B in the type of x, sums in float32

    Args:
        x: [..., K], bfloat16, float16 or float32; w: [K, N], frozen (it gets no gradient); a: [K, R]; b: [R, N]; bias:
            [N], frozen. These may be of another floating type (adapters in float32 under activations in bfloat16);
            gradients come in the type of their own array. R may be 0: the frozen layer alone.
        scale: alpha / r or alpha / sqrt(r), a number; like w and bias it gets no gradient (zero).
        dropout: rates and keys with one adapter, row keys for every row of x.
        implementation: a backend's name; None takes the one that measured fastest.
    Returns:
        y [..., N] in the type of x.
    Raises:
        ValueError: shapes or values do not fit, or the implementation is unknown.
        TypeError: what should be arrays or a Dropout is something else.
        NotImplementedError: the named implementation cannot serve this call; the message says why.

    Source: LoRA, Hu et al. 2021 (arXiv:2106.09685); one read of x per pass as in LoRAFusion, Zhu et al. 2026.

    Example:
        >>> y = lora_linear(jnp.ones((2, 3, 8)), jnp.ones((8, 4)), jnp.ones((8, 2)), jnp.zeros((2, 4)), scale=2.0)
        >>> y.shape
        (2, 3, 4)
    """
    _check_kinds(x, None, dropout, w=w, a=a, b=b)
    for name, array in (("a", a), ("b", b)):
        if array.ndim != 2:
            raise ValueError(f"{name} has shape {array.shape}, expected {'[K, R]' if name == 'a' else '[R, N]'}")
    if dropout is not None:
        dropout = _as_arrays(dropout)
        one = {"rate": dropout.rate, "key": dropout.key}
        if wrong := [f"dropout.{name} has shape {jnp.shape(v)}" for name, v in one.items() if jnp.size(v) != 1]:
            raise ValueError(f"{'; '.join(wrong)}, expected one number: there is one adapter")
        dropout = dataclasses.replace(dropout, **{name: jnp.reshape(value, 1) for name, value in one.items()})
    if jnp.size(scale) != 1:
        raise ValueError(f"scale has shape {jnp.shape(scale)}, expected one number")
    (y,) = _call(x, (w,), (a[None],), (b[None],), (bias,), None, jnp.reshape(scale, 1), dropout, implementation)
    return y


def multi_lora_linear(
    x: jax.Array,
    w: jax.Array,
    a: jax.Array,
    b: jax.Array,
    *,
    tile_adapter: jax.Array,
    scale: jax.Array,
    dropout: Dropout | None = None,
    bias: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Applies a frozen linear layer plus the LoRA of each row's adapter.

    y[t] = x[t] W + scale[k] * (drop(x[t]) A[k]) B[k] (+ bias),  k = adapter of row t's tile

    Rows come in tiles that belong to one adapter, so a tile never mixes adapters.  At equal T and equal padded rank,
    which other adapters a call holds does not change the arithmetic of an adapter; another T or rank may change tile
    sizes, and with them the order of sums.

    Args:
        x: [..., K]; the leading dimensions flatten to T rows.
        w: [K, N], frozen; a: [A, K, R]; b: [A, R, N], lower ranks padded with zeros; bias: [N], frozen; types as in
            `lora_linear`.
        tile_adapter: int32 [T / tile], each -1 .. A - 1; -1 marks tiles of padding rows (frozen part only, no gradient
            to a and b).  Traced values cannot be checked: what is outside counts as -1.
        scale: float32 [A], or a list of A numbers; like w and bias it gets no gradient (zero).
        dropout: acts on the LoRA branch only.
        implementation: a backend's name; None takes the one that measured fastest.
    Returns:
        y [..., N] in the type of x.
    Raises:
        ValueError: shapes or values do not fit, or the implementation is unknown.
        TypeError: what should be arrays or a Dropout is something else.
        NotImplementedError: the named implementation cannot serve this call; the message says why.

    Source: LoRA, Hu et al. 2021 (arXiv:2106.09685); one read of x per pass as in LoRAFusion, Zhu et al. 2026.

    Example:
        >>> a, b = jnp.ones((2, 8, 4)), jnp.zeros((2, 4, 6))
        >>> table, scale = jnp.array([1, 0, -1]), jnp.array([2.0, 1.0])
        >>> multi_lora_linear(jnp.ones((12, 8)), jnp.ones((8, 6)), a, b, tile_adapter=table, scale=scale).shape
        (12, 6)
    """
    (y,) = _call(x, (w,), (a,), (b,), (bias,), tile_adapter, scale, dropout, implementation)
    return y


def multi_lora_linears(
    x: jax.Array,
    ws: Sequence[jax.Array],
    as_: Sequence[jax.Array | None],
    bs: Sequence[jax.Array | None],
    *,
    tile_adapter: jax.Array,
    scale: jax.Array,
    dropout: Dropout | None = None,
    biases: Sequence[jax.Array | None] | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, ...]:
    """Applies several projections of one input (q, k, v; gate, up), with one pass over x for all their LoRAs.

    y_i[t] = x[t] W_i + scale[k] * (drop(x[t]) A_i[k]) B_i[k] (+ bias_i)

    Args:
        ws, as_, bs, biases: one entry per projection, as in `multi_lora_linear`; as_[i] and bs[i] are None for a
            projection without LoRA.  Ranks may differ between projections.  One dropout mask serves them all.
        tile_adapter, scale, dropout, implementation: as in `multi_lora_linear`; scale gets no gradient (zero) either.
    Returns:
        y_i [..., N_i] of every projection, in the type of x.
    Raises:
        ValueError: shapes or values do not fit, or the implementation is unknown.
        TypeError: what should be arrays or a Dropout is something else.
        NotImplementedError: the named implementation cannot serve this call; the message says why.

    Example:
        >>> w, a, b = jnp.ones((8, 6)), jnp.ones((1, 8, 4)), jnp.zeros((1, 4, 6))
        >>> table, scale = jnp.array([0, 0]), jnp.array([2.0])
        >>> q, k = multi_lora_linears(jnp.ones((4, 8)), [w, w], [a, None], [b, None], tile_adapter=table, scale=scale)
        >>> q.shape, k.shape
        ((4, 6), (4, 6))
    """
    biases = (None,) * len(ws) if biases is None else tuple(biases)
    return _call(x, tuple(ws), tuple(as_), tuple(bs), biases, tile_adapter, scale, dropout, implementation)


def _call(x, ws, as_, bs, biases, tile_adapter, scale, dropout, implementation) -> tuple[jax.Array, ...]:
    """Picks the backend of every call, and restores the leading dimensions."""
    static, ops = describe(x, ws, as_, bs, biases, tile_adapter, scale, dropout)
    apart = implementation is None and better_apart(static, ops)
    calls = [only(ops, i) for i in range(len(ws))] if apart else [ops]
    ys = [y for call in calls for y in _dispatch(static, call, implementation)]
    return tuple(y.reshape(x.shape[:-1] + y.shape[1:]) for y in ys)


def describe(x, ws, as_, bs, biases, tile_adapter, scale, dropout) -> tuple[Static, Operands]:
    """Checks the shapes and flattens leading dimensions; no backend is chosen yet, and a shape [T, K] does for x."""
    banks = {
        f"{name} of projection {i}": v for name, vs in (("w", ws), ("a", as_), ("b", bs)) for i, v in enumerate(vs)
    }
    _check_kinds(x, tile_adapter, dropout, **banks)
    if x.ndim == 0 or x.size == 0:
        raise ValueError(f"x has shape {x.shape}, expected [..., K] with at least one row and one feature")
    x_TK = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    single = tile_adapter is None
    scale = jnp.asarray(scale, jnp.float32)
    if scale.ndim != 1:
        raise ValueError(f"scale has shape {scale.shape}, expected [A]: one number per adapter")
    num_adapters = next((a.shape[0] for a in as_ if a is not None and a.ndim == 3), scale.shape[0])
    if num_adapters == 0:
        raise ValueError("a and b hold no adapter: call the frozen layer alone, x @ w")
    tile_adapter = jnp.zeros(1, jnp.int32) if single else jnp.asarray(tile_adapter, jnp.int32)
    dropout = None if dropout is None else _as_arrays(dropout)
    ops = Operands(
        x=x_TK, ws=ws, as_=as_, bs=bs, biases=biases, tile_adapter=tile_adapter, scale=scale, dropout=dropout
    )
    _check_shapes(ops, num_adapters, single)
    _check_values(ops, num_adapters)
    static = Static(
        tile=rows_per_tile(x_TK.shape[0], tile_adapter),
        num_adapters=num_adapters,
        backend="xla",
        single=single,
        interpret=interprets(),
    )
    return static, _without_rank_zero(ops)


def _without_rank_zero(ops: Operands) -> Operands:
    """A projection of rank 0 is one without LoRA: kernels never see an empty array."""
    some = [a is not None and a.shape[2] > 0 for a in ops.as_]
    kept = {
        name: tuple(v if s else None for v, s in zip(getattr(ops, name), some, strict=True)) for name in ("as_", "bs")
    }
    return dataclasses.replace(ops, **kept)


def _check_kinds(x: Any, tile_adapter: Any, dropout: Any, **arrays: Any) -> None:
    """Raises TypeError for what is no array, no whole number per tile, or no Dropout."""
    for name, value in {"x": x, **arrays}.items():
        if value is not None and not hasattr(value, "ndim"):
            raise TypeError(f"{name} is a {type(value).__name__}, expected an array: jnp.asarray({name[0]})")
    if tile_adapter is not None and not jnp.issubdtype(kind := jnp.asarray(tile_adapter).dtype, jnp.integer):
        raise TypeError(f"tile_adapter is {kind}, expected int32: the adapter of each tile")
    if dropout is not None and not isinstance(dropout, Dropout):
        raise TypeError(f"dropout is {dropout!r}, expected None or a Dropout: a rate and a key of each adapter")


def _as_arrays(dropout: Dropout) -> Dropout:
    """Numbers and lists do as well, as they do for scale and tile_adapter."""
    kinds = {"rate": np.float32, "key": np.uint32, "row_key": np.uint32}
    given = {name: getattr(dropout, name) for name in kinds}
    return Dropout(**{n: v if hasattr(v, "dtype") else np.asarray(v, kinds[n]) for n, v in given.items()})


def _dispatch(static: Static, ops: Operands, implementation: Implementation | None) -> tuple[jax.Array, ...]:
    static = dataclasses.replace(static, backend=backends.choose(implementation, static, ops))
    backends.check(static, ops)
    as_, bs = vary_like((ops.as_, ops.bs), ops.x)  # outside of the rule, so that dA and dB are summed over the mesh
    return vjp.apply(static, dataclasses.replace(ops, as_=as_, bs=bs))


def _check_values(ops: Operands, num_adapters: int) -> None:
    """Raises ValueError for numbers out of range where they are known: traced ones cannot be looked at."""
    table = _known(ops.tile_adapter)
    if table is not None and (wrong := (table < -1) | (table >= num_adapters)).any():
        tile = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"tile_adapter[{tile}] is {table[tile]}, expected -1 (padding rows) to {num_adapters - 1}: "
            f"a and b hold {num_adapters} adapters"
        )
    if ops.dropout is None or (rates := _known(ops.dropout.rate)) is None:
        return
    if (wrong := ~((rates >= 0) & (rates < 1))).any():
        adapter = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"dropout.rate of adapter {adapter} is {rates[adapter]}, expected 0 <= rate < 1: the share that is dropped"
        )


def _known(array: Any) -> np.ndarray | None:
    """The numbers of an array that this process holds whole; None while tracing, or where there is but a shape."""
    abstract = isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct)
    if abstract or not getattr(array, "is_fully_addressable", True):
        return None
    return np.asarray(array)


def _check_shapes(ops: Operands, num_adapters: int, single: bool) -> None:
    """Raises one ValueError that lists everything that does not fit."""
    num_rows, num_in = ops.x.shape
    wrong = []
    if not jnp.issubdtype(ops.x.dtype, jnp.floating):
        wrong.append(f"x is {ops.x.dtype}, not a floating type")
    if ops.x.dtype == jnp.float64:
        wrong.append("x is float64, but all sums are in float32: cast it to float32")
    if not len(ops.ws) == len(ops.as_) == len(ops.bs) == len(ops.biases):
        wrong.append(f"{len(ops.ws)} ws, {len(ops.as_)} as_, {len(ops.bs)} bs, {len(ops.biases)} biases: not one each")
    for i, (w, a, b, bias) in enumerate(zip(ops.ws, ops.as_, ops.bs, ops.biases, strict=False)):
        rank = None if a is None else a.shape[-1]
        expected = [("w", w, (num_in, w.shape[-1])), ("bias", bias, (w.shape[-1],))]
        expected += [("a", a, (num_adapters, num_in, rank)), ("b", b, (num_adapters, rank, w.shape[-1]))]
        for name, array, shape in expected:
            if array is not None and array.shape != shape:
                own = 1 if single and name in "ab" else 0  # one adapter's arrays have no adapter axis for the caller
                where = "" if single else f" of projection {i}"
                wrong.append(f"{name}{where} has shape {array.shape[own:]}, expected {shape[own:]}")
        if (a is None) != (b is None):
            wrong.append(f"projection {i} has only one of a and b")
    if ops.scale.shape != (num_adapters,):
        wrong.append(f"scale has shape {ops.scale.shape}, expected ({num_adapters},)")
    if ops.dropout is not None:
        shapes = [("rate", num_adapters), ("key", num_adapters), ("row_key", num_rows)]
        wrong += [
            f"dropout.{name} has shape {np.shape(getattr(ops.dropout, name))}, expected ({size},)"
            for name, size in shapes
            if np.shape(getattr(ops.dropout, name)) != (size,)
        ]
    if wrong:
        raise ValueError("; ".join(wrong))
