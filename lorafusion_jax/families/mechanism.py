"""What attention, MLPs and norms have in common: they list their parts with the records of `layout.layer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from lorafusion_jax.layout.layer import FrozenArray, Half, Linear, Norm, SavedTensor


class Mechanism:
    """A part of a layer: a mixer, an MLP, experts or the norms around them. It has no parts but those that it names.

    Mechanisms are frozen dataclasses with a field or a class variable `module`, the name of the part in its layer.
    """

    __slots__ = ()
    half: ClassVar[Half] = "mlp"
    module: str

    @property
    def linears(self) -> tuple[Linear, ...]:
        return ()

    @property
    def norms(self) -> tuple[Norm, ...]:
        return ()

    @property
    def arrays(self) -> tuple[FrozenArray, ...]:
        return ()

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        return ()

    def _linear(
        self, name: str, site: str, inputs: int, outputs: int, *, bias: bool = False, experts: int = 0, active: int = 0,
        is_target: bool = True,
    ) -> Linear:  # fmt: skip
        return Linear(
            name=name, module=self.module, half=self.half, site=site, in_features=inputs, out_features=outputs,
            bias=bias, experts=experts, active=active, is_target=is_target,
        )  # fmt: skip

    def _norms(self, widths: Mapping[str, int]) -> tuple[Norm, ...]:
        """Norms by name in the module."""
        return tuple(Norm(path=f"{self.module}.{name}", half=self.half, width=width) for name, width in widths.items())

    def _arrays(self, shapes: Mapping[str, tuple[int, ...]], *, by_head: bool = False) -> tuple[FrozenArray, ...]:
        """Arrays by name in the module."""
        return tuple(
            FrozenArray(path=f"{self.module}.{name}", half=self.half, shape=shape, by_head=by_head)
            for name, shape in shapes.items()
        )

    def _saved(
        self, name: str, width: int, checkpoint: str | None = None, *, float32: bool = False, unfused: bool = False,
        input_of: str | None = None,
    ) -> SavedTensor:  # fmt: skip
        return SavedTensor(
            name=name, half=self.half, width=width, checkpoint=checkpoint, float32=float32, unfused=unfused,
            input_of=input_of,
        )  # fmt: skip


class Mixer(Mechanism):
    """What the first half of a layer has: attention, or a recurrent mixer in its place."""

    __slots__ = ()
    half: ClassVar[Half] = "attention"


class RecurrentMixer(Mixer):
    """A mixer whose memory of earlier rows has one size; it knows the order of rows without rotary embeddings."""

    __slots__ = ()
    rope: ClassVar[None] = None
    window: ClassVar[None] = None
