"""Runs untrusted chat templates: without access to Python, in bounded time and memory, with marks in the output.

Templates run in jinja2's immutable sandbox. Every loop, call and operator is charged to the budget of the render before
it runs, so an endless template raises an error instead of hanging.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from lorafusion_jax.data.template.budget import (
    CHARACTERS,
    LARGEST_ARGUMENT,
    STEPS,
    Budget,
    LimitError,
    check_number,
    check_widths,
)
from lorafusion_jax.data.template.hooks import RESERVED, Hooks, Instrument, RenderState
from lorafusion_jax.data.template.opaque import ON_TYPE, Inspected, Opaque, check_filter, holds_hidden

# Some templates print the date. Their clock is fixed, so that a plan has the same tokens on every day.
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)
# No chat template needs these filters. Each expands short texts to long ones, or differs from run to run.
REMOVED_FILTERS = ("random", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr")


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with limits and with Hugging Face's helpers for chat templates."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self):
        self.state = RenderState()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimizer computes constants at compile time, where no limit applies
            finalize=self._charged,
            extensions=[Hooks, loopcontrols],
        )
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        self.filters = {name: self._charge_calls(name, function) for name, function in self.filters.items()}
        for name in ("iterable", "sequence"):
            self.tests[name] = _true_of_texts(self.tests[name])
        self.tests |= {name: self._hide_from(test) for name, test in self.tests.items() if name not in ON_TYPE}
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=_raise_exception, strftime_now=TEMPLATE_DATE.strftime)

    def compiled(self, source: str) -> tuple[Template, bool, bool, bool]:
        """Compiles a template.

        Also returns whether it has generation blocks, whether it may read its output, and `looks_into_texts`.
        """
        self.state.budget = Budget()
        tree = self.parse(source)
        hooks = self.extensions[Hooks.identifier]
        marks = any(
            isinstance(call.node, nodes.ExtensionAttribute) and call.node.name == "generation"
            for call in tree.find_all(nodes.Call)
        )
        reads, looks = _may_read_output(tree), looks_into_texts(tree)
        tree = Instrument(hooks).visit(tree).set_environment(self)
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None)), marks, reads, looks

    def render(self, template: Template, values: dict[str, Any], marked: Sequence[dict] | None = None) -> str:
        """Renders a compiled template.

        Args:
            marked: messages to mark in the text (None: no marks).
        """
        budget = Budget()
        budget.value([values.get("messages"), values.get("tools")])
        num_characters = CHARACTERS - budget.characters
        self.state.budget = Budget(num_characters)
        self.state.hides = holds_hidden(values.get("messages"))
        self.state.turns = None if marked is None else {id(message): turn for turn, message in enumerate(marked)}
        self.state.loops = []
        return template.render(values)

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        budget = self.state.budget
        budget.step()
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" or (operator == "*" and numbers):
            check_number(operator, left, right)
        elif operator == "*":
            many, size = (left, right) if isinstance(left, int) else (right, left)
            budget.write(many * len(size) if isinstance(many, int) and isinstance(size, Sized) else 0)
        elif operator == "%" and isinstance(left, str):
            check_widths(left)
        elif isinstance(left, str) and isinstance(right, str):
            budget.write(str.__len__(left) + str.__len__(right))
        result = super().call_binop(context, operator, left, right)
        if not isinstance(result, str | int | float):
            budget.value(result)
        return result

    def call(self, context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, Hooks):
            return obj(*args, **{key: value for key, value in kwargs.items() if key == "caller"})
        if obj not in (Namespace, dict):
            self._check_hidden(args, kwargs)
        self.state.budget.step()
        if isinstance(owner, str | bytes):
            self._check_arguments(obj.__name__, (owner, *args), kwargs, method=True)
        elif (template := getattr(obj, "__wrapped__", None)) is not None and isinstance(
            text := getattr(template, "__self__", None), str
        ):
            check_widths(text)  # str.format, wrapped by the sandbox
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, str | bytes | list | tuple | dict):
            self.state.budget.value(result)
        return result

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Opaque) and not hasattr(str, attribute):
            raise Inspected
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, Opaque):
            raise Inspected
        result = super().getitem(obj, argument)
        if isinstance(argument, slice):
            self.state.budget.step(len(result) if isinstance(result, Sized) else 0)
        return result

    def _charged(self, value: Any) -> Any:
        self.state.budget.value(value)
        return value.text if isinstance(value, Opaque) else value

    def _check_hidden(self, *arguments: Any) -> None:
        if self.state.hides and holds_hidden(arguments):
            raise Inspected

    def _hide_from(self, test: Callable) -> Callable:
        @functools.wraps(test)
        def limited(*args, **kwargs):
            self._check_hidden(args, kwargs)
            return test(*args, **kwargs)

        return limited

    def _charge_calls(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)  # keeps jinja2's attributes of filters, e.g. that they take the environment
        def limited(*args, **kwargs):
            self.state.budget.step()
            if self.state.hides:
                check_filter(name, (*args, *kwargs.values()))
            self._check_arguments(name, args, kwargs, method=False)
            result = function(*args, **kwargs)
            if isinstance(result, str | list | tuple | dict):
                self.state.budget.value(result)
            return result

        return limited

    def _check_arguments(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, method: bool) -> None:
        """Charges calls whose result can be much larger than their arguments."""
        budget = self.state.budget
        if any(
            isinstance(argument, int) and abs(argument) > LARGEST_ARGUMENT for argument in (*args[1:], *kwargs.values())
        ):
            raise LimitError(f"{name} with a number above {LARGEST_ARGUMENT}")
        values = [argument for argument in args if isinstance(argument, str | bytes | list | tuple | dict)]
        if name in ("tojson", "string", "pprint", "format", "join"):
            for value in values:
                budget.value(value)
        texts = [argument for argument in (*values, *kwargs.values()) if isinstance(argument, str | bytes)]
        if name in ("format", "format_map") and texts:
            check_widths(str(texts[0]))
        if name == "replace" and len(texts) >= 3:
            budget.write((texts[0].count(texts[1]) + 1) * len(texts[2]))  # pyright: ignore[reportArgumentType]
        if name == "join" and texts:
            many = next(
                (len(argument) for argument in (args[1:] if method else args) if isinstance(argument, Sized)), STEPS
            )
            budget.write(many * max(map(len, texts)) if many else 0)
        if name == "indent" and len(texts) >= 2:
            budget.write((str(texts[0]).count("\n") + 1) * len(texts[1]))


def _true_of_texts(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns a test that is true of every text, without a look into it."""
    return lambda value: isinstance(value, str) or test(value)


