"""Loads a model's tokenizer: tokenizer.json, special tokens and chat template. Runs no code of the model's folder."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import tokenizers

from lorafusion_jax.config.read import has_half_character
from lorafusion_jax.data.template.chat import ChatTemplate, check_template, end_of_turn
from lorafusion_jax.data.template.conversation import Rendered
from lorafusion_jax.errors import CheckpointError, shortened_text
from lorafusion_jax.readable import SETTINGS, TEMPLATE, TOKENIZER, read_bytes, read_text

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
SHOWN_WHY = 300  # characters of a library's reason
MOST_INSERTED = 1000  # characters
INSERTED = re.compile(rb'"(prepend|content|replacement)"\s*:\s*"(?:[^"\\]|\\.){%d}' % (MOST_INSERTED + 1))
BATCH_ROWS = 512  # bounds memory: all encodings of one call exist at once, about 100 bytes per token


class _NoRules:
    """Stands for the rules of a folder without tokenizer.json: rows of tokens need none.

    Raises:
        CheckpointError: tokenizer.missing, on use.
    """

    def __init__(self, missing: CheckpointError):
        self.missing = missing

    def __getattr__(self, name: str) -> NoReturn:
        raise self.missing


class Encoded(NamedTuple):
    """Tokens of one sample. The mask is True where a token belongs to an answer."""

    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer:
    """Encodes and decodes text for one model.

    Attributes:
        chat_template: None if the model has none.
        digest: hash of the vocabulary and its rules.
        special_tokens: bos_token, eos_token, … as text.
        named_stops: texts of the ends that the model's files name.
        stop_ids: tokens at which generation stops: those that the model's files name, and the one that ends the answers
            of its chat template.
        positions: of the model (None: not known); advice on lengths stays within them.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_template: ChatTemplate | None
    digest: str
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    named_stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    positions: int | None = None

    @property
    def is_there(self) -> bool:
        """Whether the model's folder has a tokenizer.json."""
        return not isinstance(self.backend, _NoRules)

    def require(self) -> None:
        """Checks that texts can be encoded.

        Raises:
            CheckpointError: tokenizer.missing.
        """
        if isinstance(self.backend, _NoRules):
            raise self.backend.missing

    @property
    def special_ids(self) -> np.ndarray:
        """Ids of the special tokens, which no text is split into."""
        token_by_id = self.backend.get_added_tokens_decoder()
        return np.array([number for number, token in token_by_id.items() if token.special], np.int32)

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of the tokens that were added to the vocabulary."""
        return frozenset(self.backend.get_added_tokens_decoder() if self.is_there else ())

    @property
    def special_texts(self) -> dict[str, int]:
        """The texts of the special tokens, each with its id."""
        token_by_id = self.backend.get_added_tokens_decoder()
        return {token.content: number for number, token in token_by_id.items() if token.special}

    @property
    def template_hash(self) -> str:
        """Hash of the chat template; `plain` if there is none."""
        return self.chat_template.hash if self.chat_template else "plain"

    def encode(self, text: str) -> list[int]:
        """Encodes a text without adding special tokens."""
        with _reporting_failures("a text"):
            return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes tokens, special ones included."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def text(self, ids: Sequence[int]) -> str:
        """Decodes tokens, without special ones."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def piece(self, token: int) -> str:
        """Returns the text of one token; `�` for part of a character, the id where no text is known."""
        if not self.is_there:
            return f"{token} "
        text, raw = self.decode([token]), self.backend.id_to_token(int(token)) or ""
        return (
            " " + text if raw.startswith("▁") and not text.startswith(" ") else text
        )  # decoding a single ▁word drops its space

    def encode_rendered(self, samples: Sequence[Rendered]) -> list[Encoded]:
        """Encodes many rendered samples in parallel. Every answer starts at a token boundary."""
        encoded = []
        for start in range(0, len(samples), BATCH_ROWS):
            part = samples[start : start + BATCH_ROWS]
            with _reporting_failures(f"one of the texts {start + 1} to {start + len(part)}"):
                encodings = self.backend.encode_batch([sample.text for sample in part], add_special_tokens=False)
            encoded += [
                self._with_loss_mask(sample, encoding) for sample, encoding in zip(part, encodings, strict=True)
            ]
        for number, sample in enumerate(samples):
            if sample.prompt is not None:
                encoded[number] = self._after_prompt(encoded[number], sample.prompt)
        return encoded

    def _after_prompt(self, encoded: Encoded, prompt: str) -> Encoded:
        """Marks the tokens after those that the text has in common with its prompt."""
        ids = np.asarray(self.encode(prompt), np.int32)
        length = min(len(ids), len(encoded.tokens))
        differs = np.flatnonzero(ids[:length] != encoded.tokens[:length])
        mask = np.arange(len(encoded.tokens)) >= (int(differs[0]) if len(differs) else length)
        return Encoded(encoded.tokens, mask)

    def _with_loss_mask(self, sample: Rendered, encoding: tokenizers.Encoding) -> Encoded:
        mask, offsets = np.zeros(len(encoding.ids), bool), encoding.offsets  # a new list at every access
        for start, stop in sample.answers:
            first, end = _token_at(offsets, start), _token_at(offsets, stop)
            if first < len(mask) and offsets[first][0] < start:
                return self._in_pieces(sample)
            if end < len(mask) and offsets[end][0] < stop:
                end += 1  # the answer's last characters share a token with what follows
            mask[first:end] = True
        return Encoded(np.asarray(encoding.ids, np.int32), mask)

    def _in_pieces(self, sample: Rendered) -> Encoded:
        # A token would span the end of the prompt and the start of the answer. At inference the prompt is encoded
        # separately, so it is here, too.
        tokens, mask, begin = [], [], 0
        for start, stop in sample.answers:
            for piece, learned in ((sample.text[begin:start], False), (sample.text[start:stop], True)):
                ids = self.encode(piece)
                tokens += ids
                mask += [learned] * len(ids)
            begin = stop
        tail = self.encode(sample.text[begin:])
        return Encoded(np.asarray(tokens + tail, np.int32), np.asarray(mask + [False] * len(tail), bool))


