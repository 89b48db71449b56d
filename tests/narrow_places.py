"""Places with few targets: programs of places on all linears, as users have them, compile for twice as long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lorafusion_jax.adapters.spec import ALL_EXPERTS
from lorafusion_jax.config.schema import LoraSettings


def narrow_places(patch: pytest.MonkeyPatch, targets: Sequence[str]) -> None:
    """Places that are made from now on have these targets, and those of experts the experts besides."""

    def settings(**values: Any) -> LoraSettings:
        experts = {ALL_EXPERTS} & {*values.get("targets", ())}
        return LoraSettings(**values | {"targets": (*targets, *experts)})

    patch.setattr("lorafusion_jax.config.stack.LoraSettings", settings)
