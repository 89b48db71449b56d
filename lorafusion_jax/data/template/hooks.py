"""Hooks in the code of a template: they charge its loops to a budget and write marks into its output.

Marks tell which message a loop is at, and where `{% generation %}` blocks begin and end.
"""

from __future__ import annotations

import re
import threading
from typing import Any, ClassVar

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.visitor import NodeTransformer

from lorafusion_jax.data.template.budget import Budget
from lorafusion_jax.data.template.opaque import Opaque

# Unicode noncharacters: no text may contain them.
GENERATION_OPEN, GENERATION_CLOSE = "\ufdd0", "\ufdd1"
MESSAGE_OPEN, MESSAGE_CLOSE = "\ufdd2", "\ufdd3"  # around the number of the next message; empty outside of messages
RESERVED = re.compile("[\ufdd0-\ufdd3]")


class RenderState(threading.local):
    """State of the current render of a thread."""

    def __init__(self):
        self.budget = Budget()
        self.hides = False  # contents are hidden from the template
        self.turns: dict[int, int] | None = None  # identity of a message → its number; None: no marks
        self.loops: list[int | None] = []  # current message of each open loop

    def mark(self) -> str:
        at = next((turn for turn in reversed(self.loops) if turn is not None), "")
        return f"{MESSAGE_OPEN}{at}{MESSAGE_CLOSE}"


class Hooks(Extension):
    """The hooks that `Instrument` inserts into templates, and `{% generation %}…{% endgeneration %}`."""

    tags: ClassVar = {"generation"}

    @property
    def state(self) -> RenderState:
        return self.environment.state  # pyright: ignore[reportAttributeAccessIssue]

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("generation"), [], [], body).set_lineno(line)

    def generation(self, caller) -> str:
        answer = caller()
        return answer if self.state.turns is None else GENERATION_OPEN + answer + GENERATION_CLOSE

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
        hidden = next((value for value in values if isinstance(value, Opaque)), None)
        return "".join(map(str, values)) if hidden is None else hidden.joined(*values)


class Instrument(NodeTransformer):
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
