"""Packed keep bits of a call in one launch; plain XLA would make up to twenty small programs of it.

T packed tokens · A adapters · W words of a row
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.dropout import BLOCK, WORDS, Dropout, keep_words_at, row_state, threshold
from pallas_kernels.triton_call import call


def keep_words(
    dropout: Dropout, block_adapter: jax.Array, num_columns: int, *, block_t: int, interpret: bool = False
) -> jax.Array:
    """Returns what `dropout.keep_words` returns, bit for bit: uint32 [T, ceil(K / 256), 8].

    Args:
        block_adapter: int32 [T / block_t]; numbers without an adapter get some adapter's bits, which are not read.
    """
    num_rows, num_blocks = dropout.row_key.shape[0], -(-num_columns // BLOCK)
    num_words = num_blocks * WORDS
    columns = min(num_words & -num_words, 32)
    last = dropout.key.shape[0] - 1

    def kernel(key_ref, thresh_ref, row_key_ref, adapter_ref, out_ref):
        row0, col0 = pl.program_id(0) * block_t, pl.program_id(1) * columns
        adapter = jnp.clip(adapter_ref[pl.program_id(0)], 0, last)
        start, stride = row_state(key_ref[adapter], row_key_ref[pl.ds(row0, block_t)])
        word = (col0 + jnp.arange(columns)).astype(jnp.uint32)
        words = keep_words_at(start[:, None], stride[:, None], thresh_ref[adapter], word[None, :])
        out_ref[pl.ds(row0, block_t), pl.ds(col0, columns)] = words

    words = call(
        kernel,
        [dropout.key.astype(jnp.uint32), threshold(dropout.rate), dropout.row_key.astype(jnp.uint32), block_adapter],
        name="lora_bits",
        grid=(num_rows // block_t, num_words // columns),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_words), jnp.uint32),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )
    return words.reshape(num_rows, num_blocks, WORDS)
