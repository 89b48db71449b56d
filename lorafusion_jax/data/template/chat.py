"""A model's chat template: renders messages to text, and finds the assistant's answers.

Templates come with models and run in `sandbox.Sandbox`; `conversation` says how answers are found.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateSyntaxError

from lorafusion_jax.data.template.compiled import PROBLEMS, TemplateLimit, TemplateProblem, compile_template
from lorafusion_jax.data.template.conversation import REASONING, Conversation, Rendered
from lorafusion_jax.errors import CheckpointError

RESERVED_NAMES = ("messages", "tools", "documents", "add_generation_prompt")


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

        def find_answers(chat: Conversation) -> Rendered:
            answers = chat.answers(last_only)
            spans = [
                span
                for turn, answer_spans in answers.items()
                if learned is None or learned[turn]
                for span in answer_spans
            ]
            return chat.rendered(tuple(spans))

        return self._attempt(messages, tools, variables, find_answers)

    def render_after_prompt(
        self, messages: Sequence[dict], first: int, *, tools: list | None = None, variables: Mapping[str, Any] = {}
    ) -> Rendered:
        """Renders a conversation and, as at inference, the prompt before message `first`; see `render`."""

        def split(chat: Conversation) -> Rendered:
            return dataclasses.replace(chat.rendered(()), prompt=chat.render_prompt(first))

        return self._attempt(messages, tools, variables, split)

    def _attempt[R](
        self,
        messages: Sequence[dict],
        tools: list | None,
        variables: Mapping[str, Any],
        use: Callable[[Conversation], R],
    ) -> R:
        """Tries the three forms of a message without content (one that only calls tools).

        Templates expect the key to be absent (as in transformers), null, or an empty text.
        """
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


def _normalize(message: dict, absent: dict) -> dict:
    """Returns a message as transformers passes it to templates: no nulls, reasoning under both of its names."""
    filled = absent | {key: value for key, value in message.items() if value is not None}
    thought = next((filled[key] for key in REASONING if key in filled), None)
    return filled if thought is None else {"thinking": thought, **filled, "reasoning_content": thought}


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
