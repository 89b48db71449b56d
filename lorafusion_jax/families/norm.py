"""The norms around attention and MLP: where they are, and what is added to their weights. `models.layer` runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lorafusion_jax.families.mechanism import Mechanism
from lorafusion_jax.layout.layer import HALVES, Half, Norm, SavedTensor

Place = Literal["pre", "post", "sandwich", "parallel", "parallel of two", "pre of linear"]
Kind = Literal["rms", "layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms(Mechanism):
    """Norms before attention and MLP, after them, or both.

    y = (weight + offset) · x / √(mean(x²) + eps),  or of x - mean(x) in place of x, + bias

    Args:
        width: D.
        position: "pre": x + f(norm x);  "post": x + norm(f(x));  "sandwich": x + norm(f(norm x));  "parallel": both
            halves read the norm of one x, x + attention(norm x) + mlp(norm x);  "parallel of two": each has its norm;
            "pre of linear": as "pre", in a model whose layers with attention have "post".
        kind: "layer": of x without its mean.
        bias: whether layer norms have a bias; weight and bias are the rows of one leaf, [2, D].
        halves: those that the layer has.
        offset: added to every weight of a layer's norms and of the final norm.
    """

    width: int
    position: Place = "pre"
    kind: Kind = "rms"
    bias: bool = False
    halves: tuple[Half, ...] = HALVES
    offset: float = 0.0
    eps: float = 1e-6

    @property
    def before(self) -> dict[Half, str]:
        """Names of the norms of the inputs."""
        names: dict[Place, dict[Half, str]] = {
            "pre": {"attention": "input_layernorm", "mlp": "post_attention_layernorm"},
            "pre of linear": {"attention": "attention_layer_norm", "mlp": "feedforward_layer_norm"},
            "post": {},
            "sandwich": {"attention": "input_layernorm", "mlp": "pre_feedforward_layernorm"},
            "parallel": {"attention": "input_layernorm"},
            "parallel of two": {"attention": "input_layernorm", "mlp": "post_attention_layernorm"},
        }
        return {half: name for half, name in names[self.position].items() if half in self.halves}

    @property
    def after(self) -> dict[Half, str]:
        """Names of the norms of the outputs."""
        if self.position not in ("post", "sandwich"):
            return {}
        return {"attention": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"}

    @property
    def parallel(self) -> bool:
        """Whether attention and the MLP read one x, so that no stage ends between them."""
        return self.position.startswith("parallel")

    @property
    def norms(self) -> tuple[Norm, ...]:
        places = [*self.before.items(), *self.after.items()]
        return tuple(Norm(path=name, half=half, width=self.width, bias=self.bias) for half, name in places)

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        """Outputs and scales of the norms, and the outputs of attention and MLP where backward needs them.

        A norm's gradient needs its input. Without norms of the outputs, layer input + o_out is the input of the MLP.
        """
        if self.after:
            outputs = (
                SavedTensor(name="o_out", half="attention", width=self.width, checkpoint="o_out"),
                SavedTensor(name="x between", half="mlp", width=self.width, entry=True),
                SavedTensor(name="down_out", half="mlp", width=self.width, checkpoint="down_out"),
            )
        elif self.parallel or len(self.halves) == 1:
            outputs = ()
        else:
            outputs = (SavedTensor(name="o_out", half="mlp", width=self.width, checkpoint="o_out", entry=True),)
        inputs = [norm for norm in self.norms if norm.path in self.before.values()]
        return (
            *outputs,
            *(SavedTensor(name=f"{norm.path} out", half=norm.half, width=self.width) for norm in inputs),
            *(SavedTensor(name=f"{norm.path} scale", half=norm.half, width=1, float32=True) for norm in self.norms),
        )