def _token_at(offsets: Sequence[tuple[int, int]], position: int) -> int:
    """Returns the first token that ends after a character: some tokenizers exclude spaces from the ranges of tokens."""
    token = bisect_right(offsets, position, key=itemgetter(1))
    while token < len(offsets) and offsets[token][0] == offsets[token][1]:
        token += 1  # it has no characters
    return token


def load_tokenizer(model_dir: str | Path) -> Tokenizer:
    """Loads the tokenizer of an HF model directory.

    Reads tokenizer.json, tokenizer_config.json (special tokens, chat_template) and chat_template.jinja. Without
    tokenizer.json every use of it is an error, tokenizer.missing.

    Raises:
        CheckpointError: tokenizer.broken, tokenizer.template.
    """
    folder = Path(model_dir)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _without_rules(folder)
    try:
        content = read_bytes(path, TOKENIZER)
        _check_inserted_texts(content)
        backend = tokenizers.Tokenizer.from_buffer(content)
    except BaseException as problem:  # the bindings raise plain Exception, and panics are none
        if not _is_failure(problem):
            raise
        raise CheckpointError(
            "tokenizer.broken", f"{path} is not a tokenizer.", where=str(path), why=str(problem)
        ) from None
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    declared = _add_declared(folder, config, backend)
    special = _special_tokens(folder, config, backend)
    template, stops = _chat_template(folder, config), tuple(_named_stops(folder, backend, special))
    ids = {name: backend.token_to_id(text) for name, text in special.items()}
    with _reporting_failures("a text"):
        probe = backend.encode("a", add_special_tokens=True).ids
    bos = ids.get("bos_token")
    settings = json.dumps(sorted(special.items())) + (json.dumps(declared) if declared else "")
    digest = hashlib.sha256(content + settings.encode()).hexdigest()[:16]
    tokenizer = Tokenizer(
        backend=backend,
        special_tokens=special,
        chat_template=None,
        digest=digest,
        bos_id=bos,
        eos_id=ids.get("eos_token"),
        named_stops=stops,
        stop_ids=_ids(backend, stops),
        adds_bos=bos is not None and bool(config.get("add_bos_token", bool(probe) and probe[0] == bos)),
    )
    return tokenizer if template is None else with_template(tokenizer, *template)


