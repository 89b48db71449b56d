"""Reward adapters: each scores the answers that another adapter has sampled, from the state of their last tokens.

D model width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.data.sample_table import State
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.objective.choose import choose
from lorafusion_jax.peft.folder import read_described
from lorafusion_jax.peft.leaves import HEAD
from lorafusion_jax.session.distant_stage import AnyStage, local_stages
from lorafusion_jax.session.references import SetPass, pass_over_batch, stages_with, unchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A reward adapter that scores answers.

    Attributes:
        stages: that hold it.
        position: its place on them.
        head_D: of the last stage.
        describe: of the stages.
    """

    stages: Sequence[AnyStage]
    position: int
    head_D: np.ndarray
    describe: Callable[[Microbatch], Microbatch] = unchanged

    def pass_over(self, config: JobConfig, samples: TokenizedSet) -> SetPass:
        """Returns the pass that computes the final-normed state of the last token of each answer.

        Args:
            config: with the adapter that sampled alone.
        """
        parts = next(iter(local_stages(self.stages).values())).parts
        state = State(parts.model.hidden_size, np.dtype(parts.dtype))
        return pass_over_batch(
            config, samples, stages=self.stages, position=self.position, describe=self.describe, state=state
        )


def judge_of_folder(config: JobConfig, stages: Sequence[AnyStage], folder: str) -> Judge:
    """Opens a PEFT folder that the objective `reward` trained.

    Args:
        config: with the adapter that sampled alone.

    Raises:
        CheckpointError: the folder cannot be read, has no score, or belongs to another base.
    """
    (adapter,) = config.adapters
    described, arrays = read_described(Path(config.directory) / folder, head=choose("reward", {}).head)
    ((head_D1,)) = arrays[HEAD]
    # Scores are products of states with the head, on the host: the stages need only what makes the states.
    weights = {path: tensors for path, tensors in arrays.items() if path != HEAD}
    spec = replace(described.spec, head=None)
    return Judge(
        stages=stages_with(config, adapter, stages, spec, weights), position=0, head_D=np.asarray(head_D1)[:, 0]
    )


def judge_in_place(stages: Sequence[AnyStage], place: int, describe: Callable[[Microbatch], Microbatch]) -> Judge:
    """Returns a reward adapter of the run, with the head that it has now."""
    leaves = local_stages(stages)[len(stages) - 1].adapter(place)
    (head,) = (leaf for name, leaf in leaves.items() if name.startswith(f"{HEAD}."))
    return Judge(stages=stages, position=place, head_D=np.asarray(head, np.float64).reshape(-1), describe=describe)
