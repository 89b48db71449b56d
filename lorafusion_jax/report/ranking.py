"""Ranks the adapters of a run that have the same held-out data, such as the members of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OUT_OF_RACE = ("failed", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Adapters in the order in which a table shows them.

    Attributes:
        order: adapters with the same held-out data stand together, the lowest loss first; failed and cancelled ones
            come after the others of their group.
        groups: of two or more adapters that can be compared, the best first.
    """

    order: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]

    @property
    def best(self) -> tuple[str, ...]:
        """The best adapter of each group."""
        return tuple(group[0] for group in self.groups)


def rank(status: Mapping[str, str], held_out_loss: Mapping[str, float | None], data: Mapping[str, object]) -> Ranking:
    """Ranks adapters by their newest held-out loss.

    Args:
        status: of each adapter, in the order of the job.
        held_out_loss: None where nothing was evaluated since training began.
        data: identity of the held-out data, such as its digest; adapters that are not in it stay where they are.

    >>> losses = {"a": 2.5, "law": 1.0, "b": 2.25, "c": 2.0}
    >>> ranking = rank(dict.fromkeys(losses, "done") | {"c": "cancelled"}, losses, dict.fromkeys("abc", "one file"))
    >>> ranking.order, ranking.best
    (('b', 'a', 'c', 'law'), ('b',))
    """
    together: dict[object, list[str]] = {}
    for name in status:
        together.setdefault(data.get(name, ("alone", name)), []).append(name)
    members = [
        sorted(names, key=lambda name: _key(status[name], held_out_loss.get(name))) for names in together.values()
    ]
    compared = [
        tuple(n for n in names if status[n] not in OUT_OF_RACE and held_out_loss.get(n) is not None)
        for names in members
    ]
    return Ranking(
        order=tuple(name for names in members for name in names),
        groups=tuple(names for names in compared if len(names) > 1),
    )


def _key(status: str, loss: float | None) -> tuple[bool, bool, float]:
    return status in OUT_OF_RACE, loss is None, 0.0 if loss is None else loss


def adapter_to_export(status: Mapping[str, str], steps: Mapping[str, int], best: Sequence[str]) -> str | None:
    """The adapter that a next command should name: the best one, else the first that trained and was not stopped."""
    trained = [name for name in (*best, *status) if steps[name]]
    return next((name for name in trained if status[name] not in OUT_OF_RACE), next(iter(trained), None))


def best_lines(groups: Sequence[Sequence[str]], held_out_loss: Mapping[str, float | None]) -> Sequence[str]:
    """A line for each of `Ranking.groups`: its best adapter, and by what."""
    losses = {name: loss for name, loss in held_out_loss.items() if loss is not None}
    lines = []
    for best, second, *others in groups:
        lines.append(
            f"best: {best}, held-out loss {losses[best]:.4f}, the lowest of {2 + len(others)} on the same data, "
            f"{losses[second] - losses[best]:.4f} below {second}"
        )
    return lines