def with_template(tokenizer: Tokenizer, source: str, where: str) -> Tokenizer:
    """Returns the tokenizer with another chat template, whose end of a turn ends answers, too.

    Args:
        where: the template's file, for messages.

    Raises:
        CheckpointError: tokenizer.missing, tokenizer.template.
    """
    tokenizer.require()
    template = ChatTemplate(source=source, special_tokens=tokenizer.special_tokens)
    check_template(template, where)
    stops = (*tokenizer.named_stops, *filter(None, [end_of_turn(template, list(tokenizer.special_texts))]))
    stops = tuple(dict.fromkeys(stops))
    return replace(tokenizer, chat_template=replace(template, stops=stops), stop_ids=_ids(tokenizer.backend, stops))


def _ids(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> tuple[int, ...]:
    """Returns the ids of those texts that are tokens."""
    return tuple(dict.fromkeys(number for text in texts if (number := backend.token_to_id(text)) is not None))


def _without_rules(folder: Path) -> Tokenizer:
    """Returns the tokenizer of a folder without tokenizer.json, of which only the ids of ends are known."""
    missing = CheckpointError(
        "tokenizer.missing",
        f"{folder} has no tokenizer.json.",
        where=str(folder),
        fix="AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes one; or rows of tokens, "
        "data.format: tokens, which need none",
    )
    stops = tuple(dict.fromkeys(_named_stop_ids(folder)))
    return Tokenizer(
        backend=cast(tokenizers.Tokenizer, _NoRules(missing)),
        special_tokens={},
        chat_template=None,
        digest="none",
        bos_id=None,
        eos_id=stops[0] if stops else None,
        adds_bos=False,
        stop_ids=stops,
    )


@contextmanager
def _reporting_failures(input_name: str) -> Iterator[None]:
    """Turns failures of the tokenizer in the body into an error."""
    try:
        yield
    except BaseException as problem:
        if not _is_failure(problem) or isinstance(problem, CheckpointError):
            raise
        raise CheckpointError(
            "tokenizer.broken",
            f"the base model's tokenizer fails on {input_name}.",
            why=shortened_text(str(problem), SHOWN_WHY),
            fix="tokenizer.json is damaged: download the model again",
        ) from None


def _is_failure(problem: BaseException) -> bool:
    """Whether the tokenizers library raised this, or panicked."""
    return isinstance(problem, Exception) or type(problem).__name__ == "PanicException"


def _check_inserted_texts(content: bytes) -> None:
    """Checks that no normalizer inserts a long text: each text to encode would become as long.

    Raises:
        ValueError: one does.
    """
    if (match := INSERTED.search(content)) is not None:
        raise ValueError(f"its '{match[1].decode()}' inserts a text of more than {MOST_INSERTED} characters")


def _read_json(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path, SETTINGS))
    except (ValueError, OSError, RecursionError) as problem:
        raise CheckpointError("tokenizer.broken", f"{path} is not JSON.", where=str(path), why=str(problem)) from None
    if has_half_character(json.dumps(value, ensure_ascii=False)):
        why = "a text in it holds half a character (a lone surrogate)"
        raise CheckpointError("tokenizer.broken", f"{path} cannot be used.", where=str(path), why=why)
    return value if isinstance(value, dict) else {}


