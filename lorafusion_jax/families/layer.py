"""A layer made of mechanisms: norms, attention or a gated delta net, and an MLP or experts."""

from __future__ import annotations

from dataclasses import dataclass, field

from lorafusion_jax.families.attention import Attention
from lorafusion_jax.families.delta_net import DeltaNet
from lorafusion_jax.families.experts import Experts, ParallelExperts
from lorafusion_jax.families.latent_attention import LatentAttention
from lorafusion_jax.families.mamba import Mamba
from lorafusion_jax.families.mechanism import Mechanism
from lorafusion_jax.families.mlp import Mlp
from lorafusion_jax.families.norm import Norms
from lorafusion_jax.families.per_layer_input import PerLayerInput
from lorafusion_jax.families.short_convolution import ShortConvolution
from lorafusion_jax.layout.layer import FrozenArray, LayerSpec, Linear, Norm, SavedTensor

SCALAR = "layer_scalar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent(Mechanism):
    """Nothing in place of a layer's mixer or of its MLP: x passes this half as it is."""

    module: str = "absent"
    rope: None = None
    window: None = None
    queries: int = 0
    keys: int = 0
    inner: int = 0
    row_elements: int = 0
    gated_elements: int = 0
    as_one_op: bool = False

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def reach(self, sample_tokens: float) -> float:
        del sample_tokens
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Layer(LayerSpec):
    """A decoder layer.

    x + residual · attention(x), then x + residual · mlp(x), with `around.position` saying where the norms are

    Args:
        around: norms of attention's and the MLP's inputs and outputs.
        second: a mixer beside attention, which reads the same; both are added.
        beside: experts beside the MLP.
        own_input: an input of this layer, beside x, added after the MLP.
        residual: factor of what attention and the MLP add.
        scaled: whether the layer's output is multiplied by a frozen number, `layer_scalar`.

    >>> layer = Layer(
    ...     attention=Attention(width=16, heads=2, kv_heads=1, head_dim=8), mlp=Mlp(width=16, inner=24),
    ...     around=Norms(width=16))
    >>> layer.targets
    ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
    """

    attention: Attention | DeltaNet | LatentAttention | Mamba | ShortConvolution | Absent
    mlp: Mlp | Experts | Absent
    around: Norms
    second: Mamba | None = None
    beside: ParallelExperts | None = None
    own_input: PerLayerInput | None = None
    residual: float = 1.0
    scaled: bool = False
    linears: tuple[Linear, ...] = field(init=False, repr=False, compare=False)
    norms: tuple[Norm, ...] = field(init=False, repr=False, compare=False)
    saved: tuple[SavedTensor, ...] = field(init=False, repr=False, compare=False)
    arrays: tuple[FrozenArray, ...] = field(init=False, repr=False, compare=False, default=())

    @property
    def gives_keys(self) -> bool:
        """Whether later layers read its keys and values."""
        return isinstance(self.attention, Attention) and self.attention.sharing == "gives"

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what each token keeps in the layer for the next ones of its sequence, by name."""
        return self.attention.row_shapes if isinstance(self.attention, Attention | LatentAttention) else {}

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what a sequence keeps in the layer, whatever its length, by name; float32."""
        mixer = self.second or self.attention
        return {} if isinstance(mixer, Attention | LatentAttention) else mixer.state_shapes

    @property
    def row_elements(self) -> int:
        """Elements per row of the gradients in backward of the MLP and of experts beside it."""
        return self.mlp.row_elements + (0 if self.beside is None else self.beside.row_elements)

    @property
    def gated_elements(self) -> int:
        """Elements per row of act(gate) · up."""
        return self.mlp.gated_elements + (0 if self.beside is None else self.beside.gated_elements)

    def __post_init__(self) -> None:
        second = () if self.second is None else (self.second,)
        others = tuple(part for part in (self.beside, self.own_input) if part is not None)
        mechanisms: tuple[Mechanism, ...] = (self.attention, *second, self.mlp, *others, self.around)
        for name in ("linears", "norms", "saved", "arrays"):
            parts = tuple(part for mechanism in mechanisms for part in getattr(mechanism, name))
            object.__setattr__(self, name, parts)
        if self.scaled:
            object.__setattr__(self, "arrays", (*self.arrays, FrozenArray(path=SCALAR, half="mlp", shape=(1,))))
        # Experts read copies of the rows, so nobody keeps the rows themselves, but for an MLP beside them.
        if isinstance(self.mlp, Experts) and self.mlp.shared is None:
            mlp_input = f"{self.around.before.get('mlp')} out"
            object.__setattr__(self, "saved", tuple(tensor for tensor in self.saved if tensor.name != mlp_input))
