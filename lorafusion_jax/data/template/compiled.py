"""Compiles and renders the source of a chat template, with errors of one type."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import Template, TemplateError

from lorafusion_jax.data.template.budget import LimitError
from lorafusion_jax.data.template.sandbox import Sandbox

BRACKETS = re.compile(r"[()\[\]{}]")
DEEPEST = 1000  # brackets; real templates nest a few dozen
# exceptions that template code can raise
PROBLEMS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    NameError,  # a number without end is compiled to the name inf
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)


class TemplateProblem(ValueError):
    """The template cannot render these messages, or the answers cannot be found."""


class TemplateLimit(TemplateProblem):
    """The template exceeds its budget of time or memory."""


def render(source: str, values: dict[str, Any], marked: Sequence[dict] | None = None) -> str:
    """Renders a template; see `Sandbox.render`.

    Raises:
        TemplateProblem: the template rejects the values or fails.
        TemplateLimit: it exceeds its budget.
    """
    try:
        sandbox, template, *_ = compile_template(source)
        return sandbox.render(template, values, marked)
    except LimitError as problem:
        raise TemplateLimit(f"the template says: {problem}") from None
    except PROBLEMS as problem:
        raise TemplateProblem(f"the template says: {problem}") from None


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> tuple[Sandbox, Template, bool, bool, bool]:
    """Compiles a template. Returns it with its sandbox, and what `Sandbox.compiled` says of it.

    Raises:
        SyntaxError, jinja2.TemplateSyntaxError, and `PROBLEMS`.
    """
    if (deepest := _bracket_depth(source)) > DEEPEST:
        raise SyntaxError(f"brackets are nested {deepest} deep")  # before the parser runs out of stack
    sandbox = Sandbox()
    return sandbox, *sandbox.compiled(source)


def _bracket_depth(source: str) -> int:
    """Returns the deepest nesting of brackets; brackets in plain text count, too."""
    deepest = depth = 0
    for bracket in BRACKETS.findall(source):
        depth = depth + 1 if bracket in "([{" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest
