"""A mixture of experts as a module, in place of an MLP or beside one: executes what `families.experts` describes.

Dims: `T` packed tokens · `D` model width · `E` experts · `k` experts of a row · `M` sorted rows, or sequences ·
`G` gate and up
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from lorafusion_jax.families.experts import (
    DOWN,
    EXPERT_SCALE,
    GATE_UP,
    INPUT_NORM,
    INPUT_SCALE,
    MLP_NORM,
    OUTPUT_NORM,
    Experts,
    ParallelExperts,
    Router,
)
from lorafusion_jax.families.mlp import Mlp
from lorafusion_jax.models.balance import count_choices
from lorafusion_jax.models.build import Builder
from lorafusion_jax.models.expert_linear import ExpertLinear
from lorafusion_jax.models.mlp import MLP
from lorafusion_jax.models.norm import RMSNorm
from lorafusion_jax.modules import LoRAContext
from pallas_kernels.experts.rows import ExpertRows, collect_rows, sort_rows, spread_copies, spread_rows
from pallas_kernels.mlp.xla import activate, gate_with
from pallas_kernels.norm import rms_norm
from pallas_kernels.tiles import spread

STEEPNESS = 1.702  # of the sigmoid in a limited gate


class FrozenArrays(nnx.Module):
    """The frozen arrays of the router, or of the shared expert's gate."""

    weight: nnx.Param
    bias: nnx.Param
    e_score_correction_bias: nnx.Param
    scale: nnx.Param
    per_expert_scale: nnx.Param

    def __init__(self, spec: Experts, name: str, *, dtype: Any, rngs: nnx.Rngs):
        for array in spec.arrays:
            *_, module, leaf = array.path.split(".")
            if module == name:
                values = jax.random.normal(rngs.params(), array.shape, jnp.float32) * spec.width**-0.5
                values = jnp.ones_like(values) if leaf in (INPUT_SCALE, EXPERT_SCALE) else values
                setattr(self, leaf, nnx.Param(values.astype(jnp.float32 if array.float32 else dtype)))


