"""Writes golden/nf4.npz: what bitsandbytes stores for a few matrices, and the values that it reads back.

python -m venv /tmp/bnb && /tmp/bnb/bin/pip install torch==2.13.0 bitsandbytes==0.50.2 numpy
/tmp/bnb/bin/python tests/weights/make_nf4_golden.py
"""

from __future__ import annotations

from pathlib import Path

import bitsandbytes.functional as bnb
import numpy as np
import torch
from nf4_cases import cases

FILE = Path(__file__).parent / "golden" / "nf4.npz"


def stored(w_NK: np.ndarray) -> dict[str, np.ndarray]:
    packed, state = bnb.quantize_4bit(torch.from_numpy(w_NK), blocksize=64, quant_type="nf4", compress_statistics=True)
    assert state.state2.blocksize == 256
    return {
        "packed": packed.numpy().reshape(-1),
        "absmax": state.absmax.numpy(),
        "group_absmax": state.state2.absmax.numpy(),
        "offset": state.offset.numpy().reshape(1),
        "float32": bnb.dequantize_4bit(packed, state).numpy(),
        "nf4_map": state.code.numpy(),
        "dynamic_map": state.state2.code.numpy(),
    }


if __name__ == "__main__":
    arrays = {f"{name}/{key}": array for name, w in cases().items() for key, array in stored(w).items()}
    np.savez_compressed(FILE, **arrays)
    print(f"{FILE}: {FILE.stat().st_size} bytes")
