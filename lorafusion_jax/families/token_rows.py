"""Trainable tokens of a job file: ids, or texts that the base's tokenizer knows as one token each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from lorafusion_jax.adapters.tokens import MODULES, TokenRows
from lorafusion_jax.errors import ConfigError, LoraFusionError, did_you_mean, raise_all
from lorafusion_jax.families.hf_config import shortened
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.readable import TOKENIZER, read_text

type Tokens = Sequence[int | str]

CODE = "lora.trainable-tokens"
MOST_TOKENS = 2**16
LARGEST_ID = 2**31 - 1
WANTED = (
    "a list of different ids or tokens, e.g. ['<think>', 128002], or a table of such lists, {embed_tokens: …, "
    "lm_head: …}"
)


def check_tokens(value: object) -> object:
    """Checks `lora.trainable_tokens` and returns it.

    Raises:
        ValueError: what is wanted instead.
    """
    if value is None:
        return None
    lists = value if isinstance(value, dict) else {"embed_tokens": value}
    if not lists or not set(lists) <= set(MODULES):
        raise ValueError(f"{WANTED}, not {shortened(value)}")
    for tokens in lists.values():
        if tokens in ([], ()):
            raise ValueError("at least one token; leave trainable_tokens out to train none")
        if not isinstance(tokens, list | tuple) or not _are_tokens(tokens):
            raise ValueError(f"{WANTED}, not {shortened(tokens)}")
    return value


def _are_tokens(tokens: Sequence[object]) -> bool:
    return all(map(_is_token, tokens)) and len(set(tokens)) == len(tokens) <= MOST_TOKENS


def _is_token(token: object) -> bool:
    if isinstance(token, str):
        return bool(token)
    return type(token) is int and 0 <= token <= LARGEST_ID


def token_rows(name: str, tokens: Tokens | Mapping[str, Tokens] | None, tokenizer: Path | None) -> TokenRows | None:
    """Resolves `lora.trainable_tokens` to ids.

    Args:
        name: of the adapter.
        tokenizer: tokenizer.json of the base (None: unknown).

    Raises:
        ConfigError: `lora.trainable-tokens`, a text is no token, or two are the same.
    """
    if tokens is None:
        return None
    lists = tokens if isinstance(tokens, Mapping) else {"embed_tokens": tokens}
    ids = {MODULES[module]: _ids(name, of_module, tokenizer) for module, of_module in lists.items()}
    return TokenRows(embed=ids.get("embed", ()), head=ids.get("head", ()))


def unusable_rows(name: str, rows: TokenRows, model: ModelConfig) -> Iterator[LoraFusionError]:
    """Yields an error for everything about an adapter's trainable tokens that a model cannot have."""
    sizes = {"embed": ("the base", model.vocab_size), "head": ("the base's head", model.num_outputs)}
    for table, ids in rows.stored.items():
        base, size = sizes[table]
        if not (outside := [token for token in ids if token >= size]):
            continue
        yield ConfigError(
            CODE,
            f"{name}: trainable_tokens has {outside[0]}, and {base} has the tokens 0 to {size - 1}.",
            why="a row that trains must exist",
            fix="resize the base's embedding first (resize_token_embeddings of transformers), and save it",
        )
    if model.input_width:
        yield ConfigError(
            CODE,
            f"{name}: trainable_tokens, and the layers of this base ({model.family}) have inputs of their own.",
            why="these are made of the embeddings, too, without a gradient",
            fix="leave lora.trainable_tokens out",
        )
    if rows.head and model.tie_embeddings:
        yield ConfigError(
            CODE,
            f"{name}: trainable_tokens names rows of lm_head, and the base's head is its embedding.",
            fix="name them once, in a list: both uses of a row are trained",
        )


def _ids(name: str, tokens: Tokens, tokenizer: Path | None) -> tuple[int, ...]:
    texts = [token for token in tokens if isinstance(token, str)]
    id_of = _vocabulary(tokenizer) if texts else {}
    raise_all([_unknown(name, text, id_of) for text in texts if text not in id_of])
    ids = tuple(id_of[token] if isinstance(token, str) else token for token in tokens)
    if len(set(ids)) < len(ids):
        counts = Counter(ids)
        twice = next(token for token, number in zip(tokens, ids, strict=True) if counts[number] > 1)
        raise ConfigError(CODE, f"{name}: trainable_tokens has '{twice}' twice, as a text and as an id.")
    return ids


def _unknown(name: str, text: str, id_of: Mapping[str, int]) -> ConfigError:
    near = did_you_mean(text, list(id_of)) if len(id_of) < MOST_TOKENS else ""
    return ConfigError(
        CODE,
        f"{name}: trainable_tokens has '{text}', which is no token of the base's tokenizer"
        + (f"; {near}" if near else "."),
        why="a row belongs to one token, spelled as in tokenizer.json",
        fix="add it to the tokenizer and resize the base's embedding; or give the id of a token",
    )


def _vocabulary(tokenizer: Path | None) -> Mapping[str, int]:
    if tokenizer is None:
        return {}
    try:
        return _read_vocabulary(tokenizer, tokenizer.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # its readers say why
        return {}


@lru_cache(maxsize=4)
def _read_vocabulary(tokenizer: Path, changed: int) -> Mapping[str, int]:
    del changed  # a key of the cache
    raw = json.loads(read_text(tokenizer, TOKENIZER))
    pieces = raw["model"]["vocab"]
    id_of = dict(pieces) if isinstance(pieces, dict) else {piece: number for number, (piece, _) in enumerate(pieces)}
    return id_of | {token["content"]: token["id"] for token in raw.get("added_tokens", [])}
