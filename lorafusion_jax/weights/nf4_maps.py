"""The numbers that NF4's codes stand for. No jax.

NF4 is from QLoRA (Dettmers et al. 2023, arXiv:2305.14314, appendix E), the dynamic map from 8-bit optimizers (Dettmers
et al. 2022, arXiv:2110.02861): both as bitsandbytes stores them, bit for bit.
"""

from __future__ import annotations

import numpy as np

# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero.
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
_DECADES = 7


def dynamic_map() -> np.ndarray:
    """256 numbers from -0.993 to 1: seven decades, each with twice as many steps as the one below; 0 and 1 besides."""
    positive = []
    for decade in range(_DECADES):
        edges = _spread(2**decade)
        middles = (edges[:-1] + edges[1:]) / np.float32(2)
        positive.append(np.float32(10.0 ** (decade + 1 - _DECADES)) * middles)
    positive = np.concatenate(positive)
    return np.sort(np.concatenate([-positive, positive, np.array([0, 1], np.float32)])).astype(np.float32)


def _spread(steps: int) -> np.ndarray:
    """0.1 to 1 in equal steps of float32, each half counted from its own end and rounded once: the map's last bits."""
    first, last = np.float32(0.1), np.float32(1)
    step = np.float64((last - first) / np.float32(steps))
    number = np.arange(steps + 1)
    rising = number < (steps + 1) // 2
    return np.where(rising, first + step * number, last - step * (steps - number)).astype(np.float32)


DYNAMIC = dynamic_map()


def borders(values: np.ndarray) -> np.ndarray:
    """Between neighbours: what lies above is nearer to the upper one."""
    return (values[:-1] + values[1:]) / np.float32(2)
