"""Protobuf messages of the training API, from `tinker_public.proto`, and a look at a request without decoding it.

The messages are in a descriptor pool of their own, so that the SDK, of whatever version, can be imported beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"
MEDIA_TYPE = "application/x-protobuf"
MOST_DATUMS, MOST_FIELDS = 4096, 200_000  # of a request; fields are counted without those of texts and numbers
_KINDS = {"double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
_KINDS |= {"uint32": 13, "message": 11, "enum": 14}
_FIELD = re.compile(r"(?:(repeated|optional) )?(?:map<(\w+), (\w+)>|(\w+)) (\w+) = (\d+);")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


@cache
def message_class(name: str) -> Any:
    """Returns the class of a message.

    >>> message_class("EncodedTextChunk")(tokens=b"1234").ByteSize()
    6
    """
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file_descriptor())
    return pool


def file_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """Reads `tinker_public.proto`: enums, messages, oneofs and maps, which is all that it has."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    text = Path(__file__).with_name(f"{PACKAGE}.proto").read_text(encoding="utf-8")
    enums = set(re.findall(r"^enum (\w+)", text, re.MULTILINE))
    message, enum, oneof = None, None, False
    for line in map(str.strip, text.splitlines()):
        kind, _, arguments = line.partition(" ")
        if kind == "message":
            message = file.message_type.add(name=arguments.split()[0])
        elif kind == "enum":
            enum = file.enum_type.add(name=arguments.split()[0])
        elif kind == "oneof" and message is not None:
            message.oneof_decl.add(name=arguments.split()[0])
            oneof = True
        elif line == "}":
            message, enum, oneof = (message, None, False) if oneof else (None, None, False)
        elif enum is not None and (match := re.fullmatch(r"(\w+) = (\d+);", line)):
            enum.value.add(name=match[1], number=int(match[2]))
        elif message is not None and (match := _FIELD.fullmatch(line)):
            _add_field(message, match, enums, in_oneof=oneof)
    for message in file.message_type:  # the oneofs of optional fields come after all others
        for member in message.field:
            if member.proto3_optional:
                member.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{member.name}")
    return file


def _add_field(message: Any, match: re.Match[str], enums: set[str], *, in_oneof: bool) -> None:
    label, key, value, kind, name, number = match.groups()
    member = message.field.add(name=name, number=int(number), label=3 if label == "repeated" or key else 1)
    if key:
        entry = message.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        for at, (half, half_kind) in enumerate((("key", key), ("value", value)), start=1):
            _set_type(entry.field.add(name=half, number=at, label=1), half_kind, enums)
        member.type, member.type_name = _KINDS["message"], f".{PACKAGE}.{message.name}.{entry.name}"
    else:
        _set_type(member, kind, enums)
    member.proto3_optional = label == "optional"
    if not member.proto3_optional:
        member.ClearField("proto3_optional")
    if in_oneof:
        member.oneof_index = len(message.oneof_decl) - 1


def _set_type(member: Any, kind: str, enums: set[str]) -> None:
    if kind in _KINDS:
        member.type = _KINDS[kind]
    else:
        member.type, member.type_name = _KINDS["enum" if kind in enums else "message"], f".{PACKAGE}.{kind}"


@dataclass(slots=True, kw_only=True)
class Head:
    """What the server reads of a request: whose turn it is, and what it costs."""

    model_id: str = ""
    seq_id: int = 0
    forward_only: bool = False
    datums: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A field of a message: where its bytes are, or its value."""

    number: int
    wire: int
    value: int
    start: int
    end: int


@dataclass(slots=True)
class _Budget:
    fields: int = field(default=MOST_FIELDS)


def read_head(body: bytes | mmap) -> Head:
    """Reads the head of a ForwardBackwardRequest and counts datums and tokens; memory does not grow with it.

    Raises:
        ValueError: it is no such message, or has too many parts.
    """
    head, budget = Head(), _Budget()
    for part in _parts(body, 0, len(body), budget):
        _read_turn(body, part, head)
        if part.number == 6 and part.wire == _VARINT:
            head.forward_only = bool(part.value)
        elif part.number == 3 and part.wire == _BYTES:
            head.datums += 1
            if head.datums > MOST_DATUMS:
                raise ValueError(f"a request has at most {MOST_DATUMS} datums.")
            head.tokens += _count_tokens(body, part, budget)
    return head


def read_turn(start: bytes) -> Head | None:
    """Reads whose turn a request is from the first bytes of it, if they say so."""
    head = Head()
    with suppress(ValueError):
        for part in _parts(start, 0, len(start), _Budget()):
            _read_turn(start, part, head)
    return head if head.model_id and head.seq_id else None


def _read_turn(body: bytes | mmap, part: _Part, head: Head) -> None:
    if part.number == 1 and part.wire == _BYTES:
        head.model_id = body[part.start : min(part.end, part.start + 1000)].decode("utf-8", "replace")
    elif part.number == 2 and part.wire == _VARINT:
        head.seq_id = part.value


def _count_tokens(body: bytes | mmap, datum: _Part, budget: _Budget) -> int:
    """Counts the tokens of a datum's text: `model_input`, `encoded_text` and `tokens` all have number 1."""
    parts = [datum]
    for _ in range(3):
        inner = (part for outer in parts for part in _parts(body, outer.start, outer.end, budget))
        parts = [part for part in inner if part.number == 1 and part.wire == _BYTES]
    return sum(part.end - part.start for part in parts) // 4


def _parts(body: bytes | mmap, at: int, end: int, budget: _Budget) -> Iterator[_Part]:
    """Yields the fields of a message that is a part of a body."""
    while at < end:
        budget.fields -= 1
        if budget.fields < 0:
            raise ValueError(f"a request has at most {MOST_FIELDS} parts.")
        tag, at = _varint(body, at, end)
        wire, size, value = tag & 7, 0, 0
        if wire == _VARINT:
            value, at = _varint(body, at, end)
        elif wire == _BYTES:
            size, at = _varint(body, at, end)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError("the body is no protobuf message.")
        if at + size > end:
            raise ValueError("the body ends in the middle of a message.")
        yield _Part(number=tag >> 3, wire=wire, value=value, start=at, end=at + size)
        at += size


def _varint(body: bytes | mmap, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise ValueError("the body ends in the middle of a message.")
        value |= (body[at] & 0x7F) << shift
        at += 1
        if not body[at - 1] & 0x80:
            return value, at
    raise ValueError("the body is no protobuf message.")
