"""Replaces a layer's product with its weight by a product with the weight plus adapters.

The call of a layer is traced to a jaxpr, and its one product with the weight is replaced. Casts, bias, scaling and
other operations do not change, so a layer with adapters computes what it would compute with merged weights. Under jit,
grad, remat and scan, tracing happens once per compilation.

K in · N out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from lorafusion_jax.errors import ConfigError
from pallas_kernels.frozen_weight import QuantisedWeight
from pallas_kernels.linear.mesh.partition import place as place_on_mesh


@runtime_checkable
class Stored(Protocol):
    """A frozen weight that is no array: it has the shape and dtype that its layer expects, and its own products."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ndim(self) -> int: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """The type that it has for its layer: on explicit mesh axes, split along the axes that are not summed over."""
        ...

    def operand(self) -> QuantisedWeight:
        """The weight [K, N] as the ops take it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The type of a layer's product, [rows, other axes of the weight].

    Args:
        dtype: may be wider than that of x.
        sharding: the one that the layer's call sets with `out_sharding`; None: it sets none.
        experts: number of leading axes that x, the weight and the product have in common.
        part: the leading indices of the weight that the call took first, `w[0]`.
        casts: dtypes that the weight takes one after another; None: it is changed otherwise, too.
    """

    dtype: Any
    sharding: NamedSharding | None = None
    experts: int = 0
    part: tuple[int, ...] = ()
    casts: tuple[Any, ...] | None = ()

    def place(self, y: Array) -> Array:
        """Gives y its sharding."""
        return y if self.sharding is None else place_on_mesh(y, self.sharding)

    def flat(self, rows: int) -> NamedSharding | None:
        """The sharding of [rows, features], if the other axes of the weight are flattened."""
        if self.sharding is None:
            return None
        spec = (*self.sharding.spec, *(None,) * (rows + 1 - len(self.sharding.spec)))
        return self.sharding.update(spec=P(*spec[: rows + 1]))


# x [rows, contracted axes], W, contracted axes of W, type of the result → product with the weight and its adapters
type Product = Callable[[Array, Any, tuple[int, ...], Result], Array]
type NamedProduct = Callable[[str, Array, Any, tuple[int, ...], Result], Array]  # with the weight's name before
_SAME_AXES = frozenset(
    {
        "convert_element_type",
        "copy",
        "copy_p",
        "sharding_constraint",
        "reshard",
        "pvary",
        "pcast",
    }  # the last in shard_map
)
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})


def exchange_product(
    call: Callable[[Array], Any],
    weight: Array | Stored,
    product: Product,
    *,
    where: str,
    inside: tuple[int, ...] = (),
    inputs: Any = (),
    experts: int | None = 0,
) -> Any:
    """Runs `call(weight)` with its product with the weight replaced.

    Args:
        call: uses its argument in exactly one product, a `dot_general` (`@`, `jnp.dot`, `jnp.einsum`).
        weight: its argument.
        product: computes the product instead: (x with the contracted axes last, in the weight's order; weight;
            contracted axes of the weight; type of the result) → [rows of x, other axes of the weight].
        where: path of the layer, for errors.
        inside: axes of the weight that the product sums over; they may be split over a mesh.
        inputs: what `call` multiplies with the weight; mesh axes that split it may split the weight, too.
        experts: number of leading axes of the weight that x and the product have, too; None: any number.

    Raises:
        ConfigError: `lora.unsupported-linear`, the call uses the weight in another way.

    >>> double = lambda x, w, axes, _: 2 * jnp.tensordot(x, w, axes=(tuple(range(-len(axes), 0)), axes))
    >>> exchange_product(lambda w: jnp.ones((3, 2)) @ w + 1, jnp.ones((2, 4)), double, where="up").tolist()[0]
    [5.0, 5.0, 5.0, 5.0]
    """

    def named(_name: str, x: Array, w: Any, axes: tuple[int, ...], result: Result) -> Array:
        return product(x, w, axes, result)

    weights = {"weight": _Used(weight, inside)}
    return _exchange(lambda taken: call(taken["weight"]), weights, named, where, inputs, experts, may_cut=False)


def exchange_products(
    call: Callable[[dict[str, Any]], Any],
    weights: Mapping[str, Array | Stored],
    product: NamedProduct,
    *,
    where: str,
    inputs: Any = (),
) -> Any:
    """Runs `call(weights)` with its product with each of the weights replaced.

    A weight may hold several matrices, of which the call takes each by its index: `x @ w[0]`. They have any number of
    axes of experts.

    Args:
        call: uses each weight, or each part of it, in exactly one product.
        weights: its arguments, by name.
        product: as in `exchange_product`, with the name of the weight before.
        where: path of the layer, for errors.
        inputs: as in `exchange_product`.

    Raises:
        ConfigError: `lora.unsupported-linear`, the call uses a weight in another way.

    >>> double = lambda name, x, w, axes, _: 2 * jnp.tensordot(x, w, axes=(tuple(range(-len(axes), 0)), axes))
    >>> gated = lambda w: (jnp.ones((3, 2)) @ w["up"][0]) * (jnp.ones((3, 2)) @ w["up"][1])
    >>> exchange_products(gated, {"up": jnp.ones((2, 2, 4))}, double, where="mlp").tolist()[0]
    [16.0, 16.0, 16.0, 16.0]
    """
    return _exchange(call, {name: _Used(w) for name, w in weights.items()}, product, where, inputs, None, may_cut=True)


class _Used(NamedTuple):
    """A weight, and the axes of it that the product sums over, as far as they are known before."""

    weight: Array | Stored
    inside: tuple[int, ...] = ()


def _exchange(
    call: Callable[[dict[str, Any]], Any],
    weights: Mapping[str, _Used],
    product: NamedProduct,
    where: str,
    inputs: Any,
    experts: int | None,
    *,
    may_cut: bool,
) -> Any:
    names = list(weights)
    types = [_abstract_weight(weight, inside, inputs) for weight, inside in weights.values()]
    closed, shapes = jax.make_jaxpr(lambda *arrays: call(dict(zip(names, arrays, strict=True))), return_shape=True)(
        *types
    )
    run = _Run(product=product, where=where, experts=experts, may_cut=may_cut)
    first = len(closed.consts)
    weight_parts = {
        first + n: _Held(name, tuple(range(entry.weight.ndim))) for n, (name, entry) in enumerate(weights.items())
    }
    values = [*closed.consts, *(entry.weight for entry in weights.values())]
    outputs, weights_out = run.evaluate(closed.jaxpr, values, weight_parts)
    if any(output.factors for output in weights_out.values()):
        raise unsupported_linear(where, "its call returns the weight, scaled")
    for name in names:
        run.check_used_once(name)
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def _abstract_weight(weight: Array | Stored, inside: tuple[int, ...], inputs: Any) -> Any:
    """Returns the weight's type for tracing, not split along the contracted axes, nor over axes that split the inputs.

    On explicit mesh axes jax rejects a product that sums over devices, unless its output sharding is given, and one
    whose rows and columns lie on the same axis. Our product does the sum, and gathers the weight over such axes, so its
    result is sharded as if the weight were not split there.
    """
    kind = weight.abstract if isinstance(weight, Stored) else weight
    sharding = jax.typeof(kind).sharding
    if sharding.mesh.empty or all(entry is None for entry in sharding.spec):
        return kind
    mesh_axes = {name for leaf in jax.tree.leaves(inputs) for name in _mesh_axes(leaf)}
    spec = [
        None if axis in inside else tuple(name for name in _names(entry) if name not in mesh_axes) or None
        for axis, entry in enumerate(sharding.spec)
    ]
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding.update(spec=P(*spec)))


def _mesh_axes(value: Any) -> list[str]:
    """Returns the mesh axes that split an array."""
    if not isinstance(value, jax.Array):
        return []
    return [name for entry in jax.typeof(value).sharding.spec for name in _names(entry)]


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def unsupported_linear(where: str, why: str, fix: str = "") -> ConfigError:
    fix = fix or (f"exclude='{where}' in apply_lora or LinenLoRA" if where else "leave it out of targets")
    return ConfigError("lora.unsupported-linear", "this layer cannot carry LoRA.", where=where, why=why, fix=fix)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a variable of the traced call holds of a weight.

    Args:
        name: that of the weight.
        order: the weight's axis of each of its axes, counted without the axes of `part`.
        part: the leading indices that were taken.
        cut: the next of them, while its axis of size 1 is still there.
        casts: dtypes that it took; None: it was changed otherwise, too.
        factors: scalars that it was multiplied by. The product is multiplied by them instead.
    """

    name: str
    order: tuple[int, ...]
    part: tuple[int, ...] = ()
    cut: int | None = None
    casts: tuple[Any, ...] | None = ()
    factors: tuple[Any, ...] = ()

    def squeezed(self, index: int) -> _Held:
        """Without its first axis, of which it has this index."""
        order = tuple(axis - 1 for axis in self.order if axis)
        return replace(self, order=order, part=(*self.part, index), cut=None)

    def cast(self, eqn: JaxprEqn) -> _Held:
        """Notes what an equation that keeps the axes makes of it."""
        cast = (eqn.params["new_dtype"],) if eqn.primitive.name == "convert_element_type" else None
        return replace(self, casts=None if self.casts is None or cast is None else (*self.casts, *cast))


