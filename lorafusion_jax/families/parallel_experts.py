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
        names = (MLP_NORM, INPUT_NORM, OUTPUT_NORM)
        return tuple(Norm(path=f"{self.module}.{name}", half="mlp", width=self.width) for name in names)

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        """The inputs of the norms of both outputs, and what the norms and the router compute of x."""
        outputs = {"output of the MLP beside experts": "mlp_out", "output of experts": "experts_out"}
        return (
            *super(ParallelExperts, self).saved,
            *(
                SavedTensor(name=name, half="mlp", width=self.width, checkpoint=checkpoint)
                for name, checkpoint in outputs.items()
            ),
            SavedTensor(name="input of the router", half="mlp", width=self.width, float32=True),
            *(SavedTensor(name=f"{norm.path} scale", half="mlp", width=1, float32=True) for norm in self.norms),
            SavedTensor(name="scale of the router's norm", half="mlp", width=1, float32=True),
        )
