"""A gated short convolution in place of attention. `models.short_convolution` executes it. D model width"""

from __future__ import annotations

from dataclasses import dataclass

from lorafusion_jax.layout.layer import SHORT_CONVOLUTION, FrozenArray, Linear, Norm, SavedTensor

IN, OUT = "conv_in", "conv_out"  # sites, and a checkpoint name


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution:
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
            self._linear("in_proj", IN, 3 * self.width),
            self._linear("out_proj", OUT, self.width),
        )

    @property
    def norms(self) -> tuple[Norm, ...]:
        return ()

    @property
    def arrays(self) -> tuple[FrozenArray, ...]:
        shapes = {"conv.weight": (self.width, 1, self.kernel)} | ({"conv.bias": (self.width,)} if self.bias else {})
        return tuple(
            FrozenArray(path=f"{self.module}.{name}", half="attention", shape=shape) for name, shape in shapes.items()
        )

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        return (
            SavedTensor(name="B, C, x", half="attention", width=3 * self.width, checkpoint=IN),
            SavedTensor(name="gated convolution, for out_proj", half="attention", width=self.width),
        )

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """As `DeltaNet.state_shapes`: the last rows of the convolution."""
        return {"last_rows": (self.kernel - 1, self.width)}

    @property
    def rope(self) -> None:
        """It knows the order of rows without rotary embeddings."""
        return

    @property
    def window(self) -> None:
        return

    def reach(self, sample_tokens: float) -> float:
        """As `DeltaNet.reach`: next to nothing."""
        del sample_tokens
        return float(self.kernel)

    def _linear(self, name: str, site: str, outputs: int) -> Linear:
        return Linear(
            name=name, module=self.module, half="attention", site=site, in_features=self.width, out_features=outputs,
            bias=self.bias,
        )  # fmt: skip
