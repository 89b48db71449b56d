"""What references say of samples: log p of every learned token, computed once and stored with the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from lorafusion_jax.data.prepare import AdapterData, Prepared
from lorafusion_jax.data.sample_table import State
from lorafusion_jax.data.tokenized_set import TokenizedSet

TRAIN, EVAL = "train", "eval"
STATES = " states"  # suffix of the name of a teacher's states
# TRAIN, EVAL -> float32 [T], log p of the learned tokens, 0 for the others. Or TRAIN + STATES, EVAL + STATES -> the
# final-normed states [learned tokens, D] that predict them, of an objective that compares distributions.
SetReferences = Mapping[str, np.ndarray]


def with_references(prepared: Prepared, references: Mapping[str, SetReferences]) -> Prepared:
    """Returns the data with what the references of some adapters say of their samples."""
    adapters = {
        name: add_references(data, references[name]) if name in references else data
        for name, data in prepared.adapters.items()
    }
    return dataclasses.replace(prepared, adapters=adapters)


def sets_of(data: AdapterData) -> dict[str, TokenizedSet]:
    """Returns the sets of an adapter by their names."""
    return {TRAIN: data.train} | ({} if data.eval is None else {EVAL: data.eval})


def reference_shapes(data: AdapterData, state: State | None) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns shapes and dtypes of an adapter's references.

    Args:
        state: width and dtype of a teacher's states, if the adapter's objective compares distributions.
    """
    if state is None:
        return {key: (samples.tokens.shape, "float32") for key, samples in sets_of(data).items()}
    return {
        f"{key}{STATES}": ((int(samples.loss_mask.sum()), state.width), state.dtype.name)
        for key, samples in sets_of(data).items()
    }


def add_references(data: AdapterData, references: SetReferences) -> AdapterData:
    """Returns the data of an adapter with what its reference says of its samples."""
    sets = {
        key: dataclasses.replace(samples, reference=references.get(key), teacher=references.get(f"{key}{STATES}"))
        for key, samples in sets_of(data).items()
    }
    return dataclasses.replace(data, train=sets[TRAIN], eval=sets.get(EVAL))
