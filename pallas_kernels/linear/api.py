"""The public ops: a frozen linear layer plus the LoRA of one or many adapters.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import backend
from pallas_kernels.dropout import Dropout
from pallas_kernels.frozen_weight import FrozenWeight, QuantisedWeight, dimensions_of, frozen_product, is_quantised
from pallas_kernels.linear import vjp
from pallas_kernels.linear.describe import Arguments, as_arrays, check_kinds, describe, empty_results
from pallas_kernels.linear.mesh import partition
from pallas_kernels.linear.mesh.shard import Call
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.policy import XLA, Implementation
from pallas_kernels.problem import Operands, Static, select_projections


def lora_linear(
    x: Float[Array, "*B K"],
    w: Float[Array, "K N"] | QuantisedWeight,
    a: Float[Array, "K R"],
    b: Float[Array, "R N"],
    *,
    scale: ArrayLike,
    dropout: Dropout | None = None,
    bias: Float[Array, " N"] | None = None,
    implementation: Implementation | str | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "*B N"]:
    """Applies a frozen linear layer plus the LoRA of one adapter.

    y = x W + scale * (drop(x) A) B (+ bias), with x, W, S = drop(x) A and scale B in the type of x, sums in float32

    Args:
        x: [..., K], bfloat16, float16 or float32; w: [K, N], frozen (it gets no gradient); a: [K, R]; b: [R, N]; bias:
            [N], frozen. These may be of another floating type (adapters in float32 under activations in bfloat16);
            gradients come in the type of their own array. R may be 0: the frozen layer alone.
        scale: alpha / r or alpha / sqrt(r), a number; like w and bias it gets no gradient (zero).
        dropout: rates and keys with one adapter, row keys for every row of x.
        implementation: a backend's name, built in or registered; None takes the one that measured fastest.
        out_sharding: of y, on a mesh; None: rows as x has them, N as W has it, and summed where K is split.
        preferred_element_type: type of y, by the implementation "xla"; None: that of x.
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
    check_kinds(x, None, dropout, w=w, a=a, b=b)
    for name, array in (("a", a), ("b", b)):
        if array.ndim != 2:
            raise ValueError(f"{name} has shape {array.shape}, expected {'[K, R]' if name == 'a' else '[R, N]'}")
    if dropout is not None:
        dropout = as_arrays(dropout)
        numbers = {"rate": dropout.rate, "key": dropout.key}
        if wrong := [f"dropout.{name} has shape {jnp.shape(v)}" for name, v in numbers.items() if jnp.size(v) != 1]:
            raise ValueError(f"{'; '.join(wrong)}, expected one number: there is one adapter")
        dropout = dataclasses.replace(dropout, **{name: jnp.reshape(value, 1) for name, value in numbers.items()})
    if jnp.size(scale) != 1:
        raise ValueError(f"scale has shape {jnp.shape(scale)}, expected one number")
    arguments = Arguments(
        x=x,
        ws=(w,),
        as_=(a[None],),
        bs=(b[None],),
        biases=(bias,),
        tile_adapter=None,
        scale=jnp.reshape(scale, 1),
        dropout=dropout,
        y_dtype=preferred_element_type,
    )
    (y,) = _call(arguments, implementation, out_sharding)
    return y


