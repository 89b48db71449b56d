"""Counts when two stages have nothing to do, from the order of their passes alone."""

from __future__ import annotations


def idle_share(orders, latency):
    """Counts the units in which a stage has no pass, between its first backward and its last forward.

    Every pass takes one unit, and a message between the two stages `latency` units.
    """
    ends, position, idle, steady, now = {}, [0, 0], 0, 0, 0
    kinds = [[kind for kind, _ in order] for order in orders]
    first = [of.index("backward") for of in kinds]
    last = [len(of) - 1 - of[::-1].index("forward") for of in kinds]

    def ready(stage, kind, slot):
        if (stage, kind) == (0, "forward"):
            return True
        turns = (stage, kind) == (1, "backward")
        source = (1, "forward", slot) if turns else (1 - stage, kind, slot)
        return source in ends and ends[source] + (0 if turns else latency) <= now

    while any(at < len(order) for at, order in zip(position, orders, strict=True)):
        running = []
        for stage in (0, 1):
            at = position[stage]
            runs = at < len(orders[stage]) and ready(stage, *orders[stage][at])
            inside = first[stage] < at <= last[stage] or (at == first[stage] and runs)
            idle, steady = idle + (inside and not runs), steady + inside
            running += [stage] * runs
        now += 1
        for stage in running:
            ends[stage, *orders[stage][position[stage]]] = now
            position[stage] += 1
    return idle / steady
