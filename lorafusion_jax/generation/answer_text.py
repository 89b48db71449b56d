"""The texts of answers: what ends them, and what of a growing one is certain. Never imports jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lorafusion_jax.data.tokenizer import Tokenizer

LAST_TOKENS = 64  # whose text is searched for the texts that end an answer, beside those of the texts themselves
UNFINISHED = "\ufffd"  # a part of a character


def text_options(tokenizer: Tokenizer) -> dict[str, Any]:
    """Options of an `Engine` for stop texts; empty where the base has no rules for texts."""
    if not tokenizer.is_there:
        return {}
    texts = AnswerTexts(tokenizer)
    return {"ends_with": texts.ends_with, "special_texts": texts.special_texts}


class AnswerTexts:
    """Turns the tokens of answers into texts, and finds the texts that end them.

    Args:
        tokenizer: of the model, which has rules for texts.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self.special_texts = tokenizer, tokenizer.special_texts

    def text(self, tokens: Sequence[int], stops: Sequence[str] = ()) -> str:
        """The text of an answer, without the text that ended it."""
        text = self._tokenizer.text(tokens)
        ends = [text[: text.find(stop)] for stop in stops if stop in text]
        with_special = [stop for stop in stops if self._has_special(stop)]
        raw_text = self._tokenizer.decode(tokens) if with_special else ""
        ends += [self._without_special(raw_text[: raw_text.find(stop)]) for stop in with_special if stop in raw_text]
        return min(ends, key=len, default=text)

    def ends_with(self, tokens: Sequence[int], texts: Sequence[str]) -> bool:
        """Whether one of the texts is among the last tokens."""
        last = tokens[-LAST_TOKENS - max(map(len, texts)) :]
        tail = self._tokenizer.text(last)
        if any(text in tail for text in texts):
            return True
        with_special = [text for text in texts if self._has_special(text)]
        return bool(with_special) and any(text in self._tokenizer.decode(last) for text in with_special)

    def _has_special(self, text: str) -> bool:
        return any(special in text for special in self.special_texts)

    def _without_special(self, text: str) -> str:
        for special in self.special_texts:
            text = text.replace(special, "")
        return text


class TextStream:
    """The text of an answer while it grows. What was returned once never changes.

    Only whole characters are returned, and none that may belong to a text which ends the answer.

    Args:
        stops: texts that end the answer.
    """

    def __init__(self, texts: AnswerTexts, stops: Sequence[str] = ()):
        self._texts, self._stops = texts, stops
        self._held = max(map(len, stops), default=1) - 1  # characters with which a stop text may begin
        self._tokens: list[int] = []
        self._from = self._read = 0  # tokens: a decoder needs some before those that are new
        self._text, self._sent = "", 0

    def add(self, tokens: Sequence[int]) -> str:
        """Returns what further tokens make certain."""
        self._tokens += tokens
        before = self._texts.text(self._tokens[self._from : self._read])
        text = self._texts.text(self._tokens[self._from :])
        if len(text) > len(before) and not text.endswith(UNFINISHED):
            self._text += text[len(before) :]
            self._from, self._read = self._read, len(self._tokens)
        return self._send(self._text[: max(len(self._text) - self._held, 0)])

    def end(self, tokens: Sequence[int]) -> str:
        """Returns the rest, with the last tokens."""
        return self._send(self._texts.text([*self._tokens, *tokens], self._stops))

    def _send(self, text: str) -> str:
        piece = text[self._sent :]
        self._sent += len(piece)
        return piece
