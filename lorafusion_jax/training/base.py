"""The base model of a job, loaded the way the job asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared, base_directory
from lorafusion_jax.models import Decoder, ModelConfig, load_decoder
from lorafusion_jax.modules.spec import AdapterSpec

# Unrolled layers run faster (no copy of each layer's weights before its products), but compiling grows with them: the
# 32 layers of an 8B model compile in 16 s scanned and 4 to 6 minutes unrolled (H200 host, benchmarks/LOG.md).
MOST_UNROLLED = 8


def load_base(config: JobConfig, prepared: Prepared, specs: Sequence[AdapterSpec]) -> Decoder:
    """Loads the base model with fresh LoRA weights of all adapters.

    Raises:
        CheckpointError: a model that is incomplete, not implemented, or computes differently at this sample length.
    """
    directory, train = base_directory(config), config.train
    model = ModelConfig.from_hf(directory)
    model.check_length(max(data.train.report.longest for data in prepared.adapters.values()), where=str(directory))
    return load_decoder(
        directory,
        specs,
        dtype=jnp.dtype(config.base.dtype),
        layers=layer_mode(train.layers, model.num_layers),
        remat=train.remat,
    )


def layer_mode(wanted: Literal["auto", "unroll", "scan"], num_layers: int) -> Literal["unroll", "scan"]:
    """Chooses how layers run where the job leaves it open.

    >>> layer_mode("auto", 4), layer_mode("auto", 32), layer_mode("unroll", 32)
    ('unroll', 'scan', 'unroll')
    """
    if wanted == "auto":
        return "unroll" if num_layers <= MOST_UNROLLED else "scan"
    return wanted
