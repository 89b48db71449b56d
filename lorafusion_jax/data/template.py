"""Renders chat templates and finds the assistant's answers in the text.

Templates come with models and run in `sandbox.Sandbox`. If a template has `{% generation %}` blocks, these are the
answers. Otherwise a render with marks shows where the text of each message begins and ends. An answer starts after the
generation prompt of its message and ends with the last character that is not white space.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os.path
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, TemplateSyntaxError

from lorafusion_jax.data.sandbox import (
    GENERATION_CLOSE,
    GENERATION_OPEN,
    MESSAGE_CLOSE,
    MESSAGE_OPEN,
    RESERVED,
    LimitError,
    Sandbox,
)
from lorafusion_jax.errors import CheckpointError

MARKS = re.compile(f"([{GENERATION_OPEN}{GENERATION_CLOSE}]|{MESSAGE_OPEN}[0-9]*{MESSAGE_CLOSE})")
BRACKETS = re.compile(r"[()\[\]{}]")
DEEPEST = 1000  # brackets; real templates nest a few dozen
PROBE = "\ufdd4"  # a message content that cannot occur elsewhere in the text
REASONING = ("reasoning_content", "thinking", "reasoning")
RESERVED_NAMES = ("messages", "tools", "documents", "add_generation_prompt")
# exceptions that template code can raise
PROBLEMS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)

type Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """Text of a sample and the character ranges of its answers.

    Attributes:
        omits_message: the first message whose text the template omits, wholly or in part.
        omits_tools: the conversation has tools, but the text does not name any.
    """

    text: str
    answers: tuple[Span, ...]
    omits_message: int | None = None
    omits_tools: bool = False


class TemplateProblem(ValueError):
    """The template cannot render these messages, or the answers cannot be found."""


class TemplateLimit(TemplateProblem):
    """The template exceeds its budget of time or memory."""


class _Marked(NamedTuple):
    """A render with its marks removed."""

    text: str
    written: dict[int, list[Span]]  # message → its non-empty parts of the text
    generated: list[tuple[int | None, Span]]  # message of each generation block, if known


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A model's chat template.

    Attributes:
        source: jinja source.
        special_tokens: bos_token, eos_token, …; variables of the template.
        marks_answers: the template has generation blocks.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def marks_answers(self) -> bool:
        return _compiled(self.source)[2]

    @property
    def hash(self) -> str:
        """Hash of source and special tokens, 16 hex digits."""
        content = json.dumps([self.source, sorted(self.special_tokens.items())])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def render(
        self,
        messages: Sequence[dict],
        *,
        tools: list | None = None,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] = {},
    ) -> str:
        """Renders messages to the model's input text.

        Args:
            variables: additional variables of the template, e.g. `enable_thinking`.

        Raises:
            TemplateProblem: the template rejects the messages, fails, or exceeds its budget.

        >>> ChatTemplate(source="{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}").render(
        ...     [{"role": "user", "content": "hi"}])
        'user: hi\\n'
        """
        return self._attempt(messages, tools, variables, lambda conversation: conversation.whole(add_generation_prompt))

    def render_whole(
        self, messages: Sequence[dict], *, tools: list | None = None, variables: Mapping[str, Any] = {}
    ) -> Rendered:
        """Renders a conversation whose whole text is learned; see `render`."""
        return self._attempt(messages, tools, variables, lambda chat: chat.rendered(((0, len(chat.text)),)))

    def render_answers(
        self,
        messages: Sequence[dict],
        *,
        tools: list | None = None,
        last_only: bool = False,
        learned: Sequence[bool] | None = None,
        variables: Mapping[str, Any] = {},
    ) -> Rendered:
        """Renders a conversation and finds the assistant's answers in it.

        The generation prompt (the header of the assistant's turn, and whatever `add_generation_prompt` adds) is
        context, as at inference.

        Args:
            last_only: return only the last answer.
            learned: for each message, whether it is learned if it is an answer (None: all are).
            variables: as in `render`.

        Raises:
            TemplateProblem: as in `render`, or the answers cannot be separated from their context.
        """

        def answered(conversation: _Conversation) -> Rendered:
            said = conversation.answers(last_only)
            spans = [span for turn, own in said.items() if learned is None or learned[turn] for span in own]
            return conversation.rendered(tuple(spans))

        return self._attempt(messages, tools, variables, answered)

    def _attempt[R](
        self,
        messages: Sequence[dict],
        tools: list | None,
        variables: Mapping[str, Any],
        use: Callable[[_Conversation], R],
    ) -> R:
        """Tries the three forms of a message without content (one that only calls tools).

        Templates expect the key to be absent (as in transformers), null, or an empty text.
        """
        last: TemplateProblem | None = None
        complete = all(message.get("content") is not None for message in messages)
        for absent in ({}, {"content": None}, {"content": ""}):
            try:
                return use(_Conversation(self, [_normal(message, absent) for message in messages], tools, variables))
            except TemplateProblem as problem:
                last = problem
                if complete or isinstance(problem, TemplateLimit):
                    break
        assert last is not None
        raise last


class _Conversation:
    """One conversation with its template."""

    def __init__(
        self, template: ChatTemplate, messages: Sequence[dict], tools: list | None, variables: Mapping[str, Any]
    ):
        self._template, self._messages, self._tools, self._variables = template, list(messages), tools, variables

    def whole(self, ask: bool) -> str:
        return self.render(self._messages, ask=ask)

    def render(self, messages: Sequence[dict], *, ask: bool = False, marked: Sequence[dict] | None = None) -> str:
        """Renders messages of this conversation, optionally with the generation prompt or with marks."""
        values = {
            **self._template.special_tokens,
            **self._variables,
            "messages": list(messages),
            "tools": self._tools,
            "documents": None,
            "add_generation_prompt": ask,
        }
        try:
            sandbox, compiled, _ = _compiled(self._template.source)
            return sandbox.render(compiled, values, marked)
        except LimitError as problem:
            raise TemplateLimit(f"the template says: {problem}") from None
        except PROBLEMS as problem:
            raise TemplateProblem(f"the template says: {problem}") from None

    def _marked(self, messages: Sequence[dict]) -> _Marked:
        return _without_marks(self.render(messages, marked=messages))

    @functools.cached_property
    def text(self) -> str:
        return self.render(self._messages)

    def rendered(self, answers: tuple[Span, ...]) -> Rendered:
        """Returns the text with these answers, and what the text omits."""
        return Rendered(
            text=self.text,
            answers=answers,
            omits_message=_omitted(self.text, self._messages),
            omits_tools=bool(self._tools) and not any(name in self.text for name in _tool_names(self._tools or [])),
        )

    def answers(self, last_only: bool) -> dict[int, tuple[Span, ...]]:
        """Returns the ranges of the answers, by message."""
        if any(RESERVED.search(text) for text in _texts([self._messages, self._tools])):
            raise TemplateProblem("a message holds one of the code points U+FDD0 to U+FDD3, which no text may use")
        text = self.text
        marked = self._marked(self._messages)
        exact = marked.text == text  # False if the template measures or trims its own output, marks included
        turns = [turn for turn, message in enumerate(self._messages) if message["role"] == "assistant"]
        if self._template.marks_answers:
            if not exact:
                raise TemplateProblem("the template changes the text of its generation blocks afterwards")
            by_turn = _generated(marked, turns)
            by_turn = dict(list(by_turn.items())[-1:]) if last_only else by_turn
        else:
            written = marked.written if exact else {}
            by_turn = {turn: (self._span(text, written, turn),) for turn in (turns[-1:] if last_only else turns)}
        for turn, spans in by_turn.items():
            self._check_tool_calls(text, turn, spans)
        return by_turn

    def _span(self, text: str, written: Mapping[int, list[Span]], turn: int) -> Span:
        if len(written.get(turn, ())) != 1:
            return self._span_by_prefix(text, turn)
        begin, end = written[turn][0]
        start = begin + self._header(text, begin, end, turn)
        return start, self._end(text, start, end, turn)

    def _header(self, text: str, begin: int, end: int, turn: int) -> int:
        """Returns the length of the generation prompt at the start of an assistant message's text."""
        before = self._before(turn)
        if before is not None and text.startswith(before) and begin <= len(before) <= end:
            return len(before) - begin
        # The generation prompt differs from the start of the message: e.g. it opens the reasoning, which the template
        # strips from answers, or earlier turns are rendered differently once more follow. Use the common prefix.
        headers = [text[begin:end], self._probed_header(turn)]
        if before is not None:
            bare = self.render(self._messages[:turn])
            headers += [before[begin:]] if before.startswith(text[:begin]) else []
            headers += [before[len(bare) :]] if len(headers) == 2 and before.startswith(bare) else []
        common = os.path.commonprefix(headers)
        if common not in headers and common.rfind("<") > common.rfind(">"):
            common = common[: common.rfind("<")]  # cut inside a tag: <|two|> and <|three|> share no token
        return len(common)

    def _before(self, turn: int) -> str | None:
        try:
            return self.render(self._messages[:turn], ask=True)
        except TemplateProblem:  # some templates require a user message
            return None

    def _probed_header(self, turn: int) -> str:
        """Returns the text before the content of an answer, found by rendering a probe as its content."""
        probe = {"role": "assistant", "content": PROBE}
        earlier, later = self._messages[:turn], self._messages[turn + 1 :]
        for messages in ([*earlier, probe, *later], [*earlier, probe]):
            try:
                marked = self._marked(messages)
            except TemplateProblem:  # e.g. tool results without the call that the probe replaced
                continue
            for begin, end in marked.written.get(turn, ()):
                if PROBE in marked.text[begin:end]:
                    return marked.text[begin : marked.text.index(PROBE, begin)]
        raise TemplateProblem(f"the template does not say where message {turn} begins")

    def _end(self, text: str, start: int, end: int, turn: int) -> int:
        """Returns the end of an answer. A line end after the end token separates turns and is not part of it."""
        content = (_text_of(self._messages[turn])).strip()
        found = text.rfind(content, start, end) if content else -1
        closing = text[found + len(content) if found >= 0 else start : end]
        tail = text[end:]
        end_token = self._template.special_tokens.get("eos_token", "")
        if turn == len(self._messages) - 1 and end_token and tail.strip() == end_token:
            return len(text.rstrip())  # the end token after the last message belongs to it
        return start + len(text[start:end].rstrip()) if closing.strip() else end

    def _span_by_prefix(self, text: str, turn: int) -> Span:
        """Finds an answer for templates that do not loop over messages: the text before it must be a prefix."""
        before = self._before(turn)
        if before is None or not text.startswith(before):
            raise TemplateProblem(
                f"the text before message {turn} is no prefix of the conversation, so the answer "
                "cannot be separated from its context"
            )
        through, start = self.render(self._messages[: turn + 1]), len(before)
        if text.startswith(through):
            return start, self._end(text, start, len(through), turn)
        content = _text_of(self._messages[turn]).strip()
        found = text.find(content, start)
        if not content or found < 0:
            raise TemplateProblem(f"message {turn} is rendered differently once more messages follow")
        end_token = self._template.special_tokens.get("eos_token", "")
        end = found + len(content)
        return start, end + len(end_token) if end_token and text.startswith(end_token, end) else end

    def _check_tool_calls(self, text: str, turn: int, spans: Sequence[Span]) -> None:
        said = "".join(text[start:stop] for start, stop in spans)
        for name in _tool_names(self._messages[turn].get("tool_calls") or ()):
            if name not in said:
                raise TemplateProblem(f"the template does not write the call of {name} in message {turn}")


def _normal(message: dict, absent: dict) -> dict:
    """Returns a message as transformers passes it to templates: no nulls, reasoning under both of its names."""
    said = absent | {key: value for key, value in message.items() if value is not None}
    thought = next((said[key] for key in REASONING if key in said), None)
    return said if thought is None else {"thinking": thought, **said, "reasoning_content": thought}


def check_template(template: ChatTemplate, where: str) -> None:
    """Compiles a template.

    Raises:
        CheckpointError: tokenizer.template, with the line.
    """
    try:
        _compiled(template.source)
    except TemplateSyntaxError as problem:
        raise CheckpointError(
            "tokenizer.template",
            "the model's chat template is not valid jinja.",
            where=f"{where}, template line {problem.lineno}",
            why=str(problem.message),
        ) from None
    except (*PROBLEMS, SyntaxError) as problem:  # thousands of brackets or digits
        raise CheckpointError(
            "tokenizer.template",
            "the model's chat template cannot be compiled.",
            where=where,
            why="it is nested too deeply" if isinstance(problem, RecursionError) else str(problem),
        ) from None


@functools.lru_cache(maxsize=32)
def _compiled(source: str) -> tuple[Sandbox, Template, bool]:
    if (deepest := _nesting(source)) > DEEPEST:
        raise SyntaxError(f"brackets are nested {deepest} deep")  # before the parser runs out of stack
    sandbox = Sandbox()
    return sandbox, *sandbox.compiled(source)


def _nesting(source: str) -> int:
    """Returns the deepest nesting of brackets; brackets in plain text count, too."""
    deepest = depth = 0
    for bracket in BRACKETS.findall(source):
        depth = depth + 1 if bracket in "([{" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest


def _without_marks(marked: str) -> _Marked:
    pieces: list[str] = []
    written: dict[int, list[Span]] = {}
    generated: list[tuple[int | None, Span]] = []
    turn, opened, length = None, 0, 0
    for number, piece in enumerate(MARKS.split(marked)):
        if not number % 2:
            if piece and turn is not None:
                spans = written.setdefault(turn, [])
                begin = spans.pop()[0] if spans and spans[-1][1] == length else length
                spans.append((begin, length + len(piece)))
            pieces.append(piece)
            length += len(piece)
        elif piece == GENERATION_OPEN:
            opened = length
        elif piece == GENERATION_CLOSE:
            generated += [(turn, (opened, length))] if length > opened else []
        else:
            turn = int(piece[1:-1]) if len(piece) > 2 else None
    return _Marked("".join(pieces), written, generated)


def _generated(marked: _Marked, turns: Sequence[int]) -> dict[int, tuple[Span, ...]]:
    """Groups generation blocks by message. Blocks outside of message loops belong to the answers in order."""
    owners = [turn for turn, _ in marked.generated]
    if any(owner is None for owner in owners) and len(set(owners) - {None}) == 0 and len(owners) == len(turns):
        owners = list(turns)
    by_turn: dict[int, tuple[Span, ...]] = {}
    before = turns[-1] if turns else 0
    for owner, (_, span) in zip(owners, marked.generated, strict=True):
        before = before if owner is None else owner  # e.g. an end token after the last message
        by_turn[before] = (*by_turn.get(before, ()), span)
    return dict(sorted(by_turn.items()))


def _text_of(message: dict) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _texts(value: Any):
    """Yields every text inside nested lists and objects."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list | tuple):
            stack += item
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]


def _tool_names(tools: Any) -> list[str]:
    """Returns the names of tools or tool calls, with or without a "function" object around them."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return [name for name in names if isinstance(name, str)]


def _omitted(text: str, messages: Sequence[dict]) -> int | None:
    """Returns the first message with a line that is not in the text; skips tool results, often written as JSON."""
    for turn, message in enumerate(messages):
        parts = [_text_of(message), *(message.get(key) for key in REASONING)]
        for part in parts if message["role"] != "tool" else ():
            if not isinstance(part, str) or part.strip() in text:
                continue
            if any(line.strip() not in text for line in part.split("\n")):
                return turn
    return None
