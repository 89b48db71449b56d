"""Experts beside the MLP of a layer: executes `families.parallel_experts.ParallelExperts`.

Dims: `T` packed tokens · `D` model width
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from lorafusion_jax.families.parallel_experts import INPUT_NORM, MLP_NORM, OUTPUT_NORM, ParallelExperts
from lorafusion_jax.models.build import Builder
from lorafusion_jax.models.experts import MixtureOfExperts
from lorafusion_jax.models.norm import RMSNorm
from lorafusion_jax.modules import LoRAContext


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
