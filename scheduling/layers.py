"""How many layers each stage of a pipeline gets."""

from __future__ import annotations


def deal_layers(
    num_layers: int, num_stages: int, *, layer: float, embed: float = 0.0, head: float = 0.0
) -> tuple[int, ...]:
    """Assigns whole layers one by one, each to the stage that costs least with it.

    cost(s) = layer · layers(s) + embed on the first + head on the last;  layers(s) ≥ 1

    As all layers cost the same, this is optimal: no layout has a faster slowest stage or, given that, a faster second
    slowest stage. Ties go to the later stage, because earlier stages hold more microbatches in flight.

    >>> deal_layers(32, 4, layer=1.0, head=2.4)
    (8, 9, 9, 6)
    """
    ends = [0.0] * num_stages
    ends[0] += embed
    ends[-1] += head
    counts = [1] * num_stages
    for _ in range(num_layers - num_stages):
        counts[min(range(num_stages), key=lambda stage: (ends[stage] + layer * (counts[stage] + 1), -stage))] += 1
    return tuple(counts)
