"""Whether the tensors of a checkpoint are those of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.families.model import ModelConfig, is_ignored
from lorafusion_jax.families.table import family_named
from lorafusion_jax.models.checkpoint import Stored
from lorafusion_jax.weights.checkpoint_formats import FLOATS, TensorSpec


def check_tensors(
    wanted: Mapping[str, TensorSpec], stored: Mapping[str, Stored], config: ModelConfig, directory: Path
) -> None:
    """Compares the headers of a checkpoint with what its config.json promises.

    Args:
        wanted: by name, see `quantised_kernels.tensors_of`.

    Raises:
        CheckpointError: `model.tensors-differ`, with everything that is missing, extra or of another shape or type.
    """
    missing = sorted(name for name in wanted.keys() - stored.keys() if not wanted[name].optional)
    extra = sorted(name for name in stored.keys() - wanted.keys() if not is_ignored(name, config))
    problems = [f"missing: {name}{_shapes(wanted[name])}" for name in missing]
    problems += [f"not of this model: {name} {list(stored[name].shape)}" for name in extra]
    both = sorted(wanted.keys() & stored.keys())
    problems += [problem for name in both if (problem := _shape_problem(name, wanted[name], stored[name]))]
    head = family_named(config.family).tensor_name("lm_head.weight")
    if problems:
        raise CheckpointError(
            "model.tensors-differ",
            f"{len(problems)} tensors do not fit the model that config.json describes:\n    " + "\n    ".join(problems),
            where=str(directory),
            why="the tie_word_embeddings of config.json is false" if missing == [head] else "",
            fix="use the config.json and the weights of the same model",
        )


def _shape_problem(name: str, wanted: TensorSpec, stored: Stored) -> str | None:
    if stored.dtype not in wanted.dtypes:
        plain = stored.dtype in FLOATS and not set(FLOATS) & set(wanted.dtypes)
        return f"{'not quantised' if plain else 'unreadable type'}: {name} is {stored.dtype}"
    if wanted.shapes and stored.shape not in wanted.shapes:
        return f"wrong shape: {name} is {list(stored.shape)}, config.json says{_shapes(wanted)}"
    return None


def _shapes(wanted: TensorSpec) -> str:
    return " " + " or ".join(str(list(shape)) for shape in wanted.shapes) if wanted.shapes else ""
