"""Bytes of the weights of a stage: the frozen model and the adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.adapters.tokens import Table
from lorafusion_jax.layout.layer import Half
from lorafusion_jax.planning.memory.calls import expert_rows
from lorafusion_jax.planning.memory.problem import FLOAT32, MemoryProblem
from lorafusion_jax.weights.table import NONE, stored_kind


def layer_bytes(problem: MemoryProblem, half: Half | None = None, fsdp: int = 1, number: int = 0) -> int:
    """Stored bytes of the frozen tensors of a layer or half layer, on one of the devices that share them."""
    layer = problem.device_model.layer(number)
    shapes, kernels = layer.frozen_shapes(half), layer.kernel_shapes(half)
    others = sum(_share(shape, fsdp) for name, shape in shapes.items() if name not in kernels)
    return problem.item * others + kernel_bytes(problem, half, fsdp, number)


def kernel_bytes(problem: MemoryProblem, half: Half | None = None, fsdp: int = 1, number: int = 0) -> int:
    """The kernels' part of `layer_bytes`."""
    linears, kind = problem.device_model.layer(number).linears_of(half), stored_kind(problem.quantize)
    if kind is None:
        return problem.item * sum(_share(linear.kernel_shape, fsdp) for linear in linears)
    forms = (kind.of(linear.experts).arrays(*linear.kernel_shape) for linear in linears)
    arrays = (array for form in forms for array in form.values())
    return sum(array.item * _share(array.shape, fsdp) for array in arrays)


def frozen_bytes(problem: MemoryProblem, stage: int) -> int:
    """Bytes of the tables at both ends. A tied table is shared if one stage has both ends."""
    m = problem.model
    embedding, head = (_share((rows, m.hidden_size), problem.fsdp) for rows in (problem.vocabulary, problem.outputs))
    has_head = problem.is_last(stage) and not (m.tie_embeddings and problem.num_stages == 1)
    tables = embedding * (stage == 0) + head * has_head
    layers = sum(
        number * layer_bytes(problem, piece.half, problem.fsdp, piece.layer) for piece, number in problem.pieces(stage)
    )
    norm = m.hidden_size if problem.is_last(stage) else 0
    layer_inputs = sum(_share(shape, problem.fsdp) for shape in m.input_shapes.values()) if stage == 0 else 0
    return layers + problem.item * (tables + norm + layer_inputs)


def dequantised_bytes(problem: MemoryProblem, number: int) -> int:
    """One layer's kernels, made to be used: in the model's dtype, or in another order of their bytes, next to the
    widest input in as few bytes, where they multiply as they are."""
    kind = stored_kind(problem.quantize)
    if kind is None:
        return 0
    if kind.operand is None:
        return kernel_bytes(replace(problem, quantize=NONE), number=number)
    layer = problem.device_model.layer(number)
    copied = [
        expert_rows(problem, linear.experts, linear.active) * max(linear.shape)
        for linear in layer.linears
        if linear.experts
    ]
    return kernel_bytes(problem, number=number) + max([problem.capacity_tokens * layer.mlp.inner, *copied])


def _share(shape: Sequence[int], fsdp: int) -> int:
    """Elements of a tensor on one device; matrices are sharded along an axis that divides."""
    is_sharded = len(shape) > 1 and any(size % fsdp == 0 for size in shape)
    return prod(shape) // fsdp if is_sharded else prod(shape)


def adapter_bytes(problem: MemoryProblem, stage: int, *, trainable: bool = True) -> list[int]:
    """Trainable tensors of a stage's layers in float32, per adapter, at its own rank, targets and kind;
    on the last stage with its head, and at both ends with its rows of tokens.

    Args:
        trainable: False: those that are constant in training.
    """
    model = problem.model
    sizes = {"D": model.hidden_size, "V": model.vocab_size}
    pieces = [(model.layer(piece.layer).linears_of(piece.half), number) for piece, number in problem.pieces(stage)]

    widest = {spec.kind: spec.rank for spec in sorted(problem.adapters, key=lambda spec: spec.rank)}

    def parameters(spec: AdapterSpec) -> int:
        kind = adapter_kind(spec.kind)
        head = spec.head if problem.is_last(stage) else None
        rows = sum(map(len, token_ids(problem, stage, spec))) if trainable else 0
        ends = model.hidden_size * rows + (0 if head is None else head.num_parameters(sizes, trainable=trainable))
        return ends + sum(
            number
            * max(linear.experts, 1)
            * kind.num_parameters(
                in_features=linear.in_features,
                out_features=linear.out_features,
                rank=spec.rank,
                trainable=trainable,
                padded=widest[spec.kind],
            )
            for piece, number in pieces
            for linear in piece
            if linear.name in spec.targets
        )

    return [FLOAT32 * parameters(spec) for spec in problem.adapters]


def constant_bytes(problem: MemoryProblem, stage: int) -> int:
    """Tensors of the adapters that training does not change; shared ones are on every stage once."""
    shapes = [linear.shape for linear in problem.model.linears]
    largest = max(k for k, _ in shapes), max(n for _, n in shapes)
    shared = sum(
        prod(leaf.shape(*largest, spec.rank)) for spec in problem.adapters for leaf in adapter_kind(spec.kind).shared
    )
    prepared = sum(
        number * prod(leaf.shape(*linear.shape, spec.rank))
        for piece, number in problem.pieces(stage)
        for linear in problem.model.layer(piece.layer).linears_of(piece.half)
        for spec in problem.adapters
        if linear.name in spec.targets
        for leaf in adapter_kind(spec.kind).prepared
    )
    return sum(adapter_bytes(problem, stage, trainable=False)) + FLOAT32 * (shared + prepared)


def trainable_parameters(problem: MemoryProblem) -> int:
    """Trainable numbers of all adapters, each at its own rank and targets; rows of a tied table count once."""
    model, last = problem.model, problem.num_stages - 1
    twins = sum(len(spec.tokens.embed) for spec in problem.adapters if spec.tokens and model.tie_embeddings)
    parameters = sum(sum(adapter_bytes(problem, stage)) for stage in range(last + 1)) // FLOAT32
    return parameters - model.hidden_size * twins


def token_ids(problem: MemoryProblem, stage: int, spec: AdapterSpec) -> list[tuple[int, ...]]:
    """The trainable tokens of an adapter in each token table of a stage."""
    if spec.tokens is None:
        return []
    tables: dict[Table, bool] = {"embed": stage == 0, "head": problem.is_last(stage)}
    tied = problem.model.tie_embeddings
    return [spec.tokens.of(table, tied=tied) for table, is_here in tables.items() if is_here]