def _add_declared(folder: Path, config: dict, backend: tokenizers.Tokenizer) -> list[str]:
    """Adds tokens that files beside tokenizer.json declare, as transformers does, and returns their texts.

    Raises:
        CheckpointError: `tokenizer.broken`, they are no tokens, or have other ids than these files say.
    """
    by_id = config.get("added_tokens_decoder")
    if not by_id:
        by_id = {number: text for text, number in _read_json(folder / "added_tokens.json").items()}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    try:
        declared = [(_declared_token(token), int(number)) for number, token in by_id.items()]
        declared.sort(key=lambda entry: entry[1])
        texts = extra.values() if isinstance(extra, dict) else extra
        declared += [(_declared_token(token, special=True), None) for token in texts]
        absent: dict[str, tuple[tokenizers.AddedToken, int | None]] = {}
        for token, number in declared:
            if token.content not in present:
                absent.setdefault(token.content, (token, number))
        backend.add_tokens([token for token, _ in absent.values()])
    except (TypeError, ValueError, AttributeError, KeyError) as problem:
        message = "the tokens that tokenizer_config.json or added_tokens.json add cannot be read."
        raise CheckpointError("tokenizer.broken", message, where=str(folder), why=str(problem)) from None
    for text, (_, number) in absent.items():
        if number is not None and (actual := backend.token_to_id(text)) != number:
            raise CheckpointError(
                "tokenizer.broken",
                f"the token {shortened_text(text, SHOWN_WHY)!r} has two ids, {number} and {actual}.",
                where=str(folder),
                why="it is declared beside tokenizer.json, whose next token would be the second",
                fix="AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes them into one file",
            )
    return list(absent)


def _declared_token(token: Any, *, special: bool = False) -> tokenizers.AddedToken:
    content, flags = (token, {}) if isinstance(token, str) else (token["content"], token)
    if not isinstance(content, str) or not content:
        raise ValueError(f"{shortened_text(str(content), SHOWN_WHY)!r} is no token")
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    flags = {"special": special} | {name: flags[name] for name in names if isinstance(flags.get(name), bool)}
    return tokenizers.AddedToken(content, **flags)


def _special_tokens(folder: Path, config: dict, backend: tokenizers.Tokenizer) -> dict[str, str]:
    sources = (config, _read_json(folder / "special_tokens_map.json"))
    special = {}
    for name in SPECIAL:
        for source in sources:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                special.setdefault(name, text)
    for name in ("bos_token", "eos_token"):  # directories without tokenizer_config.json
        identity = _read_json(folder / "config.json").get(name + "_id")
        identity = identity[0] if isinstance(identity, list) and identity else identity
        if isinstance(identity, int) and 0 <= identity < 2**32:  # the backend counts in 32 bits
            text = backend.id_to_token(identity)
            if text is not None:
                special.setdefault(name, text)
    return special


def _named_stops(folder: Path, backend: tokenizers.Tokenizer, special: dict[str, str]) -> list[str]:
    """Returns the tokens that the model's files name as ends: the tokenizer's EOS, and lists of ids."""
    texts = [special.get("eos_token"), *map(backend.id_to_token, _named_stop_ids(folder))]
    return [text for text in dict.fromkeys(texts) if text]


def _named_stop_ids(folder: Path) -> list[int]:
    """Returns the ids that the model's files name as ends."""
    ids: list = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    return [number for number in ids if type(number) is int and 0 <= number < 2**32]


def _chat_template(folder: Path, config: dict) -> tuple[str, str] | None:
    """Returns the template of a model's folder and the file that has it; None if it has none."""
    path, value = folder / "chat_template.jinja", config.get("chat_template")
    where = folder / "tokenizer_config.json"
    if path.is_file():
        where = path
        try:
            value = read_text(path, TEMPLATE)
        except (OSError, UnicodeDecodeError) as problem:
            raise CheckpointError(
                "tokenizer.template", "the model's chat template cannot be read.", where=str(path), why=str(problem)
            ) from None
    if isinstance(value, list):  # several by name
        template_by_name = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = template_by_name.get("default")
    if not isinstance(value, str) or not value:
        return None
    if len(value) > TEMPLATE:
        why = f"it has {len(value)} characters, and a template has {TEMPLATE} at most"
        raise CheckpointError(
            "tokenizer.template", "the model's chat template cannot be read.", where=str(where), why=why
        )
    return value, str(where)
