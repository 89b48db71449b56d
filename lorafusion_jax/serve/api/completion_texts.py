"""Answers of completions in the form of OpenAI's API, as a whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lorafusion_jax.generation.answer_text import UNFINISHED

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What differs between texts and chats.

    Attributes:
        object, chunk: kinds of the whole and of its chunks.
    """

    prefix: str
    object: str
    chunk: str


TEXT = Shape(prefix="cmpl-", object="text_completion", chunk="text_completion")
CHAT = Shape(prefix="chatcmpl-", object="chat.completion", chunk="chat.completion.chunk")


class Written:
    """What a worker has written of a completion."""

    def __init__(self, shape: Shape, model: str, name: str):
        self._shape = shape
        self._head = {"id": f"{shape.prefix}{name}", "created": int(time.time()), "model": model}
        self._texts: dict[int, list[str]] = {}
        self._logprobs: dict[int, list[Any]] = {}
        self._ends: dict[int, str] = {}
        self._drawn: dict[int, int] = {}
        self._prompt_tokens = 0

    def take(self, event: Row) -> None:
        """Takes an event of a worker, which has parts of answers."""
        self._prompt_tokens = event["prompt_tokens"]
        for part in event["parts"]:
            index = part["index"]
            self._texts.setdefault(index, []).append(part["text"])
            if "logprobs" in part:
                self._logprobs.setdefault(index, []).extend(part["logprobs"])
            if part["end"]:
                self._ends[index], self._drawn[index] = part["end"], part["tokens"]

    def whole(self) -> Row:
        """The answer to a request without `stream`."""
        choices = []
        for index in sorted(self._texts):
            text, logprobs = "".join(self._texts[index]), self._listed(self._logprobs.get(index), 0)
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choice = {"index": index} | (content if self._shape is CHAT else {"text": text})
            choices.append(choice | {"logprobs": logprobs, "finish_reason": self._ends[index]})
        return self._head | {"object": self._shape.object, "choices": choices, "usage": self._usage()}

    def chunks(self, event: Row, *, usage: bool) -> Iterator[Row]:
        """The chunks of an event.

        Args:
            usage: whether a last chunk counts tokens.
        """
        head = self._head | {"object": self._shape.chunk} | ({"usage": None} if usage else {})
        for part in event["parts"]:
            index = part["index"]
            is_first, before = index not in self._texts, sum(map(len, self._texts.get(index, ())))
            logprobs = self._listed(part.get("logprobs"), before)
            self.take(event | {"parts": [part]})
            if self._shape is TEXT:
                if part["text"] or part["end"] or logprobs:
                    choice = {"index": index, "text": part["text"], "logprobs": logprobs}
                    yield head | {"choices": [choice | {"finish_reason": part["end"]}]}
                continue
            role = {"role": "assistant"} if is_first else {}
            if part["text"] or is_first or logprobs:
                choice = {"index": index, "delta": role | {"content": part["text"]}, "logprobs": logprobs}
                yield head | {"choices": [choice | {"finish_reason": None}]}
            if part["end"]:
                yield head | {
                    "choices": [{"index": index, "delta": {}, "logprobs": None, "finish_reason": part["end"]}]
                }
        if usage and event["ended"]:
            yield head | {"choices": [], "usage": self._usage()}

    def _usage(self) -> Row:
        completion_tokens = sum(self._drawn.values())
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
        }

    def _listed(self, entries: list[Any] | None, offset: int) -> Row | None:
        """log p of tokens, which begin at a character of the answer."""
        if entries is None:
            return None
        if self._shape is CHAT:
            return {
                "content": [
                    _token(piece, logprob) | {"top_logprobs": [_token(*alternative) for alternative in alternatives]}
                    for piece, logprob, alternatives in entries
                ],
                "refusal": None,
            }
        offsets = []
        for piece, _, _ in entries:
            offsets.append(offset)
            offset += len(piece)
        return {
            "tokens": [piece for piece, _, _ in entries],
            "token_logprobs": [logprob for _, logprob, _ in entries],
            "top_logprobs": [dict(alternatives) for _, _, alternatives in entries],
            "text_offset": offsets,
        }


def _token(piece: str, logprob: float) -> Row:
    is_part = UNFINISHED in piece  # of a character: a piece does not say which bytes it has
    return {"token": piece, "logprob": logprob, "bytes": None if is_part else list(piece.encode())}
