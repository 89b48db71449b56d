"""Texts that a template can write, but not look into, and who tries to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from jinja2 import Undefined

ON_TEXT = frozenset(("trim", "default", "d", "string"))  # filters that do not look into a text, ...
ON_LIST = frozenset(("length", "count", "list", "first", "last", "reverse", "default", "d"))  # ... and into a list
ON_TYPE = frozenset(  # tests that do not look into a text
    ("defined", "undefined", "none", "boolean", "true", "false", "integer", "float", "number", "string", "mapping")
) | {"sequence", "iterable", "callable"}


class Inspected(Exception):
    """A template, or the search for answers, looks into a content."""


class Asked(NamedTuple):
    """What a template asked of a content, and the answer."""

    content: int
    method: str
    argument: str
    answer: bool


class Opaque(str):
    """A text that can be written, joined and stripped, and of which little more can be asked.

    Args:
        asked: takes what is asked of a content.
        content: number of the content that it is (None: a part of one, or more than it).
    """

    __slots__ = ("_asked", "_content")

    _asked: list[Asked]
    _content: int | None

    @staticmethod
    def of(text: str, answers: list[Asked], content: int | None = None) -> Opaque:
        opaque = str.__new__(Opaque, text)
        opaque._asked, opaque._content = answers, content
        return opaque

    @property
    def text(self) -> str:
        return str.__getitem__(self, slice(None))

    def _stripped(self, method: str, characters: str | None) -> Opaque:
        if characters is not None and (isinstance(characters, Opaque) or characters.strip()):
            raise Inspected
        text = getattr(str, method)(self, characters)
        return self if str.__len__(text) == str.__len__(self) else Opaque.of(text, self._asked)

    def strip(self, characters: str | None = None, /) -> Opaque:
        return self._stripped("strip", characters)

    def lstrip(self, characters: str | None = None, /) -> Opaque:
        return self._stripped("lstrip", characters)

    def rstrip(self, characters: str | None = None, /) -> Opaque:
        return self._stripped("rstrip", characters)

    def _answer(self, method: str, argument: Any) -> bool:
        if self._content is None or type(argument) is not str:
            raise Inspected
        answer = getattr(str, method)(self, argument)
        self._asked.append(Asked(self._content, method, argument, answer))
        return answer

    def startswith(self, prefix: Any, /, *more: Any) -> bool:
        return self._answer("startswith", None if more else prefix)

    def endswith(self, suffix: Any, /, *more: Any) -> bool:
        return self._answer("endswith", None if more else suffix)

    def __contains__(self, part: Any, /) -> bool:
        return self._answer("__contains__", part)

    def __bool__(self) -> bool:
        return True  # contents without text are part of the shape

    def __add__(self, other: Any, /) -> Opaque:
        return self.joined(self, other) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any, /) -> Opaque:
        return self.joined(other, self) if isinstance(other, str) else NotImplemented

    def joined(self, *texts: str) -> Opaque:
        return Opaque.of("".join(texts), self._asked)

    def __eq__(self, other: object, /) -> bool:
        if isinstance(other, str):
            raise Inspected
        return False

    def __ne__(self, other: object, /) -> bool:
        return not self == other


def _refuse(self: Any, *arguments: Any, **options: Any) -> NoReturn:
    raise Inspected


# A class with `__eq__` has no hash: jinja2 would take that for a key that is missing.
setattr(Opaque, "__hash__", _refuse)  # noqa: B010
KEPT = {"__new__", "__init__", "__getattribute__", "__class__", "__doc__", "__dir__", "__setattr__", "__delattr__"}
for _name in dir(str):
    if _name not in KEPT and _name not in vars(Opaque) and not _name.endswith(("subclass__", "subclasshook__")):
        setattr(Opaque, _name, _refuse)


def holds_hidden(value: Any) -> bool:
    """Whether a value is or may contain an `Opaque`: an iterator may, and a view of a dict."""
    if isinstance(value, list | tuple | dict):
        return any(map(holds_hidden, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Opaque) or (isinstance(value, Iterable) and not isinstance(value, str | range | Undefined))


def check_filter(name: str, arguments: Sequence[Any]) -> None:
    """Raises `Inspected` if a filter of a template may look into a content."""
    for number, value in enumerate(arguments):
        allowed = ON_TEXT if isinstance(value, Opaque) else ON_LIST
        if holds_hidden(value) and (name not in allowed or (name == "trim" and number)):
            raise Inspected
