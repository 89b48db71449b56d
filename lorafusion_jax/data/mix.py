"""Epochs of data from several sources with weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Draws the samples of each epoch.

    A part with n samples and weight w has round(w n) samples in an epoch, at least one: each of them floor(w) times,
    and the rest in turn, so that all are seen equally often over the epochs.

    Attributes:
        parts: part of each sample, int [n] (None: there is one).
        weights: of each part.

    >>> mix = Mix(parts=np.array([0, 0, 0, 0, 1, 1]), num_samples=6, weights=(0.5, 2.0), seed=0)
    >>> mix.epoch_samples, sorted(np.concatenate([mix.epoch(0), mix.epoch(1)]).tolist())
    (6, [0, 1, 2, 3, 4, 4, 4, 4, 5, 5, 5, 5])
    """

    parts: np.ndarray | None
    num_samples: int
    weights: Sequence[float]
    seed: int

    @property
    def epoch_samples(self) -> int:
        """Number of samples of an epoch."""
        return sum(len(members) * repeats + extra for members, repeats, extra in self._shares())

    def epoch(self, epoch: int) -> np.ndarray:
        """Returns the samples of an epoch in a random order, which depends on seed and epoch only."""
        samples = []
        for part, (members, repeats, extra) in enumerate(self._shares()):
            samples += [members] * repeats
            if extra:
                turn = np.random.default_rng((self.seed, part, len(members))).permutation(members)
                samples.append(np.sort(turn[(epoch * extra + np.arange(extra)) % len(members)]))
        return np.random.default_rng((self.seed, epoch)).permutation(np.concatenate(samples))

    def repeats(self, order: np.ndarray) -> np.ndarray | None:
        """How often the sample at each position occurred before; None if that is the number of the epoch."""
        if all(weight == 1 for weight in self.weights):
            return None
        return repeats_in(order)

    def _shares(self) -> list[tuple[np.ndarray, int, int]]:
        """(samples, times that each occurs, number of those that occur once more) of each part."""
        shares = []
        for part, weight in enumerate(self.weights):
            members = np.arange(self.num_samples) if self.parts is None else np.flatnonzero(self.parts == part)
            if len(members):
                occurrences = max(1, round(weight * len(members)))
                shares.append((members, *divmod(occurrences, len(members))))
        return shares


def repeats_in(order: np.ndarray) -> np.ndarray:
    """How often the sample at each position occurred before.

    >>> repeats_in(np.array([4, 2, 4, 4])).tolist()
    [0, 0, 1, 2]
    """
    by_sample = np.argsort(order, kind="stable")
    begins = np.flatnonzero(np.diff(order[by_sample], prepend=-1))
    counts = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
    repeats = np.empty(len(order), np.int32)
    repeats[by_sample] = counts
    return repeats
