"""Renders many conversations of one shape by rendering one of them: contents are put into its text.

Most templates write contents as they are, or without the white space around them. To know that a template does, it
renders texts that it cannot look into (`Opaque`). Where it tries to, or asks something of which a content has another
answer, the conversation is rendered itself. So both ways give the same text and the same answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lorafusion_jax.data.template.marks import Span
from lorafusion_jax.data.template.opaque import Asked, Inspected, Opaque

OPEN, CLOSE = "\ufdd5", "\ufdd6"  # around the number of a content; noncharacters, which no text may contain
HIDDEN = re.compile(f"{OPEN}([0-9]+){CLOSE}")
ODD = re.compile("[\ud800-\udfff\ufdd0-\ufdef]")  # half characters and noncharacters
ROLES = frozenset(("system", "user", "assistant"))
MOST_SPACE = 4  # characters around a content that belong to the shape


class Shape(NamedTuple):
    """What conversations have in common whose texts differ by contents only.

    Attributes:
        key: role of each message, with the white space around its content, or with all of a content without text.
        contents: what differs, by message; None where a content has no text.
    """

    key: tuple[tuple[str, ...], ...]
    contents: list[str | None]


def shape_of(messages: Sequence[Mapping[str, Any]]) -> Shape | None:
    """Returns the shape of a conversation of texts; None of another one."""
    key: list[tuple[str, ...]] = []
    contents: list[str | None] = []
    for message in messages:
        content, role = message.get("content"), message.get("role")
        if type(content) is not str or len(message) != 2 or role not in ROLES:
            return None
        core = content.strip()
        if len(content) - len(core) > MOST_SPACE or not (core.isascii() or ODD.search(core) is None):
            return None
        before, _, after = content.partition(core) if core else ("", "", "")
        key.append((role, before, after) if core else (role, content))
        contents.append(core or None)
    return Shape(tuple(key), contents)


def hidden_messages(shape: Shape) -> list[dict[str, Any]]:
    """Returns a conversation of a shape with a number for each content."""
    return [
        {"role": role, "content": f"{space[0]}{OPEN}{number}{CLOSE}{space[1]}" if len(space) == 2 else space[0]}
        for number, (role, *space) in enumerate(shape.key)
    ]


@dataclass(slots=True)
class Guard:
    """Hides contents from a template while one of a shape is rendered.

    Attributes:
        asked: what it asked of contents.
    """

    asked: list[Asked] = field(default_factory=list)

    def hide(self, messages: Sequence[dict]) -> list[dict]:
        def hidden(message: dict) -> dict:
            number = HIDDEN.search(message["content"])
            if number is None:
                return dict(message)
            return message | {"content": Opaque.of(message["content"], self.asked, int(number[1]))}

        return [hidden(message) for message in messages]


class Filled(NamedTuple):
    """A text with the contents of a conversation, and positions in it."""

    text: str
    positions: list[int]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The text of all conversations of a shape.

    Attributes:
        literals: text before each content and behind the last.
        numbers: the contents, in the order in which they are written.
        positions: (characters of literals, contents) before each position.
    """

    literals: tuple[str, ...]
    numbers: tuple[int, ...]
    positions: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, text: str, spans: Sequence[Span] = ()) -> Skeleton:
        """Takes a text with numbers for contents, and positions in it.

        Raises:
            Inspected: a position is inside of a content.
        """
        matches = list(HIDDEN.finditer(text))
        pieces = HIDDEN.split(text)

        def before(position: int) -> tuple[int, int]:
            count = sum(match.end() <= position for match in matches)
            if count < len(matches) and matches[count].start() < position:
                raise Inspected
            return position - sum(match.end() - match.start() for match in matches[:count]), count

        positions = tuple(before(position) for span in spans for position in span)
        return cls(tuple(pieces[::2]), tuple(map(int, pieces[1::2])), positions)

    def fill(self, contents: Sequence[str | None]) -> Filled:
        """Returns the text with the contents of a conversation of the shape."""
        parts, ends, written = [self.literals[0]], [0], 0
        for number, literal in zip(self.numbers, self.literals[1:], strict=True):
            content = contents[number] or ""
            parts += (content, literal)
            written += len(content)
            ends.append(written)
        return Filled("".join(parts), [characters + ends[count] for characters, count in self.positions])


@dataclass(frozen=True, slots=True)
class Rule:
    """What contents must be like, so that a conversation has the text and the answers of its skeleton.

    Attributes:
        asked: what the template asked of them.
        tokens: texts of special tokens that decide where answers end.
        starts, ends: ends and starts of these tokens: with what is written around a content they could make one.
        closings: of an answer, what is written behind its content.
    """

    asked: tuple[Asked, ...]
    tokens: tuple[str, ...]
    starts: tuple[str, ...]
    ends: tuple[str, ...]
    closings: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, asked: Sequence[Asked], tokens: Sequence[str], skeleton: Skeleton, shape: Shape) -> Rule:
        closings = [
            (number, literal)
            for number, literal in zip(skeleton.numbers, skeleton.literals[1:], strict=True)
            if shape.key[number][0] == "assistant" and literal.strip()
        ]
        cuts = [(token[:at], token[at:]) for token in tokens for at in range(1, len(token))]
        return cls(
            tuple(dict.fromkeys(asked)),
            tuple(tokens),
            tuple(dict.fromkeys(end for _, end in cuts)),
            tuple(dict.fromkeys(start for start, _ in cuts)),
            tuple(closings),
        )

    def holds(self, shape: Shape) -> bool:
        for content in shape.contents:
            if content is not None and (
                content.startswith(self.starts)
                or content.endswith(self.ends)
                or any(token in content or content in token for token in self.tokens)
            ):
                return False
        for number, closing in self.closings:
            content = shape.contents[number]
            assert content is not None
            if closing.strip() in content or (content + closing).rfind(content):  # it is looked for from behind
                return False
        return all(self._answers(asked, shape) for asked in self.asked)

    @staticmethod
    def _answers(asked: Asked, shape: Shape) -> bool:
        _, before, after = shape.key[asked.content]
        content = f"{before}{shape.contents[asked.content]}{after}"
        return getattr(content, asked.method)(asked.argument) == asked.answer