def multi_lora_linear(
    x: Float[Array, "*B K"],
    w: Float[Array, "K N"] | QuantisedWeight,
    a: Float[Array, "A K R"],
    b: Float[Array, "A R N"],
    *,
    tile_adapter: Int[ArrayLike, " tiles"] | Sequence[int] | None,
    scale: Float[ArrayLike, " A"] | Sequence[float],
    dropout: Dropout | None = None,
    bias: Float[Array, " N"] | None = None,
    ranks: Int[ArrayLike, " A"] | Sequence[int] | None = None,
    implementation: Implementation | str | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "*B N"]:
    """Applies a frozen linear layer plus the LoRA of each row's adapter.

    y[t] = x[t] W + scale[k] * (drop(x[t]) A[k]) B[k] (+ bias),  k = adapter of row t's tile

    Rows come in tiles that belong to one adapter, so a tile never mixes adapters.  At equal T and equal padded rank,
    which other adapters a call holds does not change the arithmetic of an adapter; another T or rank may change tile
    sizes, and with them the order of sums.  On Hopper, so may an adapter of at most 64 ranks beside one of more, and
    `ranks` that are traced.

    Args:
        x: [..., K]; the leading dimensions flatten to T rows, which may be none.
        w: [K, N], frozen: an array, or what multiplies by itself, see `pallas_kernels.quantised`.
        a: [A, K, R]; b: [A, R, N], lower ranks padded with zeros; bias: [N], frozen; types as in `lora_linear`.
        tile_adapter: int32 [T / tile], each -1 .. A - 1; -1 marks tiles of padding rows (frozen part only, no gradient
            to a and b).  Traced values cannot be checked: what is outside counts as -1.  None: every row belongs to
            adapter 0.
        scale: float32 [A], or a list of A numbers; like w and bias it gets no gradient (zero).
        dropout: acts on the LoRA branch only.
        ranks: int32 [A], or a list of A numbers: columns of a and rows of b from there on are zero by contract, and a
            kernel may pass them over; their gradients are zero or not defined.  None: every column counts.  With it a
            tile costs what its own adapter's rank asks for.
        implementation: a backend's name, built in or registered; None takes the one that measured fastest.
        out_sharding: of y, on a mesh; None: rows as x has them, N as W has it, and summed where K is split.
        preferred_element_type: type of y, by the implementation "xla"; None: that of x.
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
    arguments = Arguments(
        x=x,
        ws=(w,),
        as_=(a,),
        bs=(b,),
        biases=(bias,),
        tile_adapter=tile_adapter,
        scale=scale,
        dropout=dropout,
        ranks=ranks,
        y_dtype=preferred_element_type,
    )
    (y,) = _call(arguments, implementation, out_sharding)
    return y


def multi_lora_linears(
    x: Float[Array, "*B K"],
    ws: Sequence[Float[Array, "K _"] | QuantisedWeight],
    as_: Sequence[Float[Array, "A K _"] | None],
    bs: Sequence[Float[Array, "A _ _"] | None],
    *,
    tile_adapter: Int[ArrayLike, " tiles"] | Sequence[int] | None,
    scale: Float[ArrayLike, " A"] | Sequence[float],
    dropout: Dropout | None = None,
    biases: Sequence[Float[Array, " _"] | None] | None = None,
    ranks: Int[ArrayLike, " A"] | Sequence[int] | None = None,
    implementation: Implementation | str | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> tuple[Float[Array, "*B _"], ...]:
    """Applies several projections of one input (q, k, v; gate, up), with one pass over x for all their LoRAs.

    y_i[t] = x[t] W_i + scale[k] * (drop(x[t]) A_i[k]) B_i[k] (+ bias_i)

    Args:
        x: rows, as in `multi_lora_linear`.
        ws: frozen weight of each projection, as in `multi_lora_linear`.
        as_: A of each projection; None for one without LoRA.  Ranks may differ between projections.
        bs: B of each projection; None for one without LoRA.
        tile_adapter: as in `multi_lora_linear`.
        scale: as in `multi_lora_linear`; it gets no gradient (zero).
        dropout: as in `multi_lora_linear`; one mask serves all projections.
        biases: of each projection, or None.
        ranks: as in `multi_lora_linear`, of all projections alike: the largest of an adapter's.
        implementation: as in `multi_lora_linear`.
        out_sharding: as in `multi_lora_linear`, of every y.
        preferred_element_type: as in `multi_lora_linear`, of every y.
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
    arguments = Arguments(
        x=x,
        ws=tuple(ws),
        as_=tuple(as_),
        bs=tuple(bs),
        biases=(None,) * len(ws) if biases is None else tuple(biases),
        tile_adapter=tile_adapter,
        scale=scale,
        dropout=dropout,
        ranks=ranks,
        y_dtype=preferred_element_type,
    )
    return _call(arguments, implementation, out_sharding)


