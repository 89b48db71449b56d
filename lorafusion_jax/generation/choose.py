"""Chooses the next token of every sequence. Dims: `B` sequences · `V` vocabulary · `E` entries · `k` listed tokens"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from lorafusion_jax.generation.sampling import MODES

GREEDY, SAMPLED, FILTERED = MODES
NOT_FINITE = -1  # in place of a token, where the logits are not numbers


class Choices(NamedTuple):
    """Settings of the sequences, see `Sampling`.

    Attributes:
        seed_B2: the upper and the lower 32 bits.
    """

    temperature_B: Float[Array, " B"] | np.ndarray
    top_k_B: Int[Array, " B"] | np.ndarray
    top_p_B: Float[Array, " B"] | np.ndarray
    min_p_B: Float[Array, " B"] | np.ndarray
    seed_B2: UInt32[Array, "B 2"] | np.ndarray


class Edits(NamedTuple):
    """What changes logits before the temperature, see `Sampling`. Entries of -1 are none.

    Attributes:
        penalty_B: of repetition, 1 for none.
        seen_BV: tokens that prompt and answer have.
        only_B: whether a sequence has allowed tokens.
        allowed_BE: these.
        biased_BE, bias_BE: tokens with a bias, and it.
    """

    penalty_B: Float[Array, " B"] | np.ndarray
    seen_BV: Bool[Array, "B V"]
    only_B: Bool[Array, " B"] | np.ndarray
    allowed_BE: Int[Array, "B E"] | np.ndarray
    biased_BE: Int[Array, "B E"] | np.ndarray
    bias_BE: Float[Array, "B E"] | np.ndarray


class Listed(NamedTuple):
    """The most probable tokens, and their log p."""

    tokens_Bk: Int[Array, "B k"] | np.ndarray
    logprobs_Bk: Float[Array, "B k"] | np.ndarray


class Chosen(NamedTuple):
    """The newest tokens of the sequences.

    Attributes:
        logprobs_B: log p of the tokens under the model's distribution: without edits, temperature and filters.
        listed: the most probable tokens under it (None: nobody asks).
    """

    tokens_B: Int[Array, " B"] | np.ndarray
    logprobs_B: Float[Array, " B"] | np.ndarray
    listed: Listed | None = None


def token_logprobs(logits_BV: Float[Array, "B V"], tokens_B: Int[Array, " B"]) -> Float[Array, " B"]:
    """Returns z_token - log Σ exp z."""
    z_B = jnp.take_along_axis(logits_BV, jnp.maximum(tokens_B, 0)[:, None], -1)[:, 0]
    return z_B - jax.nn.logsumexp(logits_BV, -1)


def list_likely(logits_BV: Float[Array, "B V"], count: int) -> Listed:
    """Returns the most probable tokens; of equal ones the first."""
    z_Bk, tokens_Bk = jax.lax.top_k(logits_BV, count)
    return Listed(tokens_Bk.astype(jnp.int32), z_Bk - jax.nn.logsumexp(logits_BV, -1, keepdims=True))


def edit(logits_BV: Float[Array, "B V"], edits: Edits) -> Float[Array, "B V"]:
    """Applies penalty, bias and allowed tokens."""
    V, row_B1 = logits_BV.shape[1], jnp.arange(len(logits_BV))[:, None]
    penalty_B1 = jnp.asarray(edits.penalty_B)[:, None]
    penalised_BV = jnp.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    logits_BV = jnp.where(edits.seen_BV, penalised_BV, logits_BV)
    biased_BE, allowed_BE = (jnp.where(ids >= 0, ids, V) for ids in map(jnp.asarray, (edits[4], edits[3])))
    logits_BV = logits_BV.at[row_B1, biased_BE].add(edits.bias_BE, mode="drop")
    mask_BV = jnp.broadcast_to(jnp.where(jnp.asarray(edits.only_B), -jnp.inf, 0.0)[:, None], logits_BV.shape)
    return logits_BV + mask_BV.at[row_B1, allowed_BE].set(0.0, mode="drop")


def seen_tokens(tokens_BL: Int[Array, "B L"], vocabulary: int) -> Bool[Array, "B V"]:
    """Marks tokens; those of -1 are none."""
    tokens_BL = jnp.where(tokens_BL >= 0, tokens_BL, vocabulary)
    row_B1 = jnp.arange(len(tokens_BL))[:, None]
    return jnp.zeros((len(tokens_BL), vocabulary), bool).at[row_B1, tokens_BL].set(True, mode="drop")


def choose_tokens(
    logits_BV: Float[Array, "B V"], choices: Choices, number_B: Int[Array, " B"], *, mode: str
) -> Int[Array, " B"]:
    """Returns the next tokens: argmax z where the temperature is 0, else argmax (z / temperature + Gumbel noise).

    Args:
        logits_BV: z, float32, after edits.
        number_B: tokens that each sequence has generated; noise is a function of (seed, number, token).
        mode: of `Sampling`: one that serves all sequences.
    """
    greedy_B = jnp.argmax(logits_BV, -1)
    token_B = greedy_B
    if mode != GREEDY:
        is_greedy_B = jnp.asarray(choices.temperature_B) == 0
        z_BV = logits_BV / jnp.where(is_greedy_B, 1.0, jnp.asarray(choices.temperature_B))[:, None]
        if mode == FILTERED:
            z_BV = keep_likely(z_BV, *map(jnp.asarray, choices[1:4]))
        sample_B = jnp.argmax(z_BV + _noise(jnp.asarray(choices.seed_B2), number_B, z_BV.shape[1]), -1)
        token_B = jnp.where(is_greedy_B, greedy_B, sample_B)
    return token_B.astype(jnp.int32)


def keep_likely(
    z_BV: Float[Array, "B V"], top_k_B: Int[Array, " B"], top_p_B: Float[Array, " B"], min_p_B: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Sets logits to minus infinity outside of the top k, then outside of the top p of what is left, then below min p.

    Tokens of equal logits stay or go together.
    """
    V = z_BV.shape[1]
    sorted_BV = -jnp.sort(-z_BV, -1)
    last_B = jnp.where(top_k_B > 0, jnp.minimum(top_k_B, V), V) - 1
    floor_B1 = jnp.take_along_axis(sorted_BV, last_B[:, None], -1)
    p_BV = jax.nn.softmax(jnp.where(sorted_BV >= floor_B1, sorted_BV, -jnp.inf), -1)
    before_BV = jnp.cumsum(p_BV, -1) - p_BV
    likely_BV = (p_BV > 0) & ((before_BV < top_p_B[:, None]) | (top_p_B >= 1)[:, None])
    least_B1 = jnp.where(likely_BV, sorted_BV, jnp.inf).min(-1, keepdims=True)
    least_B1 = jnp.maximum(least_B1, sorted_BV[:, :1] + jnp.log(min_p_B)[:, None])
    return jnp.where((z_BV >= least_B1) & (z_BV >= floor_B1), z_BV, -jnp.inf)


def _noise(seed_B2: jax.Array, number_B: jax.Array, size: int) -> jax.Array:
    def noise(seed: jax.Array, number: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, number), (size,))

    return jax.vmap(noise)(seed_B2, number_B)
