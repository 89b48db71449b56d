"""Chat templates: messages → text, and which parts of it the assistant says.

Templates come with models, so they run in jinja2's immutable sandbox and see nothing but the messages and the special
tokens. Two ways lead to the assistant's parts: `{% generation %}` blocks where the template has them, otherwise the
template is rendered up to each answer and must be a prefix of the whole.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorafusion_jax.errors import CheckpointError

OPEN, CLOSE = "\ufdd0\ufdd1", "\ufdd0\ufdd2"  # code points that no text may use: they mark what a generation block says
# Some templates print the date. A plan must hold the same tokens tomorrow, so their clock stands still.
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)

type Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """Text of a sample and the character ranges in it that are answers."""

    text: str
    answers: Spans


class TemplateProblem(ValueError):
    """The template cannot render these messages, or does not say where the answers are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A model's chat template.

    Attributes:
        source: jinja text.
        special_tokens: bos_token, eos_token, … as the template may use them.
        marks_answers: the template has generation blocks.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def marks_answers(self) -> bool:
        return _compiled(self.source)[1]

    @property
    def hash(self) -> str:
        """Tells templates apart: 16 hex digits over source and special tokens."""
        content = json.dumps([self.source, sorted(self.special_tokens.items())])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def render(
        self, messages: Sequence[dict], *, tools: list | None = None, add_generation_prompt: bool = False
    ) -> str:
        """Renders messages to the text that the model reads.

        Raises:
            TemplateProblem: the template refuses the messages or fails on them.

        >>> ChatTemplate(source="{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}").render(
        ...     [{"role": "user", "content": "hi"}])
        'user: hi\\n'
        """
        marked = self._render(messages, tools, add_generation_prompt)
        return marked.replace(OPEN, "").replace(CLOSE, "")

    def render_answers(
        self, messages: Sequence[dict], *, tools: list | None = None, last_only: bool = False
    ) -> Rendered:
        """Renders a conversation and finds what the assistant says in it.

        Args:
            last_only: only the last answer counts.

        Raises:
            TemplateProblem: as `render`, or the text up to an answer is no prefix of the whole.
        """
        if self.marks_answers:
            if any(OPEN[0] in str(message.get("content")) for message in messages):
                raise TemplateProblem("a message holds the code point U+FDD0, which no text may use")
            rendered = _unmark(self._render(messages, tools, add_generation_prompt=False))
        else:
            rendered = self._by_prefixes(messages, tools, last_only)
        return Rendered(text=rendered.text, answers=rendered.answers[-1:]) if last_only else rendered

    def _render(self, messages: Sequence[dict], tools: list | None, add_generation_prompt: bool) -> str:
        try:
            return _compiled(self.source)[0].render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ) as problem:  # whatever foreign template code can run into
            raise TemplateProblem(f"the template says: {problem}") from None

    def _by_prefixes(self, messages: Sequence[dict], tools: list | None, last_only: bool) -> Rendered:
        whole = self._render(messages, tools, add_generation_prompt=False)
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        spans = []
        for turn in turns[-1:] if last_only else turns:
            before = self._render(messages[:turn], tools, add_generation_prompt=True)
            if not whole.startswith(before):
                raise TemplateProblem(
                    f"the text before message {turn} is no prefix of the conversation, so the answer "
                    "cannot be told from its context"
                )
            spans.append((len(before), self._end_of_answer(whole, len(before), messages, turn, tools)))
        return Rendered(text=whole, answers=tuple(spans))

    def _end_of_answer(self, whole: str, start: int, messages: Sequence[dict], turn: int, tools: list | None) -> int:
        through = self._render(messages[: turn + 1], tools, add_generation_prompt=False)
        end_token = self.special_tokens.get("eos_token", "")
        if whole.startswith(through):
            bare = through.rstrip()  # a line end after the end token separates turns, nobody says it
            return len(bare) if end_token and bare.endswith(end_token) else len(through)
        # Templates that show the reasoning of the last answer only render it differently once more turns follow.
        content = messages[turn]["content"].strip()
        found = whole.find(content, start)
        if not content or found < 0:
            raise TemplateProblem(f"message {turn} is rendered differently once more messages follow")
        end = found + len(content)
        return end + len(end_token) if end_token and whole.startswith(end_token, end) else end


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


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: marks what the assistant says."""

    tags: ClassVar = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller) -> str:
        return OPEN + caller() + CLOSE


@functools.lru_cache(maxsize=32)
def _compiled(source: str):
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=TEMPLATE_DATE.strftime)
    marks_answers = any(kind == "name" and value == "endgeneration" for _, kind, value in environment.lex(source))
    return environment.from_string(source), marks_answers


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja's own filter escapes <, > and & for HTML; models were trained on plain JSON
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise TemplateError(message)


def _unmark(marked: str) -> Rendered:
    text, spans, begin = "", [], 0
    for number, piece in enumerate(marked.replace(CLOSE, OPEN).split(OPEN)):
        begin = len(text)
        text += piece
        if number % 2 and piece:
            spans.append((begin, len(text)))
    return Rendered(text=text, answers=tuple(spans))
