"""Protocol of the optimizer settings; `config.OptimSettings` implements it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class OptimizerSettings(Protocol):
    """The section `optim` of an adapter."""

    @property
    def name(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def schedule(self) -> str: ...
    @property
    def warmup(self) -> float: ...
    @property
    def min_lr_ratio(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip(self) -> float: ...
    @property
    def lr_ratios(self) -> Mapping[str, float]:
        """Factors of the learning rate of named groups of leaves."""
        ...

    def option(self, name: str) -> float | None:
        """A number that only some optimizers use; None if the job file does not set it."""
        ...
