"""Bytes that a layer saves from forward to backward, for one microbatch."""

from __future__ import annotations

from lorafusion_jax.families.experts import Experts
from lorafusion_jax.families.layer import Layer
from lorafusion_jax.layout.layer import HALVES, Half, SavedTensor
from lorafusion_jax.planning.memory.calls import (
    attention_is_ours,
    columns_of_s,
    dropout_bits,
    expert_rows,
    mlp_is_one_op,
    scales_columns,
    scales_with_gate,
    site_ranks,
)
from lorafusion_jax.planning.memory.problem import FLOAT32, MemoryProblem


def kept_per_layer(problem: MemoryProblem, half: Half | None = None, number: int = 0) -> dict[str, int]:
    """Bytes that one layer or half layer saves for one microbatch, by tensor.

    `nothing` saves the layer's input; `gemm_inputs` saves what elementwise operations cannot recompute; `everything`
    saves all residuals.

    Args:
        number: of the layer.
    """
    layer = problem.device_model.layer(number)
    T, item = problem.capacity_tokens, problem.item
    bytes_of = {"x_in": item * T * problem.model.hidden_size}
    if problem.remat == "nothing":
        return bytes_of
    for part in HALVES if half is None else (half,):
        bytes_of |= _saved_tensors(problem, layer, part, alone=half == part) | _saved_by_lora(problem, layer, part)
    return bytes_of


def _saved_tensors(problem: MemoryProblem, layer: Layer, half: Half, *, alone: bool) -> dict[str, int]:
    fused = attention_is_ours(problem, layer) if half == "attention" else mlp_is_one_op(problem, layer)
    bytes_of = {}
    for tensor in layer.saved:
        is_saved = tensor.policy == "gemm_inputs" or problem.remat == "everything"
        absent = (tensor.unfused and fused) or (tensor.entry and alone)
        if tensor.input_of is not None:
            absent |= not any(tensor.input_of in spec.targets for spec in problem.adapters)
        if tensor.half == half and is_saved and not absent:
            item = FLOAT32 if tensor.float32 else problem.item
            bytes_of[tensor.name] = item * _rows(problem, tensor) * tensor.width
    if problem.balanced and half == "mlp" and isinstance(layer.mlp, Experts):
        bytes_of["router, for its loss"] = FLOAT32 * problem.capacity_tokens * layer.mlp.count
    return bytes_of


def _rows(problem: MemoryProblem, tensor: SavedTensor) -> int | float:
    """Rows of a tensor; those of experts have padding."""
    if tensor.experts is None:
        return problem.capacity_tokens
    experts, active = tensor.experts
    return expert_rows(problem, experts, active) / active


def _saved_by_lora(problem: MemoryProblem, layer: Layer, half: Half) -> dict[str, int]:
    sites = [site for site, linears in layer.sites.items() if linears[0].half == half]
    ranks, bits = site_ranks(problem, layer), dropout_bits(problem, layer)
    rows = problem.item * problem.capacity_tokens
    bytes_of = {f"S of {site}": rows * columns_of_s(problem, layer, site) for site in sites if ranks[site]}
    for site in bytes_of.keys() & {f"S of {site}" for site in sites if layer.sites[site][0].experts}:
        linear = layer.sites[site.removeprefix("S of ")][0]
        bytes_of[site] = bytes_of[site] * expert_rows(problem, linear.experts, linear.active) // problem.capacity_tokens
    bytes_of |= {f"dropout bits of {site}": bits[site] for site in sites if site in bits}
    unscaled = [
        linear
        for site in sites
        for linear in layer.sites[site]
        if scales_columns(problem, linear.name) and not scales_with_gate(problem, layer, site)
    ]
    products = 1 + any(spec.drops_columns for spec in problem.adapters)
    return bytes_of | {f"unscaled {linear.name}": products * rows * linear.out_features for linear in unscaled}
