"""A gated short convolution in place of attention. `models.short_convolution` executes it. D model width"""

from __future__ import annotations

from dataclasses import dataclass

from lorafusion_jax.families.mechanism import RecurrentMixer
from lorafusion_jax.layout.layer import SHORT_CONVOLUTION, FrozenArray, Linear, SavedTensor

IN, OUT = "conv_in", "conv_out"  # sites, and a checkpoint name


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution(RecurrentMixer):
    """out_proj(C · convolution(B · x)),  (B, C, x) = in_proj x

    The convolution is causal, over the last rows of the same sample and each channel on its own.

    Args:
        width: D.
        kernel: rows of the convolution.
        bias: whether both projections and the convolution have one.
    """

    width: int
    kernel: int = 3
    bias: bool = False
    module: str = SHORT_CONVOLUTION

    @property
    def queries(self) -> int:
        return self.width

    @property
    def keys(self) -> int:
        return self.width

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (
            self._linear("in_proj", IN, self.width, 3 * self.width, bias=self.bias),
            self._linear("out_proj", OUT, self.width, self.width, bias=self.bias),
        )

    @property
    def arrays(self) -> tuple[FrozenArray, ...]:
        shapes = {"conv.weight": (self.width, 1, self.kernel)} | ({"conv.bias": (self.width,)} if self.bias else {})
        return self._arrays(shapes)

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        return (
            self._saved("B, C, x", 3 * self.width, IN),
            self._saved("gated convolution, for out_proj", self.width),
        )

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """As `DeltaNet.state_shapes`: the last rows of the convolution."""
        return {"last_rows": (self.kernel - 1, self.width)}

    def reach(self, sample_tokens: float) -> float:
        """As `DeltaNet.reach`: next to nothing."""
        del sample_tokens
        return float(self.kernel)
