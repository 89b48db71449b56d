"""Renders one conversation and finds the assistant's answers in its text.

If a template has `{% generation %}` blocks, these are the answers. Otherwise a render with marks shows where the text
of each message begins and ends. An answer starts after the generation prompt of its message and ends with the last
character that is not white space.
"""

from __future__ import annotations

import functools
import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from lorafusion_jax.config.read import has_half_character
from lorafusion_jax.data.template.compiled import TemplateProblem, compile_template, render
from lorafusion_jax.data.template.hooks import RESERVED
from lorafusion_jax.data.template.marks import Marked, Span, read_marks, spans_by_message
from lorafusion_jax.data.template.opaque import Inspected
from lorafusion_jax.data.template.skeleton import Guard

MOST_MESSAGES = 1000  # of a conversation in which each answer takes a render of all that is before it
PROBE = "\ufdd4"  # a message content that cannot occur elsewhere in the text
REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """Text of a sample and the character ranges of its answers.

    Attributes:
        prompt: text of the prompt as it is at inference, instead of answers: what is learned are the tokens after those
            that prompt and text have in common.
        omits_message: the first message whose text the template omits, wholly or in part.
        omits_tools: the conversation has tools, but the text does not name any.
        unended: the first learned message after which generation would not stop.
        ends_early: the first learned message that holds a token at which generation stops before its end.
    """

    text: str
    answers: tuple[Span, ...]
    prompt: str | None = None
    omits_message: int | None = None
    omits_tools: bool = False
    unended: int | None = None
    ends_early: int | None = None


class Conversation:
    """One conversation with its template.

    Args:
        source, special_tokens: of the template.
        variables: further variables of the template.
        guard: hides contents from the template (None: it sees them).
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        messages: Sequence[dict],
        tools: list | None,
        variables: Mapping[str, Any],
        guard: Guard | None = None,
    ):
        self._guard = guard
        self._source, self._special_tokens = source, special_tokens
        self._messages, self._tools, self._variables = list(messages), tools, variables

    def render_all(self, ask: bool) -> str:
        return self.render(self._messages, ask=ask)

    def render_prompt(self, first: int) -> str:
        """Renders the messages before `first` with the generation prompt."""
        return self.render(self._messages[:first], ask=True) if first else ""

    def render(self, messages: Sequence[dict], *, ask: bool = False, marked: Sequence[dict] | None = None) -> str:
        """Renders messages of this conversation, optionally with the generation prompt or with marks."""
        if self._guard is not None:
            messages = self._guard.hide(messages)
            marked = None if marked is None else messages
        values = {
            **self._special_tokens,
            **self._variables,
            "messages": list(messages),
            "tools": self._tools,
            "documents": None,
            "add_generation_prompt": ask,
        }
        text = render(self._source, values, marked)
        if has_half_character(text):
            raise TemplateProblem("the template writes half a character (a lone surrogate)")
        return text

    def _render_marked(self, messages: Sequence[dict]) -> Marked:
        return read_marks(self.render(messages, marked=messages))

    @functools.cached_property
    def text(self) -> str:
        return self.render(self._messages)

    def rendered(self, answers: tuple[Span, ...]) -> Rendered:
        """Returns the text with these answers, and what the text omits."""
        return Rendered(
            text=self.text,
            answers=answers,
            omits_message=_first_omitted(self.text, self._messages),
            omits_tools=bool(self._tools) and not any(name in self.text for name in _tool_names(self._tools or [])),
        )

    def answers(self, last_only: bool) -> dict[int, tuple[Span, ...]]:
        """Returns the ranges of the answers, by message."""
        if any(RESERVED.search(text) for text in _nested_texts([self._messages, self._tools])):
            raise TemplateProblem("a message holds one of the code points U+FDD0 to U+FDD3, which no text may use")
        turns = [turn for turn, message in enumerate(self._messages) if message["role"] == "assistant"]
        _, _, marks_answers, reads, _ = compile_template(self._source)
        if not marks_answers and not last_only:
            self._check_length()
        reads = reads or any(RESERVED.search(text) for text in _nested_texts([self._special_tokens, self._variables]))
        marked = self._render_marked(self._messages)
        if not reads:
            self.text = marked.text
        text = self.text
        exact = marked.text == text  # False if the template measures or trims its own output, marks included
        if marks_answers:
            if not exact:
                raise TemplateProblem("the template changes the text of its generation blocks afterwards")
            by_turn = spans_by_message(marked, turns)
            by_turn = dict(list(by_turn.items())[-1:]) if last_only else by_turn
        else:
            of_turn = marked.written if exact else {}
            by_turn = {turn: (self._answer_span(text, of_turn, turn),) for turn in (turns[-1:] if last_only else turns)}
        for turn, spans in by_turn.items():
            self._check_tool_calls(text, turn, spans)
        return by_turn

    def _check_length(self) -> None:
        if len(self._messages) > MOST_MESSAGES:
            raise TemplateProblem(
                f"it has {len(self._messages)} messages, and a conversation has {MOST_MESSAGES} at most where the "
                "template does not mark the answers"
            )

    def _answer_span(self, text: str, written: Mapping[int, list[Span]], turn: int) -> Span:
        if len(written.get(turn, ())) != 1:
            return self._span_by_prefix(text, turn)
        begin, end = written[turn][0]
        start = begin + self._header_length(text, begin, end, turn)
        return start, self._answer_end(text, start, end, turn)

    def _header_length(self, text: str, begin: int, end: int, turn: int) -> int:
        """Returns the length of the generation prompt at the start of an assistant message's text."""
        before = self._prompt(turn)
        if before is not None and text.startswith(before) and begin <= len(before) <= end:
            return len(before) - begin
        self._needs_contents()
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

    def _needs_contents(self) -> None:
        if self._guard is not None:
            raise Inspected

    def _prompt(self, turn: int) -> str | None:
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
                marked = self._render_marked(messages)
            except TemplateProblem:  # e.g. tool results without the call that the probe replaced
                continue
            for begin, end in marked.written.get(turn, ()):
                if PROBE in marked.text[begin:end]:
                    return marked.text[begin : marked.text.index(PROBE, begin)]
        raise TemplateProblem(f"the template does not say where message {turn} begins")

    def _answer_end(self, text: str, start: int, end: int, turn: int) -> int:
        """Returns the end of an answer. A line end after the end token separates turns and is not part of it."""
        content = (_text_of(self._messages[turn])).strip()
        position = text.rfind(content, start, end) if content else -1
        closing = text[position + len(content) if position >= 0 else start : end]
        tail = text[end:]
        end_token = self._special_tokens.get("eos_token", "")
        if turn == len(self._messages) - 1 and end_token and tail.strip() == end_token:
            return len(text.rstrip())  # the end token after the last message belongs to it
        return start + len(text[start:end].rstrip()) if closing.strip() else end

    def _span_by_prefix(self, text: str, turn: int) -> Span:
        """Finds an answer for templates that do not loop over messages: the text before it must be a prefix."""
        self._needs_contents()
        before = self._prompt(turn)
        if before is None or not text.startswith(before):
            raise TemplateProblem(
                f"the text before message {turn} is not a prefix of the conversation, so the answer "
                "cannot be separated from its context"
            )
        through, start = self.render(self._messages[: turn + 1]), len(before)
        if text.startswith(through):
            return start, self._answer_end(text, start, len(through), turn)
        content = _text_of(self._messages[turn]).strip()
        position = text.find(content, start)
        if not content or position < 0:
            raise TemplateProblem(f"message {turn} is rendered differently once more messages follow")
        end_token = self._special_tokens.get("eos_token", "")
        end = position + len(content)
        return start, end + len(end_token) if end_token and text.startswith(end_token, end) else end

    def _check_tool_calls(self, text: str, turn: int, spans: Sequence[Span]) -> None:
        answer = "".join(text[start:stop] for start, stop in spans)
        for name in _tool_names(self._messages[turn].get("tool_calls") or ()):
            if name not in answer:
                raise TemplateProblem(f"the template does not write the call of {name} in message {turn}")


