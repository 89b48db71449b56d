"""The gated MLP of a layer and its activation. `models.mlp` executes it. D model width · F MLP width"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lorafusion_jax.families.mechanism import Mechanism
from lorafusion_jax.layout.layer import FrozenArray, Linear, SavedTensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "relu", "xielu"]
MODULE = "mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp(Mechanism):
    """down_proj(activation(gate_proj x) · up_proj x), or down_proj(activation(up_proj x)).

    Args:
        width: D.
        inner: F.
        bias: whether the projections have a bias.
        fused: gate and up are one projection, gate first: `gate_up_proj`, or the first of two names.
        gated: whether there is a gate.
        names: of its projections, as in checkpoints: gate, up and down; without a gate, up and down.
        gate_factor, out_factor: of the gate before its activation, and of the output.
        module: part of the layer that owns it.
    """

    width: int
    inner: int
    activation: Activation = "silu"
    bias: bool = False
    fused: bool = False
    gated: bool = True
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    gate_factor: float = 1.0
    out_factor: float = 1.0
    module: str = MODULE

    @property
    def linears(self) -> tuple[Linear, ...]:
        *first, down = self.names
        first = ["gate_up_proj"] if len(first) > 1 and self.fused else first
        size = 2 * self.inner if self.fused else self.inner
        return (
            *(self._linear(name, "gate_up", self.width, size, bias=self.bias) for name in first),
            self._linear(down, "down", self.inner, self.width, bias=self.bias),
        )

    @property
    def arrays(self) -> tuple[FrozenArray, ...]:
        shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()} if self.activation == "xielu" else {}
        return self._arrays({f"act_fn.{name}": shape for name, shape in shapes.items()})

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        if not self.gated:
            return self._saved("up", self.inner, "up"), self._saved(f"{self.activation}(up)", self.inner)
        return (
            self._saved("gate", self.inner, "gate"),
            self._saved("up", self.inner, "up"),
            self._saved(f"{self.activation}(gate) · up", self.inner, unfused=True),
        )

    @property
    def row_elements(self) -> int:
        """Elements per row of the gradients in backward: of down's input, gate and up, and of x on both sides."""
        return 3 * self.inner + 2 * self.width

    @property
    def gated_elements(self) -> int:
        """Elements per row of act(gate) · up."""
        return self.inner

    @property
    def as_one_op(self) -> bool:
        """Whether there is an op for the whole MLP, on devices that have its kernels."""
        plain = self.gate_factor == 1 and self.out_factor == 1
        return self.activation == "silu" and self.gated and plain and not self.fused
