"""How many rows' logits exist at once; apart from the loss, because planning needs it and no jax."""

from __future__ import annotations

DEFAULT_CHUNK = 16384
_ROWS = 128  # chunks are multiples of this where the microbatch is large enough


def chunk_rows(num_rows: int, vocab_size: int, chunk: int) -> int:
    """Rows whose logits are held at once: as many as fit, but an eighth of the microbatch at most, so that there is
    something to skip."""
    fitting = min(num_rows * chunk // vocab_size, num_rows // 8)
    return min(max(fitting // _ROWS * _ROWS, _ROWS), num_rows)
