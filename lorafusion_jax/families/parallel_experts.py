"""Experts beside the MLP of a layer, both with norms of their own. `models.parallel_experts` executes it.

D model width
"""

from __future__ import annotations

from dataclasses import dataclass

from lorafusion_jax.families.experts import Experts
from lorafusion_jax.layout.layer import PARALLEL, Norm, SavedTensor

MLP_NORM, INPUT_NORM, OUTPUT_NORM = "mlp_norm", "input_norm", "output_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelExperts(Experts):
    """mlp_norm(mlp(norm(x))) + output_norm(Σ_e weight_e · down_e(act(gate_e h, up_e h))),  h = input_norm(x)

    x is the sum before the layer's MLP; the router reads x, too, see `experts.Router.scaled`.
    """

    module: str = PARALLEL

    @property
    def norms(self) -> tuple[Norm, ...]:
        return self._norms(dict.fromkeys((MLP_NORM, INPUT_NORM, OUTPUT_NORM), self.width))

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        """The inputs of the norms of both outputs, and what the norms and the router compute of x."""
        return (
            *super(ParallelExperts, self).saved,
            self._saved("output of the MLP beside experts", self.width, "mlp_out"),
            self._saved("output of experts", self.width, "experts_out"),
            self._saved("input of the router", self.width, float32=True),
            *(self._saved(f"{norm.path} scale", 1, float32=True) for norm in self.norms),
            self._saved("scale of the router's norm", 1, float32=True),
        )
