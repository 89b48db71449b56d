"""Runs untrusted chat templates: without access to Python, in bounded time and memory, with marks in the output.

Templates run in jinja2's immutable sandbox. Every loop, call and operator is charged to the budget of the render before
it runs, so an endless template raises an error instead of hanging. The same hooks write marks into the output: which
message a loop is at, and where `{% generation %}` blocks begin and end.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, ClassVar

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# Unicode noncharacters: no text may contain them.
GENERATION_OPEN, GENERATION_CLOSE = "\ufdd0", "\ufdd1"
MESSAGE_OPEN, MESSAGE_CLOSE = "\ufdd2", "\ufdd3"  # around the number of the next message; empty outside of messages
RESERVED = re.compile("[\ufdd0-\ufdd3]")

STEPS = 300_000  # loop iterations and calls of one render; a conversation of 1000 turns takes about 20 000
CHARACTERS = 50_000_000  # characters that one render may produce, intermediate texts included, ...
CHARACTERS_PER_INPUT = 100  # ... and this many more for each character of the conversation
CHARACTERS_PER_ITEM = 64  # cost of an item of a list or an object, in characters
SECONDS = 5.0  # last resort; the budget normally stops a render earlier
LARGEST_ARGUMENT = 1_000_000  # largest width, count or similar argument
LARGEST_NUMBER_BITS = 4096

# Some templates print the date. Their clock is fixed, so that a plan has the same tokens on every day.
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)
# No chat template needs these filters. Each expands short texts to long ones, or differs from run to run.
REMOVED_FILTERS = ("random", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr")


class LimitError(TemplateError):
    """A template exceeds its budget of time or memory."""


class Budget:
    """Remaining budget of one render."""

    __slots__ = ("characters", "deadline", "steps")

    def __init__(self, input_characters: int = 0):
        self.steps = STEPS
        self.characters = CHARACTERS + CHARACTERS_PER_INPUT * input_characters
        self.deadline = time.monotonic() + SECONDS

    def step(self, characters: int = 0) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise LimitError(f"more than {STEPS} steps for one conversation")
        if not self.steps % 1024 and time.monotonic() > self.deadline:
            raise LimitError(f"more than {SECONDS:.0f} s for one conversation")
        self.write(characters)

    def write(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise LimitError("more text than a conversation can need")

    def value(self, value: Any) -> None:
        """Charges a value by its unfolded size: lists that refer to one list several times grow as fast as texts."""
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str | bytes):
                self.write(len(item))
            elif isinstance(item, list | tuple | set | frozenset):
                self.write(CHARACTERS_PER_ITEM * len(item))
                stack += item
            elif isinstance(item, Mapping):
                self.write(CHARACTERS_PER_ITEM * len(item))
                stack += item.values()


class _State(threading.local):
    """State of the current render of a thread."""

    def __init__(self):
        self.budget = Budget()
        self.turns: dict[int, int] | None = None  # identity of a message → its number; None: no marks
        self.loops: list[int | None] = []  # current message of each open loop

    def mark(self) -> str:
        at = next((turn for turn in reversed(self.loops) if turn is not None), "")
        return f"{MESSAGE_OPEN}{at}{MESSAGE_CLOSE}"


class _Hooks(Extension):
    """The hooks that `_Instrument` inserts into templates, and `{% generation %}…{% endgeneration %}`."""

    tags: ClassVar = {"generation"}

    @property
    def state(self) -> _State:
        return self.environment.state  # pyright: ignore[reportAttributeAccessIssue]

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("generation"), [], [], body).set_lineno(line)

    def generation(self, caller) -> str:
        said = caller()
        return said if self.state.turns is None else GENERATION_OPEN + said + GENERATION_CLOSE

    def begin(self) -> str:
        self.state.loops.append(None)
        return ""

    def step(self, characters: int, item: Any = None) -> str:
        state = self.state
        state.budget.step(characters)
        turn = None if state.turns is None else state.turns.get(id(item))
        if turn is None:
            return ""
        state.loops[-1] = turn
        return state.mark()

    def end(self) -> str:
        return "" if self.state.loops.pop() is None else self.state.mark()

    def made(self, value: Any) -> Any:
        self.state.budget.value(value)
        return value

    def joined(self, *values: Any) -> str:
        for value in values:
            self.state.budget.value(value)
        return "".join(map(str, values))


class _Instrument(NodeTransformer):
    """Inserts the hooks into a parsed template: around and inside loops, around `~` and around constructed values."""

    def __init__(self, hooks: Extension):
        self._hooks = hooks

    def visit_For(self, node: nodes.For):
        self.generic_visit(node)
        target = [nodes.Name(node.target.name, "load")] if isinstance(node.target, nodes.Name) else []
        characters = sum(len(data.data) for part in node.body for data in _static(part))
        node.body.insert(0, self._output("step", nodes.Const(characters), *target))
        return [self._output("begin"), node, self._output("end")]

    def visit_Concat(self, node: nodes.Concat):
        self.generic_visit(node)
        return self._hooks.call_method("joined", node.nodes)

    def visit_List(self, node):
        return self._made(node)

    def visit_Dict(self, node):
        return self._made(node)

    def visit_Tuple(self, node: nodes.Tuple):
        return self._made(node) if node.ctx == "load" else self.generic_visit(node)

    def _made(self, node):
        self.generic_visit(node)
        if next(node.find_all((nodes.Name, nodes.Call, nodes.Filter, nodes.BinExpr)), None) is None:
            return node
        return self._hooks.call_method("made", [node])

    def _output(self, method: str, *arguments) -> nodes.Output:
        return nodes.Output([self._hooks.call_method(method, list(arguments))])


def _static(node: nodes.Node) -> list[nodes.TemplateData]:
    return [node] if isinstance(node, nodes.TemplateData) else list(node.find_all(nodes.TemplateData))


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with limits and with Hugging Face's helpers for chat templates."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self):
        self.state = _State()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimizer computes constants at compile time, where no limit applies
            finalize=self._written,
            extensions=[_Hooks, loopcontrols],
        )
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        self.filters = {name: self._limited(name, function) for name, function in self.filters.items()}
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=_raise_exception, strftime_now=TEMPLATE_DATE.strftime)

    def compiled(self, source: str) -> tuple[Template, bool]:
        """Compiles a template. Also returns whether it has generation blocks."""
        self.state.budget = Budget()
        tree = self.parse(source)
        hooks = self.extensions[_Hooks.identifier]
        marks = any(
            isinstance(call.node, nodes.ExtensionAttribute) and call.node.name == "generation"
            for call in tree.find_all(nodes.Call)
        )
        tree = _Instrument(hooks).visit(tree).set_environment(self)
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None)), marks

    def render(self, template: Template, values: dict[str, Any], marked: Sequence[dict] | None = None) -> str:
        """Renders a compiled template.

        Args:
            marked: messages to mark in the text (None: no marks).
        """
        budget = Budget()
        budget.value([values.get("messages"), values.get("tools")])
        used = CHARACTERS - budget.characters
        self.state.budget = Budget(used)
        self.state.turns = None if marked is None else {id(message): turn for turn, message in enumerate(marked)}
        self.state.loops = []
        return template.render(values)

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        budget = self.state.budget
        budget.step()
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" or (operator == "*" and numbers):
            _check_number(operator, left, right)
        elif operator == "*":
            many, size = (left, right) if isinstance(left, int) else (right, left)
            budget.write(many * len(size) if isinstance(many, int) and isinstance(size, Sized) else 0)
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
        elif isinstance(left, str) and isinstance(right, str):
            budget.write(len(left) + len(right))
        result = super().call_binop(context, operator, left, right)
        if not isinstance(result, str | int | float):
            budget.value(result)
        return result

    def call(self, context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        hook = isinstance(getattr(obj, "__self__", None), _Hooks)
        if not hook:
            self.state.budget.step()
            owner = getattr(obj, "__self__", None)
            if isinstance(owner, str | bytes):
                self._check_arguments(obj.__name__, (owner, *args), kwargs, method=True)
            elif (template := getattr(obj, "__wrapped__", None)) is not None and isinstance(
                text := getattr(template, "__self__", None), str
            ):
                _check_widths(text)  # str.format, wrapped by the sandbox
        result = super().call(context, obj, *args, **kwargs)
        if not hook and isinstance(result, str | bytes | list | tuple | dict):
            self.state.budget.value(result)
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        result = super().getitem(obj, argument)
        if isinstance(argument, slice):
            self.state.budget.step(len(result) if isinstance(result, Sized) else 0)
        return result

    def _written(self, value: Any) -> Any:
        self.state.budget.value(value)
        return value

    def _limited(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)  # keeps jinja2's attributes of filters, e.g. that they take the environment
        def limited(*args, **kwargs):
            self.state.budget.step()
            self._check_arguments(name, args, kwargs, method=False)
            result = function(*args, **kwargs)
            if isinstance(result, str | list | tuple | dict):
                self.state.budget.value(result)
            return result

        return limited

    def _check_arguments(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, method: bool) -> None:
        """Charges calls whose result can be much larger than their arguments."""
        budget = self.state.budget
        if any(isinstance(each, int) and abs(each) > LARGEST_ARGUMENT for each in (*args[1:], *kwargs.values())):
            raise LimitError(f"{name} with a number above {LARGEST_ARGUMENT}")
        values = [each for each in args if isinstance(each, str | bytes | list | tuple | dict)]
        if name in ("tojson", "string", "pprint", "format", "join"):
            for value in values:
                budget.value(value)
        texts = [each for each in (*values, *kwargs.values()) if isinstance(each, str | bytes)]
        if name in ("format", "format_map") and texts:
            _check_widths(str(texts[0]))
        if name == "replace" and len(texts) >= 3:
            budget.write((texts[0].count(texts[1]) + 1) * len(texts[2]))  # pyright: ignore[reportArgumentType]
        if name == "join" and texts:
            many = next((len(each) for each in (args[1:] if method else args) if isinstance(each, Sized)), STEPS)
            budget.write(many * max(map(len, texts)) if many else 0)
        if name == "indent" and len(texts) >= 2:
            budget.write((str(texts[0]).count("\n") + 1) * len(texts[1]))


def _check_number(operator: str, left: Any, right: Any) -> None:
    if not isinstance(left, int) or not isinstance(right, int):
        return
    bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
    if bits > LARGEST_NUMBER_BITS:
        raise LimitError("a number of more than a thousand digits")


def _check_widths(pattern: str) -> None:
    if re.search(r"\d{7}", pattern) or "*" in pattern:
        raise LimitError("a format wider than any line")


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja's filter escapes <, > and & for HTML, but models were trained on plain JSON
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise TemplateError(message)
