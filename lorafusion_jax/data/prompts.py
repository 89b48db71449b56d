"""Turns prompts to tokens as training does: through the model's chat template, where it has one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lorafusion_jax.config.read import has_half_character
from lorafusion_jax.data.template.chat import ChatTemplate
from lorafusion_jax.data.template.compiled import TemplateProblem
from lorafusion_jax.data.template.left_out import left_out_key, left_out_message
from lorafusion_jax.data.tokenizer import Tokenizer
from lorafusion_jax.errors import DataError
from lorafusion_jax.families.hf_config import shortened

FIXES = "give a text instead of messages", "--raw: without the template"  # no template; one that refuses
FIXES_OF_REQUESTS = "a text to /v1/completions", "messages that the template writes, or a text to /v1/completions"

type Message = Mapping[str, Any]
type Prompt = str | Sequence[Message] | Sequence[int]


def prompt_tokens(
    prompt: Prompt, tokenizer: Tokenizer, *, raw: bool = False, system: str | None = None, where: str = "the prompt",
    by_request: bool = False,
) -> list[int]:  # fmt: skip
    """Encodes a prompt.

    Args:
        prompt: a text, messages, or tokens. A text is a user's message, if the model has a chat template.
        raw: encode a text as it is.
        system: a system message before the prompt.
        by_request: the prompt is from a request, whose messages have no key that the template does not write.

    Raises:
        DataError: `generate.prompt`, `generate.no-template`, `generate.template`, `generate.left-out`.
    """
    if not isinstance(prompt, str):
        _check_items(prompt, where)
        _check_system(prompt, system, where)
        if not any(isinstance(item, Mapping) for item in prompt):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
    _check_characters(prompt, system, where)
    template = tokenizer.chat_template
    text_fix, raw_fix = FIXES_OF_REQUESTS if by_request else FIXES
    if isinstance(prompt, str) and (raw or template is None):
        if system is not None:
            message = f"{where} has a system message, and a text without a chat template has none."
            raise DataError("generate.no-template", message, fix="put it in front of the text")
        return _with_begin(tokenizer.encode(prompt), tokenizer) if prompt else []
    if template is None:
        message = f"{where} has messages, but the model has no chat template."
        raise DataError("generate.no-template", message, fix=text_fix)
    turns: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages: list[dict[str, Any]] = [dict(message) for message in turns]
    has_system = bool(messages) and messages[0].get("role") in ("system", "developer")
    messages = messages if system is None or has_system else [{"role": "system", "content": system}, *messages]
    if not prompt:
        return []
    messages = list(template.with_arguments(messages))
    try:
        text = template.render(messages, add_generation_prompt=True)
        left_out = _left_out(template, messages, text, keys=by_request)
    except TemplateProblem as problem:
        message = f"the chat template cannot render {where}."
        raise DataError("generate.template", message, why=str(problem), fix=raw_fix) from None
    if left_out is not None:
        message = f"the chat template of the model leaves out {left_out} of {where}."
        raise DataError("generate.left-out", message, why="the model would not see it", fix=raw_fix)
    return tokenizer.encode(text)


def _left_out(template: ChatTemplate, messages: list[dict[str, Any]], text: str, *, keys: bool) -> str | None:
    if (number := left_out_message(template, messages, text)) is not None:
        return f"message {number}, which has the role {shortened(messages[number].get('role'))},"
    if keys and (turn_and_key := left_out_key(template, messages, text)) is not None:
        return f"{turn_and_key[1]} of message {turn_and_key[0]}"
    return None


def _check_items(prompt: Sequence[object], where: str) -> None:
    """Checks that a prompt that is no text has messages only, or token ids only."""
    kinds = {"messages": Mapping, "token ids": (int, np.integer)}
    whose = "messages" if any(isinstance(item, Mapping) for item in prompt) else "token ids"
    for number, item in enumerate(prompt):
        if isinstance(item, bool) or not isinstance(item, kinds[whose]):
            message = f"{where} has {shortened(item)} among its {whose}, at {number}."
            raise DataError("generate.prompt", message, fix="a text, a list of messages, or a list of token ids")


def _check_characters(prompt: object, system: str | None, where: str) -> None:
    """Checks that a prompt can be encoded."""
    if has_half_character(json.dumps([prompt, system], ensure_ascii=False, default=str)):
        message = f"{where} has half a character (a lone surrogate)."
        why, fix = "bytes that are not UTF-8 are read so, and so are parts of emojis", "the text in UTF-8"
        raise DataError("generate.prompt", message, why=why, fix=fix)


def _check_system(prompt: Sequence[Any], system: str | None, where: str) -> None:
    """Checks that a system message can stand before a prompt that is no text."""
    if system is None or len(prompt) == 0:
        return
    if not isinstance(prompt[0], Mapping):
        why = "a list of tokens is taken as it is"
    elif prompt[0].get("role") in ("system", "developer") and prompt[0].get("content") != system:
        why = "its messages begin with another one"
    else:
        return
    message = f"{where} cannot have the system message {shortened(system)}: {why}."
    raise DataError("generate.prompt", message, fix="leave out one of them")


def _with_begin(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    bos = tokenizer.bos_id
    return [bos, *tokens] if tokenizer.adds_bos and bos is not None and tokens[:1] != [bos] else tokens
