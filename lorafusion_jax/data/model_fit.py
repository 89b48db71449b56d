"""Checks tokenised data against the base model: token ids against its vocabulary, lengths against its positions."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.data.tokenizer import Tokenizer
from lorafusion_jax.errors import CheckpointError, DataError, LoraFusionError
from lorafusion_jax.families.model import ModelConfig

HAVE, PREDICT = "have", "predict"
FIX = {
    HAVE: "resize the model's embeddings to its tokenizer (resize_token_embeddings of transformers, then "
    "save_pretrained), or take the token out of the rows, the chat template or tokenizer.json",
    PREDICT: "learn the answers alone (data.loss: assistant), or take the token out of the rows; a prompt may hold it",
}
LEFT_TO_TRAINING = ("model.not-found", "model.unsupported")  # planning works without the model


def read_shape(directory: Path) -> ModelConfig | None:
    """Reads the base model's shape. Returns None if the model cannot be trained; `check` and training report that.

    Raises:
        CheckpointError: `model.bad-config`.
    """
    try:
        return ModelConfig.from_hf(directory)
    except CheckpointError as problem:
        if problem.code in LEFT_TO_TRAINING:
            return None
        raise


def model_problems(
    samples: TokenizedSet, model: ModelConfig, *, tokenizer: Tokenizer, adapter: str, directory: Path, reserved: int = 0
) -> list[LoraFusionError]:
    """Finds token ids that the base model lacks, and samples longer than its positions or attention window.

    Args:
        reserved: tokens of a sample that a rollout may draw or read.
    """
    problems: list[LoraFusionError] = []
    if samples.largest_token >= model.num_outputs:  # seldom, so that most data is read once
        key, lacking = f"vocab_size is {model.vocab_size}", samples.tokens >= model.vocab_size
        of_head, unlearned = f"output_vocab_size is {model.num_outputs}", samples.tokens >= model.num_outputs
        if lacking.any():
            problems.append(_unknown_token(samples, lacking, HAVE, key, tokenizer, adapter, directory))
        elif (learned := unlearned & samples.loss_mask).any():
            problems.append(_unknown_token(samples, learned, PREDICT, of_head, tokenizer, adapter, directory))
    longest = longest_texts(samples)
    sample = f"{adapter}: row {int(samples.rows[longest.argmax()])} of {samples.report.source}"
    sample += f" with {reserved} tokens of answers" if reserved else ""
    fix = "smaller rollout.max_tokens, rollout.turns or rollout.tool_tokens" if reserved else ""
    try:
        model.check_length(int(longest.max()), where=str(directory), sample=sample, fix=fix)
    except CheckpointError as problem:
        problems.append(problem)
    return problems


def longest_texts(samples: TokenizedSet) -> np.ndarray:
    """Returns the length of the longest segment of each sample: positions start anew in every segment."""
    return samples.lengths if samples.segment_lengths is None else samples.segment_lengths.max(axis=1)


def _unknown_token(
    samples: TokenizedSet,
    is_unknown: np.ndarray,
    does_not: str,
    key: str,
    tokenizer: Tokenizer,
    adapter: str,
    directory: Path,
) -> DataError:
    places = np.flatnonzero(is_unknown)
    owners = np.searchsorted(samples.offsets, places, side="right") - 1
    token = int(samples.tokens[places[0]])
    rows = len(np.unique(owners))
    token_text = (
        f"the tokenizer gives {tokenizer.piece(token)!r} the id {token}" if tokenizer.is_there else f"one is {token}"
    )
    return DataError(
        "data.token-id",
        f"{adapter}: {rows} of {samples.report.rows} rows of {samples.report.source} hold tokens that the base model "
        f"does not {does_not}.",
        where=f"{samples.report.source}, row {int(samples.rows[owners[0]])}",
        why=f"{token_text}, but {key} in {directory / 'config.json'}",
        fix=FIX[does_not],
    )