def end_answers(
    rendered: Rendered,
    turns: Mapping[int, Sequence[Span]],
    stops: Sequence[str],
    marker: str | None,
    results: Mapping[int, Sequence[str]] = {},
) -> Rendered:
    """Lets every answer end with a token at which generation stops.

    Some templates write none: a model of theirs stops at the marker of the next role, which is then part of the answer.
    Some write the result of a call into the turn that calls: the answer ends where generation stops to wait for it.

    Args:
        results: of the calls of a message, as texts.
        turns: ranges of each learned answer, by message.
        stops: texts of these tokens.
        marker: the one that would follow the last answer (None: the template writes none there).
    """
    text, answers, unended, early = rendered.text, [], [], []
    for turn, spans in turns.items():
        start, stop = spans[-1]
        stop = _end_before_results(text, start, stop, stops, results.get(turn, ()))
        tail = text[stop:]
        end = next((end for end in stops if text[start:stop].rstrip().endswith(end)), None)
        if end is None and (end := next((end for end in stops if tail.lstrip().startswith(end)), None)) is not None:
            stop += len(tail) - len(tail.lstrip()) + len(end)
        elif end is None and marker is not None and not tail.strip():
            end, text = marker, text + marker
            stop = len(text)
        unended += [turn] if end is None else []
        before = text[spans[0][0] : stop].rstrip()
        while closing := next((stop for stop in stops if before.endswith(stop)), None):  # some write several
            before = before.removesuffix(closing).rstrip()
        early += [turn] if any(other in before for other in stops) else []
        answers += [*spans[:-1], (start, stop)]
    return replace(
        rendered,
        text=text,
        answers=tuple(answers),
        unended=min(unended, default=None),
        ends_early=min(early, default=None),
    )


def _end_before_results(text: str, start: int, stop: int, stops: Sequence[str], results: Sequence[str]) -> int:
    """Returns the end of an answer that may hold the results of its calls."""
    ends = [(begin, begin + len(token)) for token in stops if (begin := text.find(token, start, stop)) >= 0]
    if not ends:
        return stop
    _, first_end = min(ends)
    after_end = text[first_end:stop]
    return first_end if any(result.strip() and result.strip() in after_end for result in results) else stop


def results_after(messages: Sequence[dict], turn: int) -> list[str]:
    """Returns the texts of the tool messages that follow a message."""
    following = takewhile(lambda message: message["role"] == "tool", messages[turn + 1 :])
    return [_text_of(message) for message in following]


def _text_of(message: dict) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _nested_texts(value: Any):
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


def _first_omitted(text: str, messages: Sequence[dict]) -> int | None:
    """Returns the first message with a line that is not in the text; skips tool results, often written as JSON.

    A message is first looked for after the one before it: from the beginning, each would take as long as all of them.
    """
    before = 0

    def find(part: str) -> int:
        position = text.find(part, before)
        return position if position >= 0 or part not in text else 0

    for turn, message in enumerate(messages):
        parts = [_text_of(message), *(message.get(key) for key in REASONING)]
        texts = [part for part in parts if isinstance(part, str)] if message["role"] != "tool" else []
        positions = [before]
        for part in texts:
            position = find(part.strip())
            positions += [position] if position >= 0 else [find(line.strip()) for line in part.split("\n")]
        if min(positions) < 0:
            return turn
        before = max(positions)
    return None
