"""Jobs of four different adapters on five layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mixed import ADAPTERS, write_mixed_job

from lorafusion_jax.config import load_config
from lorafusion_jax.config.schema import JobConfig


@pytest.fixture(autouse=True)
def _quick(kept_programs):
    """Every test here runs programs of a tiny model."""


@pytest.fixture
def mixed_job(tmp_path, deep_base) -> Callable[..., JobConfig]:
    """mixed_job(tied, names, held_out, overrides, **sections) → JobConfig of different adapters on five layers."""

    def make(tied: bool = True, names=tuple(ADAPTERS), held_out=("law", "chat"), overrides=(), **sections):
        return load_config(write_mixed_job(tmp_path, deep_base(tied), names, held_out, **sections), overrides)

    return make
