"""Splits samples into training and held-out data by their content."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from lorafusion_jax.data.disk_arrays import release
from lorafusion_jax.data.join_sets import select_samples
from lorafusion_jax.data.tokenized_set import SUMMED_SAMPLES, TokenizedSet
from lorafusion_jax.errors import DataError

PROBES, PROBED_SAMPLES = 8, 1 << 16  # tokens of a sample that tell most samples apart, and samples at once
MIXER = np.uint64(0x9E3779B97F4A7C15)


def hold_out(samples: TokenizedSet, share: float, adapter: str) -> tuple[TokenizedSet, TokenizedSet]:
    """Splits samples so that no content is in both parts.

    The samples with the lowest hashes are held out. So equal samples stay together, adapters with the same tokens hold
    out the same ones, and a sample that is added to the data moves few others.

    Args:
        share: of the samples to hold out, at least one.
        adapter: for messages.

    Returns:
        (training data, held-out data), in the order of the source. Rows that were cut or dropped are reported with the
        training data.

    Raises:
        DataError: `data.eval-share`, nothing is left to train.
    """
    hashes = _hashes(samples)
    count = max(1, round(share * len(samples)))
    low = hashes <= np.sort(hashes)[count - 1]
    if low.all():
        raise DataError(
            "data.eval-share",
            f"{adapter}: data.eval={share:g} holds out all {len(samples)} samples.",
            where=samples.report.source,
            why="equal samples are held out together" if len(samples) > count else "",
            fix="more rows, a smaller share, or a file of its own: data.eval: FILE",
        )
    report = samples.report
    apart = replace(
        report, source=f"{report.source} ({100 * share:g} % held out)", cut=0, dropped=(), too_long=(), notes=()
    )
    return select_samples(samples, np.flatnonzero(~low), report), select_samples(samples, np.flatnonzero(low), apart)


def repeated_samples(held_out: TokenizedSet, train: TokenizedSet) -> np.ndarray:
    """Returns the held-out samples that are training data, too. Only samples that look alike are read in full."""
    looks, train_looks = _looks(held_out), _looks(train)
    alike = np.flatnonzero(np.isin(train_looks, looks))
    trained = {
        _hash(train, int(index))
        for start in range(0, len(alike), SUMMED_SAMPLES)
        for index in alike[start : start + SUMMED_SAMPLES]
    }
    release(train.tokens)
    release(train.loss_mask)
    likely = np.flatnonzero(np.isin(looks, train_looks[alike]))
    return likely[[_hash(held_out, int(index)) in trained for index in likely]]


def _looks(samples: TokenizedSet) -> np.ndarray:
    """Length and some tokens of each sample as one number; equal samples have equal ones."""
    looks, lengths = samples.lengths.astype(np.uint64), samples.lengths
    for start in range(0, len(samples), PROBED_SAMPLES):
        block = slice(start, start + PROBED_SAMPLES)
        for probe in range(PROBES):
            at = samples.offsets[:-1][block] + (lengths[block] - 1) * probe // (PROBES - 1)
            looks[block] = looks[block] * MIXER + samples.tokens[at].astype(np.uint64)
        release(samples.tokens)
    return looks


def _hashes(samples: TokenizedSet) -> np.ndarray:
    hashes = np.empty(len(samples), np.uint64)
    for start in range(0, len(samples), SUMMED_SAMPLES):
        end = min(start + SUMMED_SAMPLES, len(samples))
        hashes[start:end] = [_hash(samples, index) for index in range(start, end)]
        release(samples.tokens)
        release(samples.loss_mask)
    return hashes


def _hash(samples: TokenizedSet, index: int) -> int:
    tokens, loss_mask = samples.sample(index)
    content = tokens.tobytes() + np.packbits(loss_mask).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