def looks_into_texts(tree: nodes.Template) -> bool:
    """Whether a template asks for what is in a text in a way that a text cannot notice."""
    if any(test.name == "in" for test in tree.find_all(nodes.Test)):
        return True
    literals = (nodes.List, nodes.Tuple, nodes.Dict)
    return any(
        operand.op in ("in", "notin") and not isinstance(operand.expr, literals)
        for compare in tree.find_all(nodes.Compare)
        if not isinstance(compare.expr, nodes.Const)
        for operand in compare.ops
    )


def _may_read_output(tree: nodes.Template) -> bool:
    """Whether marks in the output could change the rest of it, or the template writes some itself."""
    blocks = (nodes.AssignBlock, nodes.FilterBlock, nodes.Macro, nodes.Block)
    calls = (
        call for call in tree.find_all(nodes.CallBlock) if not isinstance(call.call.node, nodes.ExtensionAttribute)
    )
    loops = (loop for loop in tree.find_all(nodes.For) if loop.recursive)
    texts = (const.value for const in tree.find_all(nodes.Const))
    literals = (data.data for data in tree.find_all(nodes.TemplateData))
    return any(True for _ in (*tree.find_all(blocks), *calls, *loops)) or any(
        RESERVED.search(text) for text in (*texts, *literals) if isinstance(text, str)
    )


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja's filter escapes <, > and & for HTML, but models were trained on plain JSON
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise TemplateError(message)
