"""How many layers of a stage one compiled program runs."""

from __future__ import annotations

# Up to this many layers of a stage are one program; more are a program per layer. Small models are bound by calls,
# large ones by compiling: 32 layers of an 8B model compile for 4 to 6 minutes as one program (benchmarks/LOG.md).
MOST_TOGETHER = 8
GATHERED_TOGETHER = 4  # with fsdp: the next layer's weights come in while this one computes, inside a program only


def block_layers(wanted: int | None, num_layers: int, *, fsdp: int = 1) -> int:
    """Layers per program.

    Args:
        wanted: by the job; None: chosen.
        num_layers: of the stage.

    >>> block_layers(None, 4), block_layers(None, 32), block_layers(2, 32), block_layers(None, 32, fsdp=2)
    (4, 1, 2, 4)
    """
    if wanted is not None:
        return min(wanted, num_layers)
    if num_layers <= MOST_TOGETHER:
        return num_layers
    return 1 if fsdp == 1 else GATHERED_TOGETHER
