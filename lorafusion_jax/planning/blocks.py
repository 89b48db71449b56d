"""Number of layers per compiled program."""

from __future__ import annotations

# Stages of up to this many layers are one program, larger stages have a program per layer. Small models are bound by
# the overhead of calls, large ones by compile time (benchmarks/LOG.md).
MOST_TOGETHER = 8
GATHERED_TOGETHER = 4  # with fsdp: within a program, gathering the next layer's weights overlaps with compute


def block_layers(wanted: int | None, num_layers: int, *, fsdp: int = 1) -> int:
    """Returns the number of layers per program.

    Args:
        wanted: setting of the job (None: choose).
        num_layers: layers of the stage.

    >>> block_layers(None, 4), block_layers(None, 32), block_layers(2, 32), block_layers(None, 32, fsdp=2)
    (4, 1, 2, 4)
    """
    if wanted is not None:
        return min(wanted, num_layers)
    if num_layers <= MOST_TOGETHER:
        return num_layers
    return 1 if fsdp == 1 else GATHERED_TOGETHER
