"""Reads a JSON list of rows item by item: memory holds a block of them, however long the list is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from lorafusion_jax.data.row_files import HALF, bad_json, check_objects, decode, half_key, half_problem, not_a_list
from lorafusion_jax.data.rows import Rows
from lorafusion_jax.families.hf_config import one_of_each

MOST_CHARACTERS = 1 << 28  # of a row; one that is longer does not end
NEAR_END = 16  # characters of a literal or an escape that the end of the text may cut
_BOM = "\ufeff".encode()
_DECODER = json.JSONDecoder(object_pairs_hook=one_of_each)


def json_blocks(name: str, file: IO[bytes], block_bytes: int) -> Iterator[Rows]:
    """Yields the rows of a list of objects, or of an object with such a list in `data`.

    Raises:
        DataError: as `parse_json`; that of a row comes after the blocks before it.
    """
    text = _Text(name, file, block_bytes)
    if text.take("["):
        yield from _of_list(text, block_bytes)
    elif text.take("{"):
        yield from _of_object(text, block_bytes)
    else:
        raise not_a_list(name, text.value())
    if text.peek():
        raise text.expecting("the end of the file")


def _of_object(text: _Text, block_bytes: int) -> Iterator[Rows]:
    has_list, at_end = False, text.take("}")
    while not at_end:
        if text.peek() != '"':
            raise text.expecting("a property name in double quotes")
        is_data = text.value() == "data"
        if not text.take(":"):
            raise text.expecting("':'")
        if is_data and has_list:
            raise text.expecting("one list of rows, not two")
        if is_data and text.take("["):
            has_list = True
            yield from _of_list(text, block_bytes)
        else:
            text.value()
        at_end = text.take("}")
        if not at_end and not text.take(","):
            raise text.expecting("',' or '}'")
    if not has_list:
        raise not_a_list(text.name, {})


def _of_list(text: _Text, block_bytes: int) -> Iterator[Rows]:
    values: list[Any] = []
    first, size, at_end = 0, 0, text.take("]")
    while not at_end:
        values.append(text.value(row=first + len(values)))
        size += text.length
        at_end = text.take("]")
        if not at_end and not text.take(","):
            raise text.expecting("',' or ']'")
        if at_end or size >= block_bytes:
            check_objects(text.name, values, first)
            yield Rows(source=text.name, values=values, first=first)
            first, size, values = first + len(values), 0, []


class _Text:
    """A file as text, of which a part is in memory.

    Attributes:
        length: characters of the last value.
    """

    def __init__(self, name: str, file: IO[bytes], block_bytes: int):
        self.name, self.length = name, 0
        self._file, self._block_bytes = file, block_bytes
        self._text, self._at, self._line = "", 0, 1  # the next character of the text, and the line where it begins
        self._cut, self._bytes_line, self._ended = b"", 1, False

    def peek(self) -> str:
        """The next character that is no space; empty at the end of the file."""
        while True:
            while (character := self._text[self._at : self._at + 1]) and character in " \t\n\r":
                self._at += 1
            if character or not self._read():
                return character

    def take(self, character: str) -> bool:
        """Skips the next character that is no space, if it is this one."""
        if self.peek() != character:
            return False
        self._at += 1
        return True

    def value(self, row: int | None = None) -> Any:
        """Parses the next value, that of a row for messages.

        Raises:
            DataError: `data.bad-json`.
        """
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._read():  # a number at the end might go on
                    break
            except (ValueError, RecursionError) as problem:
                at = getattr(problem, "pos", self._at)
                error = bad_json(self.name, self._line_of(at), problem, row)
                if not self._is_cut(problem, at) or not self._read():
                    raise error from None
        if HALF in self._text[self._at : end].lower() and (key := half_key(value)) is not None:
            raise half_problem(self.name, key)
        self._at, self.length = end, end - self._at
        return value

    def expecting(self, sign: str):
        """The error of another character at this point."""
        problem = json.JSONDecodeError(f"Expecting {sign}", self._text, self._at)
        return bad_json(self.name, self._line_of(self._at), problem, None)

    def _line_of(self, position: int) -> int:
        return self._line + self._text.count("\n", 0, position)

    def _is_cut(self, problem: Exception, at: int) -> bool:
        """Whether more text may mend a problem."""
        if not isinstance(problem, json.JSONDecodeError) or len(self._text) - self._at > MOST_CHARACTERS:
            return False
        return problem.msg.startswith("Unterminated string") or at >= len(self._text) - NEAR_END

    def _read(self) -> bool:
        """Forgets what is parsed and reads as much as is left, a block at least. Returns whether there may be more."""
        if self._ended:
            return False
        is_first = self._line == 1 and not self._text and not self._cut
        self._line, self._text, self._at = self._line_of(self._at), self._text[self._at :], 0
        chunk = self._file.read(max(self._block_bytes, len(self._text)))
        self._ended, content = not chunk, self._cut + chunk
        cut_bytes = 0 if self._ended else _cut_bytes(content)
        content, self._cut = content[: len(content) - cut_bytes], content[len(content) - cut_bytes :]
        mark = b" " if content.startswith(_BOM) and not is_first else b""  # in a text, it is a character
        self._text += decode(self.name, mark + content, self._bytes_line)[len(mark) :]
        self._bytes_line += content.count(b"\n")
        return True


def _cut_bytes(content: bytes) -> int:
    """Bytes of a character of UTF-8 at the end whose other bytes are missing."""
    for bytes_back in range(1, min(len(content), 3) + 1):
        byte = content[-bytes_back]
        if byte & 0xC0 != 0x80:  # where a character begins
            length = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return bytes_back if length > bytes_back else 0
    return 0
