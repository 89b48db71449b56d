"""Messages of chats, with the keys of OpenAI's API. Nothing that a client writes is left out without a word.

What a message says in another key than templates read goes there: a refusal to the content, a function that is called
to the calls. What cannot go anywhere is refused by its name. Whether a template writes the rest, only its worker knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

LONGEST_TEXT = 1 << 20
Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
Label = Annotated[str, Field(max_length=1000)]
_NOT_SERVED = "this service does not serve it; leave it out"
_PART = {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "refusal"]}}}
CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}
PART_KEYS = ("type", "prompt_cache_breakpoint")  # beside its text; a cache changes nothing of an answer


def _is_off(value: Any) -> Any:
    if value not in (None, 0, "", [], {}, "none", "auto"):
        raise ValueError(_NOT_SERVED)
    return value


def _is_absent(value: Any) -> Any:
    if value is not None:
        raise ValueError(_NOT_SERVED)
    return value


NotServed = Annotated[Any, AfterValidator(_is_off)]
NotServedTable = Annotated[Any, AfterValidator(_is_absent)]  # an empty one asks for its defaults


def _content(value: Any) -> Any:
    """Joins the parts of a content."""
    if isinstance(value, list):
        value = "".join(map(_text_of, value)) if value else None
    if value is not None and (not isinstance(value, str) or len(value) > LONGEST_TEXT):
        raise ValueError(f"a text of at most {LONGEST_TEXT} characters, or a list of parts")
    return value


def _text_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        raise ValueError(f"there are parts of text only, each with type: text, not of {str(kind)[:100]}")
    if unknown := [key for key in part if key not in (*PART_KEYS, kind)]:
        raise ValueError(f"a part of text has no key {str(unknown[0])[:100]}")
    if not isinstance(part.get(kind), str):
        raise ValueError(f"a part of the type {kind} has the key {kind} with a text")
    return part[kind]


Content = Annotated[Any, BeforeValidator(_content), WithJsonSchema(CONTENT)]


class Function(BaseModel):
    """What a message calls. `arguments` are JSON."""

    model_config = ConfigDict(extra="forbid")
    name: Label
    arguments: Text = "{}"


class Call(BaseModel):
    """A call of a message."""

    model_config = ConfigDict(extra="forbid")
    id: Label | None = None
    type: Literal["function"] = "function"
    function: Function
    index: int | None = Field(default=None, exclude=True, description="of a chunk of a stream")


class ChatMessage(BaseModel):
    """A message. `reasoning_content` and its other names are no part of OpenAI's API; servers of open models have them.

    Attributes:
        name: of who speaks; of a result the function.
        annotations, audio: what OpenAI's answers have.
    """

    model_config = ConfigDict(extra="forbid")
    role: Label
    content: Content = None
    name: Label | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: Label | None = None
    function_call: Function | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    thinking: Text | None = None
    annotations: NotServed = None
    audio: NotServedTable = None

    @model_validator(mode="after")
    def _check_keys(self) -> Any:
        if self.function_call is not None:
            if self.tool_calls:
                raise ValueError("function_call and tool_calls say one thing: give tool_calls alone")
            self.tool_calls, self.function_call = [Call(function=self.function_call)], None
        if self.refusal is not None:
            if self.content:
                raise ValueError("a message has a content or a refusal, not both")
            self.content, self.refusal = self.refusal, None
        for key, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, key) and self.role != role:
                raise ValueError(f"{key} belong to messages of the role {role}, not of {self.role[:100]}")
        self.role = "tool" if self.role == "function" else self.role
        if self.content is None and not self.tool_calls:
            raise ValueError(f"a message of the role {self.role[:100]} needs a content")
        self.annotations = None
        return self


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Returns messages as templates read them: the results of a message's calls in the order of the calls.

    Raises:
        ValueError: a result names a call that is not there.
    """
    turns: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    functions: dict[str | None, str] = {}  # of the last calls, by id
    for number, message in enumerate(messages):
        turn = message.model_dump(exclude_none=True)
        if message.role == "tool":
            _check_result(number, message, functions)
            results.append(turn)
            continue
        turns += [*_in_order(results, functions), turn]
        results = []
        if message.role == "assistant":
            functions = {call.id: call.function.name for call in message.tool_calls or ()}
    return [*turns, *_in_order(results, functions)]


def _check_result(number: int, result: ChatMessage, functions: Mapping[str | None, str]) -> None:
    if result.tool_call_id is not None and result.tool_call_id not in functions:
        raise ValueError(f"messages.{number}.tool_call_id: the assistant's message before it has no call with this id")
    names = functions.values() if result.tool_call_id is None else (functions[result.tool_call_id],)
    if result.name is not None and result.name not in names:
        raise ValueError(f"messages.{number}.name: the assistant's message before it does not call this function")


def _in_order(results: list[dict[str, Any]], functions: Mapping[str | None, str]) -> list[dict[str, Any]]:
    """Returns results in the order of their calls, which is all that some templates tell of it."""
    positions = {call: position for position, call in enumerate(functions)}
    if not all("tool_call_id" in result for result in results):
        return results
    return sorted(results, key=lambda result: positions[result["tool_call_id"]])
