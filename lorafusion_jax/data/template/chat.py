"""A model's chat template: renders messages to text, and finds the assistant's answers.

Templates come with models and run in `sandbox.Sandbox`; `conversation` says how answers are found.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateSyntaxError

from lorafusion_jax.data.template.compiled import PROBLEMS, TemplateLimit, TemplateProblem, compile_template
from lorafusion_jax.data.template.conversation import REASONING, Conversation, Rendered, end_answers, results_after
from lorafusion_jax.data.template.skeleton import Guard, Inspected, Rule, Shape, Skeleton, hidden_messages, shape_of
from lorafusion_jax.errors import CheckpointError

ASKED, ANSWERED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}
CALL = {"type": "function", "id": "a", "function": {"name": "a", "arguments": {}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
DEVELOPER = re.compile("""['"]developer['"]""")  # a template that knows this role
MOST_SHAPES = 4096  # of conversations whose texts are kept
RESERVED_NAMES = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A model's chat template.

    Attributes:
        source: jinja source.
        special_tokens: bos_token, eos_token, …; variables of the template.
        stops: texts of the tokens at which generation stops (empty: unknown).
        marks_answers: the template has generation blocks.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    _skeletons: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def marks_answers(self) -> bool:
        return compile_template(self.source)[2]

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
        return self._attempt(messages, tools, variables, lambda chat: chat.render_all(add_generation_prompt))

    def render_whole(
        self, messages: Sequence[dict], *, tools: list | None = None, variables: Mapping[str, Any] = {}
    ) -> Rendered:
        """Renders a conversation whose whole text is learned; see `render`."""
        return self._attempt(
            messages,
            tools,
            variables,
            lambda chat: self._ended(chat.rendered(((0, len(chat.text)),)), messages),
            ("whole",),
        )

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

        def find_answers(chat: Conversation) -> Rendered:
            answers = chat.answers(last_only)
            turns = {turn: spans for turn, spans in answers.items() if spans and (learned is None or learned[turn])}
            rendered = chat.rendered(tuple(span for spans in turns.values() for span in spans))
            last = len(messages) - 1
            marker = self._marker(bool(messages[last].get("tool_calls"))) if last in turns else None
            results = {turn: results_after(messages, turn) for turn in turns}
            return end_answers(rendered, turns, self.stops, marker, results) if self.stops else rendered

        key = "answers", last_only, None if learned is None else tuple(learned)
        return self._attempt(messages, tools, variables, find_answers, key)

    def render_after_prompt(
        self,
        messages: Sequence[dict],
        first: int,
        *,
        tools: list | None = None,
        variables: Mapping[str, Any] = {},
        ends: bool = True,
    ) -> Rendered:
        """Renders a conversation and, as at inference, the prompt before message `first`; see `render`.

        Args:
            ends: the last answer ends with a token at which generation stops, whatever the template writes.
        """

        def split(chat: Conversation) -> Rendered:
            rendered = dataclasses.replace(chat.rendered(()), prompt=chat.render_prompt(first))
            return self._ended(rendered, messages) if ends else rendered

        return self._attempt(messages, tools, variables, split, ("prompt", first, ends))

    def with_arguments(
        self, messages: Sequence[dict], *, tools: list | None = None, variables: Mapping[str, Any] = {}
    ) -> Sequence[dict]:
        """Returns messages whose calls have their arguments as this template wants them.

        OpenAI writes arguments as JSON texts. Where a template fails on these, or writes them as quoted JSON, they are
        parsed; other templates write the texts as they are.
        """
        parsed = [parse_arguments(message) for message in messages]
        if parsed == list(messages):
            return messages
        try:
            text = self.render(messages, tools=tools, variables=variables)
        except TemplateLimit:
            raise
        except TemplateProblem:
            return parsed
        return parsed if quoted_arguments(messages, text) else messages

    def _ended(self, rendered: Rendered, messages: Sequence[dict]) -> Rendered:
        """Lets a text whose last answer is learned end as `end_answers` says."""
        last = len(messages) - 1
        if not self.stops or not messages or messages[last]["role"] != "assistant":
            return rendered
        marker = self._marker(bool(messages[last].get("tool_calls")))
        ended = end_answers(rendered, {last: [(0, len(rendered.text))]}, self.stops, marker)
        answers = ((0, len(ended.text)),) if rendered.answers else ()
        return dataclasses.replace(ended, answers=answers, ends_early=None)  # the text holds earlier turns

    def _marker(self, calls: bool) -> str | None:
        """Returns the stop token that the template writes between an answer, or a call, and the next turn."""
        return marker_after_answer(self.source, tuple(self.special_tokens.items()), self.stops, calls)

    def _attempt[R](
        self,
        messages: Sequence[dict],
        tools: list | None,
        variables: Mapping[str, Any],
        use: Callable[[Conversation], R],
        key: tuple[Any, ...] | None = None,
    ) -> R:
        """Tries the three forms of a message without content (one that only calls tools).

        Templates expect the key to be absent (as in transformers), null, or an empty text.

        Args:
            key: what `use` returns a `Rendered` of, besides the conversation (None: it returns something else).
        """
        messages = self._in_its_roles(messages)
        if key is not None and tools is None and not variables and (shape := shape_of(messages)) is not None:
            pattern = self._pattern(shape, use, key)
            if pattern is not None and (rendered := pattern.fill(shape)) is not None:
                return rendered  # pyright: ignore[reportReturnType]
        last: TemplateProblem | None = None
        complete = all(message.get("content") is not None for message in messages)
        for absent in ({}, {"content": None}, {"content": ""}):
            try:
                normal = [_normalize(message, absent) for message in messages]
                chat = Conversation(self.source, self.special_tokens, messages=normal, tools=tools, variables=variables)
                return use(chat)
            except TemplateProblem as problem:
                last = problem
                if complete or isinstance(problem, TemplateLimit):
                    break
        assert last is not None
        raise last

    def _in_its_roles(self, messages: Sequence[dict]) -> Sequence[dict]:
        """Returns messages with `system` for `developer`, its newer name, where the template does not know that."""
        if DEVELOPER.search(self.source) or all(message.get("role") != "developer" for message in messages):
            return messages
        return [message | {"role": "system"} if message.get("role") == "developer" else message for message in messages]

    def _pattern(self, shape: Shape, use: Callable[[Conversation], Any], key: tuple[Any, ...]) -> Pattern | None:
        """Returns the text of all conversations of a shape; None if it depends on more of their contents."""
        full = key, shape.key
        if (pattern := self._skeletons.get(full, full)) is full:  # read once: another thread may clear them
            if len(self._skeletons) >= MOST_SHAPES:
                self._skeletons.clear()
            pattern = self._skeletons[full] = self._new_pattern(shape, use)
        return pattern

    def _new_pattern(self, shape: Shape, use: Callable[[Conversation], Any]) -> Pattern | None:
        _, _, _, reads, looks = compile_template(self.source)
        if reads or looks:
            return None
        guard = Guard()
        messages = [_normalize(message, {}) for message in hidden_messages(shape)]
        chat = Conversation(self.source, self.special_tokens, messages=messages, tools=None, variables={}, guard=guard)
        try:
            return Pattern.of(use(chat), guard, shape, (*self.stops, self.special_tokens.get("eos_token", "")))
        except (Inspected, TemplateProblem):
            return None


