"""Number of layers per compiled program."""

from __future__ import annotations

# Stages of up to this many small layers are one program, others have a program per layer. Small models are bound by the
# overhead of calls, large ones by compile time: eight layers of an 8B model compile for a minute.
MOST_TOGETHER = 8
LARGE = 2**25  # parameters of a layer that computes far longer than its call takes
GATHERED_TOGETHER = 4  # with fsdp: within a program, gathering the next layer's weights overlaps with compute


def block_layers(wanted: int | None, num_layers: int, *, fsdp: int = 1, parameters: int = 0) -> int:
    """Returns the number of layers per program.

    Args:
        wanted: setting of the job (None: choose).
        num_layers: layers of the stage.
        parameters: of a layer. Where devices share a base, the choice does not depend on it.

    >>> block_layers(None, 4), block_layers(None, 32), block_layers(2, 32), block_layers(None, 32, fsdp=2)
    (4, 1, 2, 4)
    >>> block_layers(None, 8, parameters=200_000_000)
    1
    """
    if wanted is not None:
        return min(wanted, num_layers)
    if num_layers <= MOST_TOGETHER and (fsdp > 1 or parameters < LARGE):
        return num_layers
    return 1 if fsdp == 1 else GATHERED_TOGETHER
