"""Chooses the next token of every sequence. Dims: `B` sequences · `V` vocabulary"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from lorafusion_jax.generation.sampling import MODES

GREEDY, SAMPLED, FILTERED = MODES
NOT_FINITE = -1  # in place of a token, where the logits are not numbers


class Choices(NamedTuple):
    """Settings of the sequences, see `Sampling`."""

    temperature_B: Float[Array, " B"] | np.ndarray
    top_k_B: Int[Array, " B"] | np.ndarray
    top_p_B: Float[Array, " B"] | np.ndarray
    seed_B: UInt32[Array, " B"] | np.ndarray


class Chosen(NamedTuple):
    """The newest tokens of the sequences.

    Attributes:
        logprobs_B: log p of the tokens under the model's distribution, without temperature, top k and top p.
    """

    tokens_B: Int[Array, " B"] | np.ndarray
    logprobs_B: Float[Array, " B"] | np.ndarray


def token_logprobs(logits_BV: Float[Array, "B V"], tokens_B: Int[Array, " B"]) -> Float[Array, " B"]:
    """Returns z_token - log Σ exp z."""
    z_B = jnp.take_along_axis(logits_BV, jnp.maximum(tokens_B, 0)[:, None], -1)[:, 0]
    return z_B - jax.nn.logsumexp(logits_BV, -1)


def choose_tokens(
    logits_BV: Float[Array, "B V"], choices: Choices, number_B: Int[Array, " B"], *, mode: str
) -> Int[Array, " B"]:
    """Returns the next tokens: argmax z where the temperature is 0, else argmax (z / temperature + Gumbel noise).

    Args:
        logits_BV: z, float32.
        number_B: tokens that each sequence has generated; noise is a function of (seed, number, token).
        mode: of `Sampling`: one that serves all sequences.
    """
    greedy_B = jnp.argmax(logits_BV, -1)
    chosen_B = greedy_B
    if mode != GREEDY:
        is_greedy_B = choices.temperature_B == 0
        z_BV = logits_BV / jnp.where(is_greedy_B, 1.0, jnp.asarray(choices.temperature_B))[:, None]
        z_BV = (
            z_BV if mode == SAMPLED else keep_likely(z_BV, jnp.asarray(choices.top_k_B), jnp.asarray(choices.top_p_B))
        )
        drawn_B = jnp.argmax(z_BV + _noise(jnp.asarray(choices.seed_B), number_B, z_BV.shape[1]), -1)
        chosen_B = jnp.where(is_greedy_B, greedy_B, drawn_B)
    finite_B = jnp.isfinite(logits_BV).all(-1)
    return jnp.where(finite_B, chosen_B, NOT_FINITE).astype(jnp.int32)


def keep_likely(
    z_BV: Float[Array, "B V"], top_k_B: Int[Array, " B"], top_p_B: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Sets logits to minus infinity outside of the top k, then outside of the top p of what is left.

    Tokens of equal logits stay or go together.
    """
    V = z_BV.shape[1]
    sorted_BV = -jnp.sort(-z_BV, -1)
    last_B = jnp.where(top_k_B > 0, jnp.minimum(top_k_B, V), V) - 1
    floor_B1 = jnp.take_along_axis(sorted_BV, last_B[:, None], -1)
    p_BV = jax.nn.softmax(jnp.where(sorted_BV >= floor_B1, sorted_BV, -jnp.inf), -1)
    before_BV = jnp.cumsum(p_BV, -1) - p_BV
    kept_BV = (p_BV > 0) & ((before_BV < top_p_B[:, None]) | (top_p_B >= 1)[:, None])
    least_B1 = jnp.where(kept_BV, sorted_BV, jnp.inf).min(-1, keepdims=True)
    return jnp.where((z_BV >= least_B1) & (z_BV >= floor_B1), z_BV, -jnp.inf)


def _noise(seed_B: jax.Array, number_B: jax.Array, size: int) -> jax.Array:
    def noise(seed: jax.Array, number: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), number), (size,))

    return jax.vmap(noise)(seed_B, number_B)
