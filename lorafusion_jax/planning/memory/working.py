"""Temporary bytes of each program of a stage, and what a layer saves from forward to backward of a microbatch.

T packed tokens · D model width · F MLP width · V vocabulary
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from lorafusion_jax.adapters.spec import bank_columns, bank_rank
from lorafusion_jax.adapters.table import leaves_of
from lorafusion_jax.families.experts import Experts
from lorafusion_jax.families.layer import Layer
from lorafusion_jax.layout.layer import HALVES, Half, SavedTensor
from lorafusion_jax.objective.chunks import chunk_rows
from lorafusion_jax.planning.blocks import block_layers
from lorafusion_jax.planning.memory.calls import (
    attention_is_ours,
    columns_of_s,
    dropout_bits,
    expert_rows,
    kernels_run,
    mlp_is_one_op,
    runs_on_hopper,
    scales_columns,
    scales_with_gate,
    site_ranks,
    site_shape,
)
from lorafusion_jax.planning.memory.problem import FLOAT32, MemoryProblem
from lorafusion_jax.planning.memory.stored import adapter_bytes, dequantised_bytes, layer_bytes, token_ids
from pallas_kernels import policy


def working_memory(problem: MemoryProblem, stage: int) -> dict[str, int]:
    """Temporary bytes of each program of a stage; the largest one counts."""
    m, T, item = problem.model, problem.capacity_tokens, problem.item
    D, V = m.hidden_size, problem.outputs
    kinds = {problem.model.kind_of(piece.layer): piece.layer for piece, _ in problem.pieces(stage)}
    by_kind = [_layer_work(problem, stage, number) for number in kinds.values()]
    programs = {name: max(work[name] for work in by_kind) for name in ("forward", "backward")}
    if m.input_width:  # looked up and projected, before they are added up; whole, and once more where it is exchanged
        together = m.num_layers * m.input_width
        gathered = item * together * (D + T) if problem.fsdp > 1 else 0
        programs["inputs"] = 2 * item * T * together + gathered
    programs["update"] = 5 * max(adapter_bytes(problem, stage), default=0)  # gradient, changes, weights, states
    if stage == problem.num_stages - 1:
        rows = chunk_rows(T, V, problem.loss_chunk)
        head = item * D * V if problem.fsdp > 1 else 0
        # Logits and their gradient in float32, the gradient also in the model's dtype; rows, norm and its gradient.
        programs["loss"] = rows * V * (2 * FLOAT32 + item) + 3 * item * T * D + head
        if trained := sum(len(token_ids(problem, stage, spec)[-1]) for spec in problem.adapters if spec.tokens):
            # Logits once more, with those of trained rows; slopes of these; states of one adapter's rows.
            programs["loss"] += FLOAT32 * (rows * V + T * trained) + item * T * D
    return programs


def _layer_work(problem: MemoryProblem, stage: int, number: int) -> dict[str, int]:
    """Temporary bytes of the programs of a layer."""
    layer, T, item = problem.device_model.layer(number), problem.capacity_tokens, problem.item
    D, F = problem.model.hidden_size, layer.mlp.inner
    query, key = layer.attention.queries, layer.attention.keys
    hand_over = 2 * item * T * D  # incoming and outgoing activations or gradients
    everything = kept_per_layer(replace(problem, remat="everything"), number=number)
    recomputed = sum(everything.values()) - sum(kept_per_layer(problem, number=number).values())
    if mlp_is_one_op(problem, layer):
        recomputed += item * T * F  # silu(gate) · up: down reads it, nobody keeps it
    mlp = item * T * layer.row_elements
    down = site_shape(problem, "down", number) if "down" in layer.sites else None
    if down is not None and runs_on_hopper(problem, down) and policy.has_extra_ranks(down):
        mlp += item * T * F  # silu(gate) · up once more, for their gradient; or their part of the gradient of it
    attention = (
        item * T * (2 * query + 2 * key + 2 * D) + FLOAT32 * T * query
    )  # cuDNN sums dq in float32, ours does not
    view = _view_bytes(problem, layer)  # the adapters of a microbatch in one layer; their gradients take as much
    # Compiled for four H200s, a forward pass gathers layer by layer, a backward pass all layers of its program at once.
    gathered = layer_bytes(problem, number=number) if problem.fsdp > 1 else 0
    dequantised = dequantised_bytes(problem, number)  # one layer at a time, because layers depend on each other
    together = block_layers(problem.block_layers, len(problem.layers[stage].pieces), fsdp=problem.fsdp)
    once = hand_over + recomputed + dequantised + _balance_bytes(problem, layer)
    return {
        "forward": once + view + gathered,
        "backward": once + max(mlp, attention) + _tile_sums(problem, layer) + 2 * view + together * gathered,
    }


def _balance_bytes(problem: MemoryProblem, layer: Layer) -> int:
    """What the loss of a router computes of every row and expert: choices, softmax, and its gradient, in float32."""
    mlp = layer.mlp
    return 3 * FLOAT32 * problem.capacity_tokens * mlp.count if problem.balanced and isinstance(mlp, Experts) else 0


def _view_bytes(problem: MemoryProblem, layer: Layer) -> int:
    """What a layer's program sees of the adapters in one microbatch: float32, padded to the widest of a projection.

    No microbatch has more adapters than tiles; how many a plan puts together is not known here.
    """
    leaves = leaves_of(tuple(spec.kind for spec in problem.adapters))
    elements = sum(
        max(linear.experts, 1) * prod(leaf.shape(*linear.shape, rank))
        for linear in layer.linears
        if (rank := bank_rank(problem.adapters, linear.name))
        for leaf in leaves
    )
    return FLOAT32 * min(len(problem.adapters), max(problem.capacity_tokens // problem.tile_tokens, 1)) * elements


def _tile_sums(problem: MemoryProblem, layer: Layer) -> int:
    """What the XLA form has of every tile in backward: dA and dB in float32 before they are added up, and A and B of
    its adapter. A microbatch of one adapter is one tile; the kernels add up as they go."""
    if kernels_run(problem) or len(problem.adapters) == 1:
        return 0
    tiles = problem.capacity_tokens // problem.tile_tokens
    sites = (
        sum(bank_columns(problem.adapters, linear.name) * sum(linear.shape) for linear in linears)
        for linears in layer.sites.values()
        if not linears[0].experts  # their sums are made tile after tile
    )
    return tiles * (FLOAT32 + problem.item) * max(sites)


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