@dataclass(slots=True)
class _Run:
    """One evaluation of a jaxpr, which follows the weights from variable to variable."""

    product: NamedProduct
    where: str
    experts: int | None
    may_cut: bool
    products: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)

    def check_used_once(self, name: str) -> None:
        """Checks that a weight, or each part of it that the call takes, was in one product."""
        parts = {part: times for (weight_name, part), times in self.products.items() if weight_name == name}
        uses = sum(parts.values())
        if not parts or max(parts.values()) > 1 or len({len(part) for part in parts}) > 1:
            raise unsupported_linear(self.where, f"its call multiplies by the weight {uses} times, not once")

    def evaluate(self, jaxpr: Jaxpr, values: list[Any], weights: dict[int, _Held]):
        """Returns the outputs, and which of them are weights themselves."""
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        env = dict(zip(inputs, values, strict=True))
        weight_of = {inputs[index]: weight_part for index, weight_part in weights.items()}

        def read(atom):
            return atom.val if isinstance(atom, Literal) else env[atom]

        def held_in(atoms):
            part_by_index = {
                index: weight_of.get(atom) for index, atom in enumerate(atoms) if not isinstance(atom, Literal)
            }
            return {index: weight for index, weight in part_by_index.items() if weight is not None}

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            outputs, weights_out = self._step(jaxpr, eqn, operands, held_in(eqn.invars))
            env.update(zip(eqn.outvars, outputs, strict=True))
            weight_of.update({eqn.outvars[index]: weight_part for index, weight_part in weights_out.items()})
        return [read(atom) for atom in jaxpr.outvars], held_in(jaxpr.outvars)

    def _step(self, jaxpr: Jaxpr, eqn: JaxprEqn, operands: list[Any], weights: dict[int, _Held]):
        name = eqn.primitive.name
        if not weights:
            return _bind(jaxpr, eqn, operands), {}
        if name in _CALLS:
            inner = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
            shifted = {len(inner.consts) + index: weight_part for index, weight_part in weights.items()}
            return self.evaluate(inner.jaxpr, [*inner.consts, *operands], shifted)
        if name == "dot_general" and len(weights) == 1:
            return [self._multiply(eqn, operands, weights)], {}
        scaled = _scaled(name, operands, weights) if len(weights) == 1 else None
        if scaled is not None:
            return scaled
        weight_part = weights.get(0)
        if weight_part is None:
            raise self._unsupported(name)
        if name == "transpose":
            order = tuple(weight_part.order[axis] for axis in eqn.params["permutation"])
            return self._rearranged(jaxpr, eqn, operands), {0: replace(weight_part, order=order)}
        if name in _SAME_AXES and len(eqn.outvars) == 1:
            return self._rearranged(jaxpr, eqn, operands), {0: weight_part.cast(eqn)}
        parts = self._cut(eqn, operands[0], weight_part)
        return _bind(jaxpr, eqn, operands), parts

    def _cut(self, eqn: JaxprEqn, w: Any, held: _Held) -> dict[int, _Held]:
        """Follows `w[0]`, a slice whose axis is squeezed afterwards, and `for part in w`."""
        name, first = eqn.primitive.name, held.order.index(0)
        if self.may_cut and not isinstance(w, Stored):
            if name == "unstack" and eqn.params["axis"] == first and held.cut is None:
                return {index: held.squeezed(index) for index in range(len(eqn.outvars))}
            if name == "squeeze" and eqn.params["dimensions"] == (first,) and held.cut is not None:
                return {0: held.squeezed(held.cut)}
            if name == "slice" and held.cut is None and (start := _only_index(eqn, w.shape, first)) is not None:
                return {0: replace(held, cut=start)}
        raise self._unsupported("mul" if held.factors else name)  # what it did first

    def _multiply(self, eqn: JaxprEqn, operands: list[Any], weights: dict[int, _Held]) -> Array:
        ((side, weight_part),) = weights.items()
        order = weight_part.order
        if weight_part.cut is not None:
            raise self._unsupported("slice")
        contract, batch = eqn.params["dimension_numbers"]
        pairs = sorted(zip((order[axis] for axis in contract[side]), contract[1 - side], strict=True))
        shared = sorted(zip((order[axis] for axis in batch[side]), batch[1 - side], strict=True))
        experts = len(shared) if self.experts is None else self.experts
        if [axis for axis, _ in shared] != list(range(experts)):
            raise unsupported_linear(self.where, "its product shares a batch axis between the input and the weight")
        self._check_precision(eqn.params["precision"])
        self.products[weight_part.name, weight_part.part] += 1
        result, dtype = jnp.result_type(eqn.outvars[0].aval), jnp.promote_types(*map(_dtype, eqn.invars))
        if not jnp.issubdtype(dtype, jnp.floating) or not jnp.issubdtype(result, jnp.floating):
            raise unsupported_linear(self.where, f"its product is of {dtype} and gives {result}")
        if dtype.itemsize >= result.itemsize:
            dtype = result
        w, x = operands[side], operands[1 - side]
        if not isinstance(w, Stored):
            w = jnp.transpose(w, [order.index(axis) for axis in range(len(order))]).astype(dtype)
        apart = {*contract[1 - side], *batch[1 - side]}
        rows = [axis for axis in range(x.ndim) if axis not in apart]
        x = jnp.transpose(x, [*(axis for _, axis in shared), *rows, *(axis for _, axis in pairs)]).astype(dtype)
        inside = tuple(axis for axis, _ in pairs)
        free = [axis for axis in range(experts, w.ndim) if axis not in inside]
        traced = [axis for axis in order if axis in free]  # their order in the traced call
        numbers = [experts + number for number in range(len(rows))]
        columns = [experts + len(rows) + free.index(axis) for axis in traced]
        first = [order[axis] for axis in batch[side]]
        back = [*first, *columns, *numbers] if side == 0 else [*first, *numbers, *columns]
        sharding = eqn.params.get("out_sharding")
        if sharding is not None and experts:
            raise unsupported_linear(self.where, "it has a weight for each expert and sets out_sharding")
        casts = None if weight_part.casts is None else (*weight_part.casts, dtype)
        result_sharding = self._sharding(sharding, back)
        product = Result(dtype=result, sharding=result_sharding, experts=experts, part=weight_part.part, casts=casts)
        y = self.product(weight_part.name, x, w, inside, product)
        for factor in weight_part.factors:
            y = (y * factor).astype(y.dtype)
        return jnp.transpose(y, back)

    def _check_precision(self, precision: Any) -> None:
        """Our products of float32 have the highest precision, and bfloat16 ones sums in float32: at least any other."""
        levels = precision if isinstance(precision, tuple) else (precision,)
        if other := [level for level in levels if not isinstance(level, jax.lax.Precision | None)]:
            why = f"it sets precision={other[0]}, an algorithm that the product with adapters does not run"
            raise unsupported_linear(self.where, why, "a jax.lax.Precision, or leave the layer out of targets")

    def _sharding(self, sharding: NamedSharding | None, back: list[int]) -> NamedSharding | None:
        """The sharding of [rows, free axes of the weight] whose transpose by `back` has the given one."""
        if sharding is None:
            return None
        if sharding.spec.unreduced:
            raise unsupported_linear(self.where, "its out_sharding leaves the sum over devices to later products")
        spec = [*sharding.spec, *(None,) * (len(back) - len(sharding.spec))]
        return sharding.update(spec=P(*(spec[back.index(axis)] for axis in range(len(back)))))

    def _rearranged(self, jaxpr: Jaxpr, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """The weight with other axes or dtype; a stored one stays as it is, and its product works these out."""
        return operands[:1] if isinstance(operands[0], Stored) else _bind(jaxpr, eqn, operands)

    def _unsupported(self, primitive: str) -> ConfigError:
        return unsupported_linear(self.where, f"its call does more with the weight than one product ({primitive})")


def _scaled(name: str, operands: list[Any], weights: dict[int, _Held]) -> tuple[list[Any], dict[int, _Held]] | None:
    """Takes a scalar out of the weight: `w * c`, `w / c` and `-w` are w, and a product that is scaled; else None."""
    ((side, weight_part),) = weights.items()
    if name not in ("mul", "div", "neg"):
        return None
    name, scalar = ("mul", -1) if name == "neg" else (name, operands[1 - side])
    if jnp.shape(scalar) or (name == "div" and side == 1):
        return None
    factor = scalar if name == "mul" else 1 / scalar
    return [operands[side]], {0: replace(weight_part, casts=None, factors=(*weight_part.factors, factor))}


def _only_index(eqn: JaxprEqn, shape: tuple[int, ...], axis: int) -> int | None:
    """Returns the index of a slice that takes one of an axis and all of the others, otherwise None."""
    start, limit, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    index = start[axis]
    expected = tuple(index + 1 if other == axis else size for other, size in enumerate(shape))
    from_start = all(number == (index if other == axis else 0) for other, number in enumerate(start))
    return index if strides is None and from_start and tuple(limit) == expected else None


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype


def _bind(jaxpr: Jaxpr, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluates one equation as a separate jaxpr."""
    values = {atom: value for atom, value in zip(eqn.invars, operands, strict=True) if not isinstance(atom, Literal)}
    single = jaxpr.replace(constvars=[], invars=list(values), outvars=eqn.outvars, eqns=[eqn])
    return list(eval_jaxpr(single, [], *values.values()))
