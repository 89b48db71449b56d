"""Kernels of checkpoints that reading widens: integers in words, and 8 bits with scales in models of experts. No jax.

    integers:   W[n, k] = scales[g, n] · (q[k, n] - zeros[g, n]),  g = g_idx[k], or k // group
    scaled:     W[n, k] = weight[n, k] · scales[n // 128, k // 128], or · scales[n]

Integers lie in words of 32 bits, the first in the lowest bits. GPTQ has q [K, N] along K and its zeros along N, and
stores zeros less one (its second version does not). AWQ has all of it along N, the eight columns of a word in the order
`_AWQ_ORDER`. pack-quantized, of compressed-tensors, has q [N, K] along K and zeros [N, G] along N, or none: then zeros
are the middle of the range.

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
        method: which tensors hold a kernel; "scaled": 8-bit numbers, one by one.
        bits: of an integer; 2, 4 or 8.
        group: in features that share a scale; 0: all do.
        added: what is added to the zeros of the file.
        symmetric: the file has no zeros.
        scales: end of the name of the scales, of "scaled".
        dtype: of the weights, of "scaled".
    """

    method: Literal["gptq", "awq", "pack-quantized", "scaled"]
    bits: int = 8
    group: int = BLOCK
    added: int = 0
    symmetric: bool = False
    scales: str = ".weight_scale_inv"
    dtype: str = "F8_E4M3"

    @property
    def mark(self) -> str:
        """End of the name of the tensor by which a packed kernel is told from a plain one."""
        return {"scaled": self.scales, "pack-quantized": ".weight_packed"}.get(self.method, ".qweight")

    @property
    def index(self) -> str:
        """End of the name of the tensor that says in which group each feature is."""
        return ".weight_g_idx" if self.method == "pack-quantized" else ".g_idx"

    def tensors(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        """The tensors of a kernel, by the end of their names."""
        k, n = in_features, out_features
        groups = -(-k // self.group) if self.group else 1
        if self.method == "scaled":
            shapes = ((blocks_of(n), blocks_of(k)),) if self.group else ((n, 1), (n,), (1,), ())
            return {
                ".weight": TensorSpec(dtypes=(self.dtype,), shapes=((n, k),)),
                self.scales: TensorSpec(dtypes=FLOATS, shapes=shapes),
                ".input_scale": TensorSpec(dtypes=FLOATS, optional=True, read=False),
            }
        if self.method == "pack-quantized":
            specs = {
                ".weight_packed": TensorSpec(dtypes=("I32",), shapes=((n, -(-k * self.bits // _WORD)),)),
                ".weight_scale": TensorSpec(dtypes=FLOATS, shapes=((n, groups),)),
                ".weight_shape": TensorSpec(dtypes=("I64", "I32"), shapes=((2,),), optional=True, read=False),
                self.index: TensorSpec(dtypes=("I32",), shapes=((k,),), optional=True),
            }
            if not self.symmetric:
                zeros = (-(-n * self.bits // _WORD), groups)
                specs[".weight_zero_point"] = TensorSpec(dtypes=("I32",), shapes=(zeros,))
            return specs
        words = n * self.bits // _WORD
        rows = (k, words) if self.method == "awq" else (k * self.bits // _WORD, n)
        specs = {
            ".qweight": TensorSpec(dtypes=("I32",), shapes=(rows,)),
            ".qzeros": TensorSpec(dtypes=("I32",), shapes=((groups, words),)),
            ".scales": TensorSpec(dtypes=FLOATS, shapes=((groups, n),)),
        }
        if self.method == "gptq":
            specs[self.index] = TensorSpec(dtypes=("I32",), shapes=((k,),), optional=True)
        return specs

    def read(self, fetch: Fetch, in_features: int, rows: slice, columns: slice, *, by_index: bool) -> np.ndarray:
        """Reads a rectangle of [N, K] in float32.

        Args:
            by_index: the checkpoint says in which group each feature is.

        Raises:
            ValueError: a feature of `g_idx` is in no group.
        """
        if self.method == "scaled":
            return self._scaled(fetch, rows, columns)
        groups = -(-in_features // self.group) if self.group else 1
        everything = slice(0, groups)
        if self.method == "pack-quantized":
            integers_kn = self._integers(fetch, ".weight_packed", rows, columns).T
            scales_gn = fetch(".weight_scale", (rows, everything)).astype(np.float32).T
            zeros_gn = np.full((groups, 1), 2 ** (self.bits - 1), np.uint8)
            if not self.symmetric:
                zeros_gn = self._integers(fetch, ".weight_zero_point", rows, everything, along_rows=True).T
        else:
            integers_kn = self._integers(fetch, ".qweight", columns, rows, along_rows=self.method == "gptq")
            scales_gn = fetch(".scales", (everything, rows)).astype(np.float32)
            zeros_gn = self._integers(fetch, ".qzeros", everything, rows) + np.uint8(self.added)
            zeros_gn &= np.uint8(2**self.bits - 1)
        of_column = np.arange(columns.start, columns.stop) // (self.group or in_features)
        if by_index:
            of_column = fetch(self.index, (columns,))
            if len(of_column) and not 0 <= of_column.min() <= of_column.max() < groups:
                raise ValueError(f"g_idx has {of_column.min()} to {of_column.max()}, and there are {groups} groups")
        kernel_kn = integers_kn.astype(np.float32)
        kernel_kn -= zeros_gn[of_column]
        kernel_kn *= scales_gn[of_column]
        return kernel_kn.T

    def _scaled(self, fetch: Fetch, rows: slice, columns: slice) -> np.ndarray:
        weight_nk = fetch(".weight", (rows, columns)).astype(np.float32)
        scales = fetch(self.scales, ()).astype(np.float32)
        if self.group:
            of_rows, of_columns = (np.arange(cut.start, cut.stop) // BLOCK for cut in (rows, columns))
            return weight_nk * scales[of_rows[:, None], of_columns]
        return weight_nk * (scales.reshape(-1)[rows] if scales.size > 1 else scales.reshape(-1))[:, None]

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
