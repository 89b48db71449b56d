"""Number of rows per chunk of logits. Planning needs it without jax."""

from __future__ import annotations

DEFAULT_CHUNK = 16384
_ROWS = 128  # chunks are multiples of this where the microbatch is large enough


def chunk_rows(num_rows: int, vocab_size: int, chunk: int) -> int:
    """Rows whose logits exist at once: at most an eighth of the microbatch, so that chunks can be skipped."""
    fitting = min(num_rows * chunk // vocab_size, num_rows // 8)
    return min(max(fitting // _ROWS * _ROWS, _ROWS), num_rows)