class MixtureOfExperts(nnx.Module):
    """Σ_e weight_e · down_e(act(gate_e x, up_e x)) over the k experts of a row, + gate · shared(x)."""

    shared_expert_gate: FrozenArrays
    experts_gate_up_proj: ExpertLinear
    experts_down_proj: ExpertLinear

    def __init__(self, build: Builder, spec: Experts):
        self.spec, self.norm_eps = spec, build.layer.around.eps
        self.router = FrozenArrays(spec, "router", dtype=build.dtype, rngs=build.rngs)
        for name in (GATE_UP, DOWN):
            setattr(self, name, build.experts(name))
        if spec.shared is not None:
            setattr(self, _attribute(spec.shared), MLP(build, spec.shared))
        if spec.shared_gate:
            self.shared_expert_gate = FrozenArrays(spec, "shared_expert_gate", dtype=build.dtype, rngs=build.rngs)

    def __call__(self, x_TD: Float[Array, "T D"], lora: LoRAContext | None) -> Float[Array, "T D"]:
        _, expert_Tk, weight_Tk = self._route(x_TD)
        return self._run(x_TD, expert_Tk, weight_Tk, lora)

    def with_choices(
        self, x_TD: Float[Array, "T D"], lora: LoRAContext | None, inside_MT: Bool[Array, "M T"]
    ) -> tuple[Float[Array, "T D"], Float[Array, "2 M E"]]:
        """Like a call, and returns `count_choices` of each sequence."""
        logits_TE, expert_Tk, weight_Tk = self._route(x_TD)
        # Computed again in backward, which is otherwise given the rows of every sequence with all experts, [M, T, E].
        choices_2ME = jax.checkpoint(count_choices, prevent_cse=False)(logits_TE, expert_Tk, inside_MT)
        return self._run(x_TD, expert_Tk, weight_Tk, lora), choices_2ME

    def _route(self, x_TD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the router's logits, and experts and weights of each row."""
        logits_TE = checkpoint_name(self._logits(x_TD), "router")  # backward must choose the same experts
        expert_Tk, weight_Tk = choose_experts(logits_TE, self.spec, self._correction)
        if self.spec.router.scaled:
            weight_Tk = weight_Tk * self.router.per_expert_scale[...].astype(jnp.float32)[expert_Tk]
        return logits_TE, expert_Tk, weight_Tk

    def _run(
        self, x_TD: jax.Array, expert_Tk: jax.Array, weight_Tk: jax.Array, lora: LoRAContext | None
    ) -> Float[Array, "T D"]:
        rows = self._sort(expert_Tk, lora)
        gate_up, down = getattr(self, GATE_UP), getattr(self, DOWN)
        weight_M = spread_copies(weight_Tk, rows)[:, None].astype(x_TD.dtype)

        def spread_weighted(x_TD: jax.Array, weight_M1: jax.Array) -> jax.Array:
            return spread_rows(x_TD, rows) * weight_M1

        before = self.spec.router.weighs_inputs
        weigh = jax.checkpoint(spread_weighted, prevent_cse=False)  # backward keeps x only
        gates_MG = gate_up(weigh(x_TD, weight_M) if before else spread_rows(x_TD, rows), rows, lora)
        gates_MG = checkpoint_name(_plus(gates_MG, gate_up.bias_of(rows)), "gate_up")
        # A row is weighted before `down`, which is linear, so backward needs no output of `down`.
        y_MD = down(self._gated(gates_MG) if before else self._weighted(gates_MG, weight_M), rows, lora)
        if self.spec.bias:  # backward gathers it again

            def weigh_bias(weight_M1: jax.Array) -> jax.Array:
                return down.bias_of(rows) * weight_M1

            y_MD = y_MD + jax.checkpoint(weigh_bias, prevent_cse=False)(weight_M)
        y_TD = collect_rows(y_MD, rows)
        return y_TD if self.spec.shared is None else y_TD + self._shared(self.spec.shared, x_TD, lora)

    def _shared(self, spec: Mlp, x_TD: jax.Array, lora: LoRAContext | None) -> Float[Array, "T D"]:
        y_TD = getattr(self, _attribute(spec))(x_TD, lora)
        if not self.spec.shared_gate:
            return y_TD
        weight_1D = self.shared_expert_gate.weight[...]
        gate_T1 = jnp.einsum("td,od->to", x_TD, weight_1D, precision="highest", preferred_element_type=jnp.float32)
        return jax.nn.sigmoid(gate_T1).astype(y_TD.dtype) * checkpoint_name(y_TD, "shared_out")

    def _logits(self, x_TD: jax.Array) -> Float[Array, "T E"]:
        """The router's product in float32, so that the choice of experts has the fewest ties."""
        weight_ED, h_TD = self.router.weight[...].astype(jnp.float32), x_TD.astype(jnp.float32)
        if self.spec.router.scaled:
            h_TD = rms_norm(h_TD, self.router.scale[...].astype(jnp.float32), eps=self.norm_eps) * self.spec.width**-0.5
        logits = jnp.einsum("td,ed->te", h_TD, weight_ED, precision="highest")
        return logits + self.router.bias[...].astype(jnp.float32) if self.spec.router.bias else logits

    @property
    def _correction(self) -> Float[Array, " E"] | None:
        return self.router.e_score_correction_bias[...] if self.spec.router.correction else None

    def _sort(self, expert_Tk: jax.Array, lora: LoRAContext | None) -> ExpertRows:
        T = len(expert_Tk)
        ranks = (getattr(self, GATE_UP).rank, getattr(self, DOWN).rank)
        if lora is None or not any(ranks):
            return sort_rows(expert_Tk, jnp.full(T, -1, jnp.int32), experts=self.spec.count, adapters=0)
        tiles = jnp.asarray(lora.tile_adapter)
        adapter_T = spread(tiles, T // len(tiles))
        return sort_rows(expert_Tk, adapter_T, experts=self.spec.count, adapters=len(lora.scale))

    def _gated(self, gates_MG: jax.Array) -> jax.Array:
        if not self.spec.gated:
            return activate(self.spec.activation, gates_MG)
        if self.spec.interleaved:
            gate, up = gates_MG[:, ::2], gates_MG[:, 1::2]
        else:
            gate, up = jnp.split(gates_MG, 2, axis=-1)
        if self.spec.limit is None:
            return gate_with(self.spec.activation, gate, up)
        gate, up = jnp.minimum(gate, self.spec.limit), jnp.clip(up, -self.spec.limit, self.spec.limit)
        return (up + 1) * gate * jax.nn.sigmoid(STEEPNESS * gate)

    def _weighted(self, gates_MG: jax.Array, weight_M1: jax.Array) -> jax.Array:
        def weigh(gates_MG: jax.Array, weight_M1: jax.Array) -> jax.Array:
            return self._gated(gates_MG) * weight_M1

        if self.spec.limit is not None:  # else backward is given six more arrays of all rows
            weigh = jax.checkpoint(weigh, prevent_cse=False)
        return weigh(gates_MG, weight_M1)


def choose_experts(
    logits_TE: Float[Array, "T E"], spec: Experts, correction_E: Float[Array, " E"] | None = None
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Chooses the experts of each row and weighs them, see `families.experts.Router`."""
    router = spec.router
    if router.score == "softmax_of_chosen":
        logits_Tk, expert = jax.lax.top_k(logits_TE, spec.active)
        return expert, jax.nn.softmax(logits_Tk, axis=-1) * router.scale
    if router.score == "sigmoid_of_chosen":
        logits_Tk, expert = jax.lax.top_k(logits_TE, spec.active)
        return expert, jax.nn.sigmoid(logits_Tk) * router.scale
    scores = jax.nn.softmax(logits_TE, axis=-1) if router.score == "softmax" else jax.nn.sigmoid(logits_TE)
    value = scores if correction_E is None else scores + correction_E.astype(scores.dtype)
    _, expert = jax.lax.top_k(jax.lax.stop_gradient(_in_best_groups(value, router)), spec.active)
    weights = jnp.take_along_axis(scores, expert, axis=-1)
    if router.normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + router.least)
    return expert, weights * router.scale


def _in_best_groups(value_TE: jax.Array, router: Router) -> jax.Array:
    """Minus infinity for experts outside of a row's best groups."""
    if router.groups == 1:
        return value_TE
    value_TGe = value_TE.reshape(len(value_TE), router.groups, -1)
    best = jax.lax.top_k(value_TGe, 1 if router.group_value == "best" else 2)[0].sum(-1)
    _, best_groups = jax.lax.top_k(best, router.top_groups)
    inside = (best_groups[:, :, None] == jnp.arange(router.groups)).any(1)
    return jnp.where(inside[:, :, None], value_TGe, -jnp.inf).reshape(value_TE.shape)


def _plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias


def _attribute(shared: Mlp) -> str:
    return shared.module.rpartition(".")[2]


class ParallelMixture(MixtureOfExperts):
    """mlp_norm(y) + output_norm(Σ_e weight_e · expert_e(input_norm(x))), where y is the output of the MLP."""

    mlp_norm: RMSNorm
    input_norm: RMSNorm
    output_norm: RMSNorm

    def __init__(self, build: Builder, spec: ParallelExperts):
        super().__init__(build, spec)
        for name in (MLP_NORM, INPUT_NORM, OUTPUT_NORM):
            setattr(self, name, build.norm(f"{spec.module}.{name}"))

    def beside(
        self, y_TD: Float[Array, "T D"], x_TD: Float[Array, "T D"], lora: LoRAContext | None
    ) -> Float[Array, "T D"]:
        """Adds the experts.

        Args:
            y_TD: output of the MLP.
            x_TD: the sum before it.
        """
        _, expert_Tk, weight_Tk = self._route(x_TD)
        added_TD: jax.Array = self._run(self.input_norm(x_TD), expert_Tk, weight_Tk, lora)
        return self.mlp_norm(checkpoint_name(y_TD, "mlp_out")) + self.output_norm(
            checkpoint_name(added_TD, "experts_out")
        )
