"""Turns prompts to tokens as training does: through the model's chat template, where it has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lorafusion_jax.data.template.compiled import TemplateProblem
from lorafusion_jax.data.tokenizer import Tokenizer
from lorafusion_jax.errors import DataError
from lorafusion_jax.families.hf_config import shortened

type Message = Mapping[str, Any]
type Prompt = str | Sequence[Message] | Sequence[int]


def prompt_tokens(
    prompt: Prompt, tokenizer: Tokenizer, *, raw: bool = False, system: str | None = None, where: str = "the prompt"
) -> list[int]:
    """Encodes a prompt.

    Args:
        prompt: a text, messages, or tokens. A text is a user's message, if the model has a chat template.
        raw: encode a text as it is.
        system: a system message before the prompt.

    Raises:
        DataError: `generate.prompt`, `generate.no-template`, `generate.template`.
    """
    if not isinstance(prompt, str):
        _check_items(prompt, where)
        _check_system(prompt, system, where)
        if not any(isinstance(item, Mapping) for item in prompt):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
    template = tokenizer.chat_template
    if isinstance(prompt, str) and (raw or template is None):
        if system is not None:
            message = f"{where} has a system message, and a text without a chat template has none."
            raise DataError("generate.no-template", message, fix="put it in front of the text")
        return _with_begin(tokenizer.encode(prompt), tokenizer) if prompt else []
    if template is None:
        message = f"{where} has messages, but the model has no chat template."
        raise DataError("generate.no-template", message, fix="give a text instead of messages")
    turns: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages: list[dict[str, Any]] = [dict(message) for message in turns]
    has_system = bool(messages) and messages[0].get("role") in ("system", "developer")
    messages = messages if system is None or has_system else [{"role": "system", "content": system}, *messages]
    if not prompt:
        return []
    try:
        return tokenizer.encode(template.render(template.with_arguments(messages), add_generation_prompt=True))
    except TemplateProblem as problem:
        message = f"the chat template cannot render {where}."
        raise DataError("generate.template", message, why=str(problem), fix="--raw: without the template") from None


def _check_items(prompt: Sequence[object], where: str) -> None:
    """Checks that a prompt that is no text has messages only, or token ids only."""
    kinds = {"messages": Mapping, "token ids": (int, np.integer)}
    whose = "messages" if any(isinstance(item, Mapping) for item in prompt) else "token ids"
    for number, item in enumerate(prompt):
        if isinstance(item, bool) or not isinstance(item, kinds[whose]):
            message = f"{where} has {shortened(item)} among its {whose}, at {number}."
            raise DataError("generate.prompt", message, fix="a text, a list of messages, or a list of token ids")


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
