"""Rotary position embeddings: which channels rotate, and how fast. `models.rope` computes the tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of the rotary frequencies for long contexts; see `models.rope.inverse_frequencies`.

    Args:
        factor: by which the context grows; unused by longrope.
        low_freq_factor, high_freq_factor: of llama3.
        original_max_positions: context before scaling, of llama3, yarn and longrope.
        beta_fast, beta_slow, truncate: of yarn: turns in the original context between which frequencies blend, and
            whether the blend begins and ends at whole channels.
        attention_factor: of yarn and longrope, a factor of cosines and sines.
        short_factors, long_factors: of longrope, divisors per pair of channels for samples up to the original context
            and for longer ones.
    """

    kind: RopeKind
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embeddings of a layer's queries and keys.

    Args:
        theta: base of the frequencies.
        scaling: for long contexts (None: as trained at first).
        channels: channels of a head that rotate, the first ones; even (None: all).
        share: of the pairs of these channels that turn; the frequencies of the others are 0. 0: none turns, and only
            queries are scaled.
        interleaved: the two channels of a rotating pair are neighbours, as in GPT-J and GLM-4; else channel i turns
            with channel i + C/2.
        query_beta, query_context, query_offset: queries at position p are multiplied by
            1 + beta · log(1 + ⌊(p + offset) / context⌋).
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    channels: int | None = None
    share: float = 1.0
    interleaved: bool = False
    query_beta: float = 0.0
    query_context: int = 1
    query_offset: int = 0