def frozen_linear(
    x: Float[Array, "*B K"],
    w: FrozenWeight,
    *,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "*B N"]:
    """x W of a layer without LoRA, [..., N]; arguments and splits as in `multi_lora_linear`."""
    if partition.mesh_of(jax.tree.leaves((x, w)), None, quantised=dimensions_of(w) is not None) is None:
        return frozen_product(x, w, preferred_element_type)
    options = {"out_sharding": out_sharding, "preferred_element_type": preferred_element_type}
    return multi_lora_linears(x, [w], [None], [None], tile_adapter=None, scale=[1.0], **options)[0]


def _call(
    arguments: Arguments, implementation: str | None, out_sharding: NamedSharding | PartitionSpec | None
) -> tuple[jax.Array, ...]:
    """Runs the call, on a mesh shard by shard, and gives every y its sharding."""
    if (empty := empty_results(arguments)) is not None:
        return empty
    if arguments.y_dtype is not None:
        if implementation not in (None, XLA):
            raise NotImplementedError(
                f"implementation={implementation!r} cannot serve this call: it writes y in the type of x, and "
                "preferred_element_type asks for another"
            )
        implementation = XLA
    stored = [w for w in arguments.ws if is_quantised(w)]
    splittable = all(dimensions_of(w) is not None for w in stored)
    arrays = jax.tree.leaves((arguments.x, arguments.ws, arguments.as_, arguments.bs))
    mesh = partition.mesh_of(arrays, implementation, quantised=bool(stored) and splittable)
    if mesh is not None and not splittable:
        raise NotImplementedError(
            "this quantised weight cannot be split over a mesh: quantise it where it lies on the mesh, or call the op "
            "inside jax.shard_map, on each device's own rows"
        )
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    ys = _on_one_device(arguments, implementation) if mesh is None else _on_mesh(mesh, arguments, implementation, spec)
    return ys if out_sharding is None else tuple(partition.place(y, out_sharding) for y in ys)


def _on_one_device(arguments: Arguments, implementation: str | None) -> tuple[jax.Array, ...]:
    """Runs the call by its backend, split where that is faster, and restores the leading dimensions."""
    static, ops = describe(arguments)
    split = implementation is None and backend.split_is_faster(static, ops)
    calls = [select_projections(ops, (i,)) for i in range(len(ops.ws))] if split else [ops]
    ys = [y for call in calls for y in _run(static, call, implementation)]
    return tuple(y.reshape(arguments.x.shape[:-1] + y.shape[1:]) for y in ys)


def _run(static: Static, ops: Operands, implementation: str | None) -> tuple[jax.Array, ...]:
    call_backend = backend.select(static, ops, implementation)
    as_, bs = vary_like((ops.as_, ops.bs), ops.x)  # outside of the rule, so that dA and dB are summed over the mesh
    return vjp.apply(call_backend, static, dataclasses.replace(ops, as_=as_, bs=bs))


def _on_mesh(
    mesh: Mesh | AbstractMesh, arguments: Arguments, implementation: str | None, y: PartitionSpec | None
) -> tuple[jax.Array, ...]:
    """Runs the call shard by shard; x keeps its leading dimensions, each of which may be split."""
    x = arguments.x
    check_kinds(x, arguments.tile_adapter, arguments.dropout)
    flat = jax.ShapeDtypeStruct((x.size // max(x.shape[-1:], default=1), *x.shape[-1:]), x.dtype)
    static, ops = describe(dataclasses.replace(arguments, x=flat))
    call = Call(static=static, implementation=implementation)
    as_, bs = vary_like((ops.as_, ops.bs), x)
    return partition.apply(call, mesh, dataclasses.replace(ops, x=x, as_=as_, bs=bs), y)
