"""Kernels of checkpoints that reading widens: GPTQ and AWQ, and models of experts in FP8 blocks. No jax.

    GPTQ, AWQ:  W[n, k] = scales[g, n] · (q[k, n] - zeros[g, n]),  g = g_idx[k], or k // group
    FP8:        W[n, k] = weight[n, k] · weight_scale_inv[n // 128, k // 128]

Integers lie in words of 32 bits, the first in the lowest bits: GPTQ's q along K, its zeros and all of AWQ along N. GPTQ
stores zeros less one (its second version does not), and AWQ orders the eight columns of a word by `_AWQ_ORDER`.

Axes: `K` in features · `N` out features · `G` groups of K
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lorafusion_jax.weights.checkpoint_formats import FLOATS, TensorSpec
from lorafusion_jax.weights.fp8_blocks import BLOCK, blocks_of

Fetch = Callable[[str, tuple[slice, ...]], np.ndarray]  # (end of a tensor's name, rectangle) → its values
_WORD = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of a word's first, second, … four bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """How the kernels of a checkpoint are packed.

    Args:
        bits: of an integer; 2, 4 or 8.
        group: in features that share a scale; 0: all do.
        added: what is added to the zeros of the file.
    """

    method: Literal["gptq", "awq", "fp8"]
    bits: int = 8
    group: int = BLOCK
    added: int = 0

    @property
    def mark(self) -> str:
        """End of the name of the tensor by which a packed kernel is told from a plain one."""
        return ".weight_scale_inv" if self.method == "fp8" else ".qweight"

    def tensors(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        """The tensors of a kernel, by the end of their names."""
        k, n = in_features, out_features
        if self.method == "fp8":
            scales = TensorSpec(dtypes=FLOATS, shapes=((blocks_of(n), blocks_of(k)),))
            return {".weight": TensorSpec(dtypes=("F8_E4M3",), shapes=((n, k),)), ".weight_scale_inv": scales}
        groups, words = -(-k // self.group) if self.group else 1, n * self.bits // _WORD
        rows = (k, words) if self.method == "awq" else (k * self.bits // _WORD, n)
        specs = {
            ".qweight": TensorSpec(dtypes=("I32",), shapes=(rows,)),
            ".qzeros": TensorSpec(dtypes=("I32",), shapes=((groups, words),)),
            ".scales": TensorSpec(dtypes=FLOATS, shapes=((groups, n),)),
        }
        if self.method == "gptq":
            specs[".g_idx"] = TensorSpec(dtypes=("I32",), shapes=((k,),), optional=True)
        return specs

    def read(self, fetch: Fetch, in_features: int, rows: slice, columns: slice, *, by_index: bool) -> np.ndarray:
        """Reads a rectangle of [N, K] in float32.

        Args:
            by_index: the checkpoint has a `g_idx`.

        Raises:
            ValueError: a feature of `g_idx` is in no group.
        """
        if self.method == "fp8":
            weight_nk, scales = fetch(".weight", (rows, columns)).astype(np.float32), fetch(".weight_scale_inv", ())
            of_rows, of_columns = (np.arange(cut.start, cut.stop) // BLOCK for cut in (rows, columns))
            weight_nk *= scales.astype(np.float32)[of_rows[:, None], of_columns]
            return weight_nk
        integers_kn = self._integers(fetch, ".qweight", columns, rows, along_rows=self.method == "gptq")
        groups = -(-in_features // self.group) if self.group else 1
        everything = slice(0, groups)
        scales_gn = fetch(".scales", (everything, rows)).astype(np.float32)
        zeros_gn = self._integers(fetch, ".qzeros", everything, rows) + np.uint8(self.added)
        zeros_gn &= np.uint8(2**self.bits - 1)
        of_column = np.arange(columns.start, columns.stop) // (self.group or in_features)
        if by_index:
            of_column = fetch(".g_idx", (columns,))
            if len(of_column) and not 0 <= of_column.min() <= of_column.max() < groups:
                raise ValueError(f"g_idx has {of_column.min()} to {of_column.max()}, and there are {groups} groups")
        kernel_kn = integers_kn.astype(np.float32)
        kernel_kn -= zeros_gn[of_column]
        kernel_kn *= scales_gn[of_column]
        return kernel_kn.T

    def _integers(
        self, fetch: Fetch, ending: str, rows: slice, columns: slice, *, along_rows: bool = False
    ) -> np.ndarray:
        """Unpacks a rectangle of integers; their words lie along its rows or its columns."""
        per_word = _WORD // self.bits
        packed = rows if along_rows else columns
        first = packed.start // per_word
        words_of = slice(first, -(-packed.stop // per_word))
        words = fetch(ending, (words_of, columns) if along_rows else (rows, words_of)).view(np.uint32)
        words = words if along_rows else words.T
        integers = np.empty((len(words) * per_word, words.shape[1]), np.uint8)
        for number in range(per_word):
            column = _AWQ_ORDER[number] if self.method == "awq" else number
            integers[column::per_word] = words >> np.uint32(number * self.bits) & np.uint32(2**self.bits - 1)
        integers = integers[packed.start - first * per_word :][: packed.stop - packed.start]
        return integers if along_rows else integers.T