@dataclass(frozen=True, slots=True)
class Pattern:
    """What all conversations of a shape are rendered to whose contents obey a rule."""

    rendered: Rendered
    text: Skeleton
    prompt: Skeleton | None
    rule: Rule

    @classmethod
    def of(cls, rendered: Rendered, guard: Guard, shape: Shape, tokens: Sequence[str]) -> Pattern | None:
        """Takes the `Rendered` of hidden messages; None if it depends on more of their contents."""
        if rendered.omits_message is not None:
            return None
        text = Skeleton.of(rendered.text, rendered.answers)
        prompt = None if rendered.prompt is None else Skeleton.of(rendered.prompt)
        return cls(rendered, text, prompt, Rule.of(guard.asked, [token for token in tokens if token], text, shape))

    def fill(self, shape: Shape) -> Rendered | None:
        """Returns what a conversation is rendered to; None if its contents do not obey the rule."""
        if not self.rule.holds(shape):
            return None
        text, positions = self.text.fill(shape.contents)
        return Rendered(
            text=text,
            answers=tuple(zip(positions[::2], positions[1::2], strict=True)),
            prompt=None if self.prompt is None else self.prompt.fill(shape.contents).text,
            unended=self.rendered.unended,
            ends_early=self.rendered.ends_early,
        )


