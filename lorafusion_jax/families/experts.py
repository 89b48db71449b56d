"""A mixture of experts in place of the MLP, and its router; or beside the MLP, both with norms of their own.

`models.experts` executes it.

D model width · F width of an expert · E experts · k experts of a row
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lorafusion_jax.families.mechanism import Mechanism
from lorafusion_jax.families.mlp import Activation, Mlp
from lorafusion_jax.layout.layer import EXPERTS, PARALLEL, FrozenArray, Linear, Norm, SavedTensor

MLP_NORM, INPUT_NORM, OUTPUT_NORM = "mlp_norm", "input_norm", "output_norm"
MODULE = "mlp"
GATE_UP, DOWN = EXPERTS
CORRECTION = "e_score_correction_bias"
INPUT_SCALE, EXPERT_SCALE = "scale", "per_expert_scale"  # of a router
Score = Literal["softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The choice of k experts for a row, and their weights; frozen.

    s = softmax(x W) or sigmoid(x W),  the k largest of s (+ correction) are chosen,  weights = scale · s / Σ s

    Args:
        score: "softmax_of_chosen": the k largest of x W are chosen, and the softmax is over these; "sigmoid_of_chosen":
            their weights are their sigmoids.
        weighs_inputs: a row is multiplied by its weights before its experts, not after them.
        normalise: whether the weights are divided by their sum; "several": where a row has more than one expert.
        scale: factor of the weights.
        bias: whether x W has a bias.
        correction: whether there is an offset of each expert that is used to choose, but not to weigh.
        groups, top_groups: experts come in groups, and only those of the best groups can be chosen.
        group_value: what makes a group one of the best: the sum of its two best experts, or its best one.
        balanced: whether transformers has a load-balancing loss for this router, if it scores by softmax.
        least: added to the sum of the weights before they are divided by it.
        scaled: x is normalised, without a weight, and multiplied by frozen factors over √D, and each expert has a
            frozen factor of its weights.
    """

    score: Score = "softmax"
    weighs_inputs: bool = False
    normalise: bool | Literal["several"] = True
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_value: Literal["best two", "best"] = "best two"
    balanced: bool = True
    least: float = 0.0
    scaled: bool = False

    @property
    def has_balance_loss(self) -> bool:
        """Whether transformers has a load-balancing loss for it."""
        return self.balanced and not self.score.startswith("sigmoid") and not self.scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Mechanism):
    """Σ_e weight_e · down_e(act(gate_e x, up_e x)) over the k experts of a row, + gate · shared(x).

    Args:
        width: D.
        inner: F.
        count: E.
        active: k.
        gated: whether there is a gate; otherwise an expert is down_e(act(up_e x)).
        bias: whether the projections have biases.
        interleaved: gate and up take turns in the columns of their projection; otherwise gate comes first.
        limit: gate is at most this, and up within ± this; the activation is then gate · σ(1.702 gate) · (up + 1).
            None: act(gate) · up.
        shared: an MLP of all rows.
        shared_gate: whether what it adds is multiplied by σ(x w), a frozen gate; otherwise gate is 1.
        module: part of the layer that owns them.
        adapted: whether their projections may have adapters.
    """

    width: int
    inner: int
    count: int
    active: int
    activation: Activation = "silu"
    router: Router = Router()
    gated: bool = True
    bias: bool = False
    interleaved: bool = False
    limit: float | None = None
    shared: Mlp | None = None
    shared_gate: bool = False
    module: str = MODULE
    adapted: bool = True

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (
            *(() if self.shared is None else self.shared.linears),
            self._of_experts(GATE_UP, "experts_in", self.width, self.inner * (2 if self.gated else 1)),
            self._of_experts(DOWN, "experts_down", self.inner, self.width),
        )

    @property
    def arrays(self) -> tuple[FrozenArray, ...]:
        shapes = {"weight": (self.count, self.width)}
        shapes |= {"bias": (self.count,)} if self.router.bias else {}
        shapes |= {CORRECTION: (self.count,)} if self.router.correction else {}
        shapes |= {INPUT_SCALE: (self.width,), EXPERT_SCALE: (self.count,)} if self.router.scaled else {}
        router = [
            FrozenArray(path=f"{self.module}.router.{name}", half="mlp", shape=shape, float32=name == CORRECTION)
            for name, shape in shapes.items()
        ]
        gate = FrozenArray(path=f"{self.module}.shared_expert_gate.weight", half="mlp", shape=(1, self.width))
        return (*router, *([gate] if self.shared_gate else []))

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        router = self._saved("router", self.count, "router", float32=True)
        shared = () if self.shared is None else self.shared.saved
        weighted = self._copies("weighted act(gate) · up of experts", self.inner, input_of=DOWN)
        output = self._saved("output of the shared expert", self.width, "shared_out")
        return (
            *shared,
            *([output] if self.shared_gate else []),
            router,
            self._copies("gate, up of experts", self.inner * (2 if self.gated else 1), "gate_up"),
            self._copies("rows of experts", self.width, input_of=GATE_UP),
            *([self._copies("act(gate) · up of experts", self.inner)] if self.limit is None else []),
            *([] if self.router.weighs_inputs else [weighted]),
        )

    @property
    def row_elements(self) -> int:
        """Elements per row of the gradients in backward, as `Mlp.row_elements`."""
        shared = 0 if self.shared is None else self.shared.row_elements
        return self.active * (4 * self.inner + 2 * self.width) + shared

    @property
    def gated_elements(self) -> int:
        """Elements per row of act(gate) · up."""
        return self.active * self.inner + (0 if self.shared is None else self.shared.inner)

    @property
    def as_one_op(self) -> bool:
        """Whether there is an op for the whole MLP."""
        return False

    def _of_experts(self, name: str, site: str, inputs: int, outputs: int) -> Linear:
        return self._linear(
            name, site, inputs, outputs, bias=self.bias, experts=self.count, active=self.active, is_target=self.adapted
        )

    def _copies(self, name: str, width: int, checkpoint: str | None = None, input_of: str | None = None) -> SavedTensor:
        copies, all_width = (self.count, self.active), self.active * width
        return SavedTensor(
            name=name, half="mlp", width=all_width, checkpoint=checkpoint, input_of=input_of, experts=copies
        )


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
