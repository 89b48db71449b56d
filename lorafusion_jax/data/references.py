"""What references say of samples: log p of every learned token, computed once and stored with the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from lorafusion_jax.data.prepare import AdapterData, Prepared

TRAIN, EVAL = "train", "eval"
SetReferences = Mapping[str, np.ndarray]  # TRAIN, EVAL -> float32 [T], 0 for tokens that are not learned


def with_references(prepared: Prepared, references: Mapping[str, SetReferences]) -> Prepared:
    """Returns the data with what the references of some adapters say of their samples."""
    adapters = {
        name: _add(data, references[name]) if name in references else data for name, data in prepared.adapters.items()
    }
    return dataclasses.replace(prepared, adapters=adapters)


def reference_shapes(data: AdapterData) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of an adapter's references."""
    sets = {TRAIN: data.train, EVAL: data.eval}
    return {key: samples.tokens.shape for key, samples in sets.items() if samples is not None}


def _add(data: AdapterData, references: SetReferences) -> AdapterData:
    train = dataclasses.replace(data.train, reference=references[TRAIN])
    held_out = None if data.eval is None else dataclasses.replace(data.eval, reference=references[EVAL])
    return dataclasses.replace(data, train=train, eval=held_out)
