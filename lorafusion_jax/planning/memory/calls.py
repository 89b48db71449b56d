"""Which implementations a layer of a run calls, and the shapes of these calls."""

from __future__ import annotations

from lorafusion_jax.adapters.spec import bank_columns, common_rank
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.families.attention import Attention
from lorafusion_jax.families.latent_attention import LatentAttention
from lorafusion_jax.families.layer import Layer
from lorafusion_jax.planning.memory.problem import MemoryProblem
from pallas_kernels import policy
from pallas_kernels.experts.sizes import sorted_rows


def kernels_run(problem: MemoryProblem) -> bool:
    """Whether the kernels run. They save dropout's bits instead of silu(gate) · up; the XLA ops do the reverse."""
    if problem.implementation is not None:
        return problem.implementation != policy.XLA
    calls = (
        site_shape(problem, site, problem.device_model.layers.index(layer)).op_call
        for layer in problem.device_model.kinds
        for site, rank in site_ranks(problem, layer).items()
        if rank and not layer.sites[site][0].experts
    )
    names = [name for name in map(problem.measured, calls) if name is not None]
    return any(name != policy.XLA for name in names) if names else problem.hopper


def site_shape(problem: MemoryProblem, site: str, number: int = 0) -> policy.LinearShape:
    """The op call of a site of a layer, as the kernels' policy knows it."""
    linears = problem.device_model.layer(number).sites[site]
    return policy.LinearShape(
        rows=problem.capacity_tokens,
        in_features=linears[0].in_features,
        out_features=tuple(linear.out_features for linear in linears),
        ranks=tuple(bank_columns(problem.adapters, linear.name) for linear in linears),
        tile=problem.tile_tokens,
        adapters=len(problem.adapters),
        least_rank=common_rank([spec.columns for spec in problem.adapters]) or 0,
        dropout=any(spec.dropout for spec in problem.adapters),
        dtype=dtype_of(problem),
    )


def expert_rows(problem: MemoryProblem, experts: int, active: int) -> int:
    """Sorted rows of a microbatch with their padding, see `pallas_kernels.experts`."""
    return sorted_rows(problem.capacity_tokens, active, experts)


def site_ranks(problem: MemoryProblem, layer: Layer) -> dict[str, int]:
    return {
        site: sum(bank_columns(problem.adapters, linear.name) for linear in linears)
        for site, linears in layer.sites.items()
    }


def runs_on_hopper(problem: MemoryProblem, shape: policy.LinearShape) -> bool:
    """Whether Hopper's backend serves a call. No other one splits ranks."""
    device = {"hopper": problem.hopper, "measured": problem.measured}
    return (problem.implementation or policy.preferred(shape, **device)[0]) == policy.HOPPER


def attention_is_ours(problem: MemoryProblem, layer: Layer) -> bool:
    """Whether our own attention kernels run: they are selected and support these sizes and scores."""
    m = layer.attention
    if not isinstance(m, Attention | LatentAttention):
        return False
    sizes = {"rows": problem.capacity_tokens, "heads": m.heads, "key_heads": m.kv_heads, "width": m.head_dim}
    fastest = problem.measured(policy.attention_call(**sizes, dtype=dtype_of(problem)))
    implementation = problem.attention or fastest or (policy.HOPPER if problem.hopper else policy.XLA)
    if implementation != policy.HOPPER or m.soft_cap is not None or m.sinks:
        return False
    return policy.attention_unsupported_reason(**sizes, dtype=dtype_of(problem)) is None


def mlp_is_one_op(problem: MemoryProblem, layer: Layer) -> bool:
    """Whether the kernels run the whole MLP. Their backward recomputes silu(gate) · up from gate and up."""
    inside = [linear.name for linear in layer.linears_of("mlp")]
    changes_columns = any(
        name in spec.targets and adapter_kind(spec.kind).changes_columns for spec in problem.adapters for name in inside
    )
    tp_dropout = problem.tensor > 1 and any(spec.dropout for spec in problem.adapters)  # the op counts columns from 0
    if not kernels_run(problem) or not layer.mlp.as_one_op or changes_columns or tp_dropout:
        return False
    number = problem.device_model.layers.index(layer)
    gate_up, down = (site_shape(problem, site, number) for site in ("gate_up", "down"))
    return policy.mlp_is_fused(gate_up, down, problem.implementation, hopper=problem.hopper, measured=problem.measured)


def scales_columns(problem: MemoryProblem, target: str) -> bool:
    """Whether an adapter multiplies the columns of a projection, whose backward needs them as they were."""
    return any(target in spec.targets and adapter_kind(spec.kind).column_scale for spec in problem.adapters)


def scales_with_gate(problem: MemoryProblem, layer: Layer, site: str) -> bool:
    """Whether factors of a site's columns are applied with the gate, whose backward keeps gate and up as they were."""
    shifted = any(
        linear.name in spec.targets and adapter_kind(spec.kind).shift is not None
        for spec in problem.adapters
        for linear in layer.sites[site]
    )
    biased = any(linear.bias for linear in layer.sites[site])
    dropped = any(spec.drops_columns for spec in problem.adapters)
    return site == "gate_up" and layer.mlp.as_one_op and not (shifted or biased or dropped)


def columns_of_s(problem: MemoryProblem, layer: Layer, site: str) -> int:
    """Of all projections of a site together: the kernels pad them, and Hopper's have the extra ranks in blocks."""
    if not kernels_run(problem):
        return site_ranks(problem, layer)[site]
    if layer.sites[site][0].experts:
        return max(bank_columns(problem.adapters, linear.name) for linear in layer.sites[site])
    shape = site_shape(problem, site, problem.device_model.layers.index(layer))
    return policy.columns_of_s(shape) if runs_on_hopper(problem, shape) else shape.joint_rank


def dropout_bits(problem: MemoryProblem, layer: Layer) -> dict[str, int]:
    """Bytes of the packed keep bits of each dropout site, in blocks of 256 columns."""
    if not kernels_run(problem) or not any(spec.dropout for spec in problem.adapters):
        return {}
    ranks = site_ranks(problem, layer)
    return {
        site: problem.capacity_tokens * -(-linears[0].in_features // 256) * 32
        for site, linears in layer.sites.items()
        if ranks[site]
    }


def dtype_of(problem: MemoryProblem) -> str:
    return "bfloat16" if problem.item == 2 else "float32"