def parse_arguments(message: dict) -> dict:
    """Returns a message whose calls have their arguments as objects; OpenAI writes them as JSON texts."""

    def parsed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        value = _object_in(arguments) if isinstance(arguments, str) else None
        if not isinstance(function, dict) or value is None:
            return call
        return call | {"function": function | {"arguments": value}}

    calls = message.get("tool_calls")
    return message | {"tool_calls": [parsed(call) for call in calls]} if isinstance(calls, list) else message


def _object_in(arguments: str) -> dict | None:
    """Returns the object of a JSON text, which may be encoded twice; an empty text is a call without arguments."""
    value: Any = arguments if arguments.strip() else "{}"
    for _ in range(2):
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def quoted_arguments(messages: Sequence[dict], text: str) -> list[str]:
    """Returns the arguments of calls that are texts, and stand as quoted JSON in what a template wrote."""
    arguments = [call["function"].get("arguments") for call in _calls(messages)]
    return [
        value
        for value in arguments
        if isinstance(value, str) and any(json.dumps(value, ensure_ascii=escapes) in text for escapes in (True, False))
    ]


def _calls(messages: Sequence[dict]) -> list[dict]:
    """Returns all calls of functions that are written as such."""
    calls = [call for message in messages for call in message.get("tool_calls") or () if isinstance(call, dict)]
    return [call for call in calls if isinstance(call.get("function"), dict)]


def end_of_turn(template: ChatTemplate, special: Sequence[str]) -> str | None:
    """Returns the special token with which the template ends an answer; None if it writes none.

    Some templates write it behind the message, others leave it out after the last one.

    Args:
        special: texts of all special tokens.
    """
    try:
        alone, header = template.render_answers([ASKED, ANSWERED]), template.render([ASKED], add_generation_prompt=True)
    except TemplateProblem:
        return None
    try:
        dialog = template.render_answers([ASKED, ANSWERED, ASKED])
    except TemplateProblem:
        dialog = alone
    answer, tail = _split_after_answers(alone)
    tail = "" if tail and header.rstrip().endswith(tail) else tail  # written without being asked
    for text in (answer, tail, _split_after_answers(dialog)[0]):
        if end := max((token for token in special if token and text.endswith(token)), key=len, default=None):
            return end
    return None


def _split_after_answers(rendered: Rendered) -> tuple[str, str]:
    """Returns the text through its last answer and the text behind it, without white space around the end."""
    end = rendered.answers[-1][1] if rendered.answers else 0
    return rendered.text[:end].rstrip(), rendered.text[end:].strip()


@functools.cache
def marker_after_answer(
    source: str, special_tokens: tuple[tuple[str, str], ...], stops: tuple[str, ...], calls: bool
) -> str | None:
    """Returns the token at which generation stops that ends an answer or begins the next turn; None if there is none.

    Args:
        source, special_tokens: of the template.
        stops: texts of the tokens at which generation stops.
        calls: the answer calls a tool, and the result of the call follows.
    """
    bare = ChatTemplate(source=source, special_tokens=dict(special_tokens))
    conversations = (
        [[ASKED, CALLED, {"role": "tool", "content": "a", "name": "a", "tool_call_id": "a"}]] if calls else []
    )
    for messages in [*conversations, [ASKED, ANSWERED, ASKED]]:
        try:
            rendered = bare.render_answers(messages)
        except TemplateProblem:
            continue
        answer, tail = _split_after_answers(rendered)
        return next((stop for stop in stops if answer.endswith(stop) or tail.startswith(stop)), None)
    return None


def _normalize(message: dict, absent: dict) -> dict:
    """Returns a message as transformers passes it to templates: no nulls, reasoning under both of its names."""
    fields = absent | {key: value for key, value in message.items() if value is not None}
    thought = next((fields[key] for key in REASONING if key in fields), None)
    return fields if thought is None else {"thinking": thought, **fields, "reasoning_content": thought}


def check_template(template: ChatTemplate, where: str) -> None:
    """Compiles a template.

    Raises:
        CheckpointError: tokenizer.template, with the line.
    """
    try:
        compile_template(template.source)
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
