"""The error of this package: what is wrong, where, why, and how to fix it."""

from __future__ import annotations


class PlanError(ValueError):
    """The jobs cannot be planned, or a plan breaks a rule.

    Args:
        code: stable, searchable name, `plan.problem`.
        what: one sentence. It names adapter, sample index and length where they apply.
        where: file, field, adapter or slot.
        why: the cause, if known.
        fix: what to change.
        problems: every problem, when there are several.
    """

    def __init__(
        self, code: str, what: str, *, where: str = "", why: str = "", fix: str = "", problems: tuple[str, ...] = ()
    ):
        self.code, self.what, self.where, self.why, self.fix = code, what, where, why, fix
        self.problems = problems
        super().__init__(str(self))

    def __reduce__(self):
        return _rebuild, (self.code, self.what, self.where, self.why, self.fix, self.problems)

    def __str__(self) -> str:
        lines = [f"error[{self.code}] {self.what}"]
        lines += [f"  where: {self.where}"] if self.where else []
        lines += [f"  because {self.why}"] if self.why else []
        lines += [f"  - {problem}" for problem in self.problems[:_SHOWN]]
        lines += [f"  … and {len(self.problems) - _SHOWN} more"] if len(self.problems) > _SHOWN else []
        lines += [f"  fix: {self.fix}"] if self.fix else []
        return "\n".join(lines)


_SHOWN = 20  # a broken plan of a million samples must not print a million lines


def _rebuild(code: str, what: str, where: str, why: str, fix: str, problems: tuple[str, ...]) -> PlanError:
    return PlanError(code, what, where=where, why=why, fix=fix, problems=problems)
