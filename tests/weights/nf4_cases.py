"""Matrices [N, K] on which NF4 is compared with bitsandbytes; no torch here."""

from __future__ import annotations

import numpy as np


def cases() -> dict[str, np.ndarray]:
    """More than one group of 256 blocks; rows that blocks straddle, with a last block that is not full; odd blocks."""
    rng = np.random.default_rng(7)
    normal = (rng.standard_normal((160, 128)) * 0.02).astype(np.float32)
    straddling = (rng.standard_t(3, (33, 52)) * 0.1).astype(np.float32)
    odd = (rng.standard_normal((8, 64)) * 0.02).astype(np.float32)
    odd[0] = 0  # nothing to scale by
    odd[1, 5] = -40.0  # an outlier that flattens its block
    odd[2] = 1e-30
    return {"normal": normal, "straddling": straddling, "odd": odd}
