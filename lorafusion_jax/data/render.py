"""Renders examples to tokens and loss masks, with or without a chat template.

Pairs go through the model's chat template as user and assistant, so that training and inference see the same text.
Without a template a pair becomes prompt, answer and end token, with an empty line after an instruction. Texts never use
a template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lorafusion_jax.data.row_parsers import Chat, Example, Pair, Text
from lorafusion_jax.data.rows import Rows
from lorafusion_jax.data.template.chat import ChatTemplate, parse_arguments, quoted_arguments
from lorafusion_jax.data.template.compiled import TemplateLimit, TemplateProblem
from lorafusion_jax.data.template.conversation import Rendered
from lorafusion_jax.data.template.left_out import unread_keys
from lorafusion_jax.data.tokenizer import Encoded, Tokenizer
from lorafusion_jax.errors import DataError, shortened_text

AFTER_PROMPT = "after prompt"
EXCERPT = 80  # characters of a text in a note


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """Tokens of every row, and notes on content that the tokens omit."""

    samples: list[Encoded]
    notes: tuple[str, ...] = ()


def encode_examples(
    examples: Sequence[Example], tokenizer: Tokenizer, *, rows: Rows, adapter: str, loss: str, ends: bool = True
) -> EncodedRows:
    """Renders and tokenises samples.

    Args:
        loss: "assistant" (every answer), "completion" (the last answer, or those of the row's completion), "all", or
            "after prompt": the tokens after those that the text shares with its prompt, as TRL splits them.
        ends: an answer ends with a token at which generation stops, even where the template writes none.

    Raises:
        DataError: data.no-template, data.template, data.template-limit (with the rows).
        CheckpointError: tokenizer.missing.
    """
    tokenizer.require()
    template = tokenizer.chat_template
    if template is not None and not isinstance(examples[0], Text):
        chats = [_as_chat(example) for example in examples]
        rendered = _render_all(chats, template if ends else replace(template, stops=()), rows, adapter, loss)
        samples, twice = _end_once(tokenizer.encode_rendered(rendered), tokenizer, rows)
        of_rows = (*_omissions(rendered, rows), *_quoted(chats, rendered, rows), *_ends(rendered, rows, template))
        notes = (*of_rows, *_unread_keys(chats, template), *twice)
        return EncodedRows(samples=samples, notes=notes)
    chatting = [row for row, example in enumerate(examples) if isinstance(example, Chat)]
    if chatting:
        raise DataError(
            "data.no-template",
            f"{adapter}: {len(chatting)} of {len(examples)} rows hold conversations (or a system text, tools or a "
            "history), but the base model has no chat template to write them with.",
            where=rows.places(chatting),
            fix="data.chat_template: a name such as chatml or a file; or use the model's instruct version, or give the "
            "rows as prompt and completion",
        )
    plain = [_render_plain(example, loss) for example in examples]
    encoded = tokenizer.encode_rendered(plain)
    notes = tuple(_ended_before(plain, encoded, tokenizer, rows))
    return EncodedRows(samples=[_with_ends(sample, tokenizer) for sample in encoded], notes=notes)


def joined_note(examples: Sequence[Example], tokenizer: Tokenizer, rows: Rows) -> list[str]:
    """Returns a note on pairs that become one text without a chat template, if that may not be what was meant: those of
    an instruction, and those without white space between prompt and answer."""
    pairs = [example for example in examples if isinstance(example, Pair) and example.prompt]
    if tokenizer.chat_template is not None or not pairs or any(map(_has_space, pairs)):
        return []
    prompt, answer, joint = pairs[0]
    how = "joined, with an empty line between them" if joint else "joined, with nothing between them"
    parts = "instruction, input and output" if joint else "prompt and answer"
    template = "alpaca writes Alpaca's words around them" if joint else "chatml, alpaca or another writes them as turns"
    return [
        f"[data.no-template] the base has no chat template, so {parts} are {how}, as in {rows.locate(0)}: "
        f"{shortened_text(repr(prompt + joint + answer), EXCERPT)}. data.chat_template: {template}"
    ]


def _has_space(pair: Pair) -> bool:
    return not pair.joint and (pair.prompt[-1:] + pair.answer[:1]).split() != [pair.prompt[-1:] + pair.answer[:1]]


def _as_chat(example: Example) -> Chat:
    match example:
        case Chat():
            return example
        case Pair(prompt, answer):
            return Chat([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}])
    raise TypeError("plain text has no roles")


def _render_all(chats: Sequence[Chat], template: ChatTemplate, rows: Rows, adapter: str, loss: str) -> list[Rendered]:
    rendered, bad = [], []
    for row, chat in enumerate(chats):
        try:
            rendered.append(_by_template(chat, template, loss))
        except TemplateLimit as problem:  # other rows would take as long
            raise DataError(
                "data.template-limit",
                f"{adapter}: the chat template takes too much time or memory.",
                where=rows.places([row]),
                why=str(problem),
                fix="a shorter row, or another template by data.chat_template",
            ) from None
        except TemplateProblem as problem:
            bad.append((row, str(problem)))
    if bad:
        raise rows.refuse(
            "data.template",
            f"{adapter}: the chat template cannot write {len(bad)} of {len(chats)} rows.",
            bad,
            fix="repair the rows, or name a template by data.chat_template that can write them, with {% generation %} "
            "around the assistant's text",
        )
    return rendered


def _by_template(chat: Chat, template: ChatTemplate, loss: str) -> Rendered:
    extras = {"tools": chat.tools, "variables": chat.variables}
    chat = chat._replace(messages=list(template.with_arguments(chat.messages, **extras)))
    if loss == "all":
        if chat.muted:
            raise TemplateProblem(
                f"message {min(chat.muted)} is excluded from the loss, but data.loss: all learns every token"
            )
        return template.render_whole(chat.messages, **extras)
    if loss == AFTER_PROMPT:
        turns = [turn for turn, message in enumerate(chat.messages) if message["role"] == "assistant"]
        return template.render_after_prompt(chat.messages, chat.answer_from or (turns[-1] if turns else 0), **extras)
    first = chat.answer_from if loss == "completion" else 0
    learned = [turn >= first and turn not in chat.muted for turn in range(len(chat.messages))]
    last_only = loss == "completion" and not first
    return template.render_answers(chat.messages, last_only=last_only, learned=learned, **extras)


def _omissions(rendered: Sequence[Rendered], rows: Rows) -> list[str]:
    """Returns notes on rows with content that the template leaves out."""
    notes = []
    parts = [(row, sample.omits_message) for row, sample in enumerate(rendered) if sample.omits_message is not None]
    if parts:
        row, message = parts[0]
        notes.append(
            f"[data.template-omits] the chat template leaves out some text of {len(parts)} of {len(rendered)} rows, "
            f"first {rows.locate(row)}, message {message}"
        )
    tools = [row for row, sample in enumerate(rendered) if sample.omits_tools]
    if tools:
        notes.append(
            f"[data.template-tools] the chat template does not write the tools of {len(tools)} of {len(rendered)} "
            f"rows, first {rows.locate(tools[0])}"
        )
    return notes


def _quoted(chats: Sequence[Chat], rendered: Sequence[Rendered], rows: Rows) -> list[str]:
    """Returns a note on calls whose arguments are learned as a quoted text."""
    quoted = [
        row
        for row, (chat, sample) in enumerate(zip(chats, rendered, strict=True))
        if quoted_arguments([parse_arguments(message) for message in chat.messages], sample.text)
    ]
    if not quoted:
        return []
    return [
        f"[data.quoted-arguments] {len(quoted)} of {len(rendered)} rows have calls whose arguments are a text that is "
        f"no JSON object, first {rows.locate(quoted[0])}: the chat template writes it in quotes"
    ]


def _ends(rendered: Sequence[Rendered], rows: Rows, template: ChatTemplate) -> list[str]:
    """Returns notes on answers whose ends are not those of generation."""
    stops, notes = ", ".join(template.stops), []
    if without := [row for row, sample in enumerate(rendered) if sample.unended is not None]:
        notes.append(
            f"[data.no-end] {len(without)} of {len(rendered)} rows have answers that do not end with a token at which "
            f"generation stops ({stops}), first {rows.locate(without[0])}, message {rendered[without[0]].unended}: the "
            "adapter does not learn to stop there. Put {{ eos_token }} after answers in the model's chat template"
        )
    if early := [row for row, sample in enumerate(rendered) if sample.ends_early is not None]:
        notes.append(
            f"[data.early-end] {len(early)} of {len(rendered)} rows have answers that hold a token at which generation "
            f"stops ({stops}) before their end, first {rows.locate(early[0])}, message {rendered[early[0]].ends_early}"
        )
    return notes


def _end_once(samples: list[Encoded], tokenizer: Tokenizer, rows: Rows) -> tuple[list[Encoded], list[str]]:
    """Drops the end token that a template adds to an answer which ends with it: a model would learn to go on after its
    end. Returns the samples and a note."""
    doubled = _repeated_ends(samples, tokenizer.special_ids)
    if not doubled:
        return samples, []
    row, places = next(iter(doubled.items()))
    token = tokenizer.piece(int(samples[row].tokens[places[0]]))
    once = [
        Encoded(np.delete(sample.tokens, doubled[row]), np.delete(sample.mask, doubled[row]))
        if row in doubled
        else sample
        for row, sample in enumerate(samples)
    ]
    return once, [
        f"[data.end-twice] {len(doubled)} of {len(samples)} rows have answers that end with {token}, which the chat "
        f"template adds, first {rows.locate(row)}: it is learned once"
    ]


def _ended_before(
    rendered: Sequence[Rendered], samples: Sequence[Encoded], tokenizer: Tokenizer, rows: Rows
) -> list[str]:
    """Returns a note on texts that end already, behind which the end token is added: they were rendered before."""
    eos, stops = tokenizer.eos_id, set(tokenizer.stop_ids)
    ends = tuple(text for text, number in tokenizer.special_texts.items() if number in stops)
    ended = [
        row
        for row, (text, sample) in enumerate(zip(rendered, samples, strict=True))
        if eos is not None and sample.tokens[-1:].tolist() != [eos] and text.text.rstrip().endswith(ends)
    ]
    if not ended:
        return []
    end = next(end for end in ends if rendered[ended[0]].text.rstrip().endswith(end))
    return [
        f"[data.end-twice] {len(ended)} of {len(samples)} rows end with {end} already, and {tokenizer.piece(eos or 0)} "
        f"is added behind it and learned, first {rows.locate(ended[0])}: take the end out of the text, or give the row "
        "as messages"
    ]


def _repeated_ends(samples: Sequence[Encoded], special: np.ndarray) -> dict[int, np.ndarray]:
    """Returns, by row, the positions of special tokens that end what is learned and repeat the token before them."""
    lengths = np.array([len(sample.tokens) for sample in samples])
    starts = np.cumsum(lengths + 1) - lengths - 1  # with a position that is not learned between two rows
    tokens, mask = np.full(int((lengths + 1).sum()), -1), np.zeros(int((lengths + 1).sum()), bool)
    written = np.arange(int(lengths.sum())) + np.repeat(np.arange(len(samples)), lengths)
    tokens[written] = np.concatenate([sample.tokens for sample in samples])
    mask[written] = np.concatenate([sample.mask for sample in samples])
    repeats = mask[:-2] & mask[1:-1] & ~mask[2:] & (tokens[1:-1] == tokens[:-2])
    positions = 1 + np.flatnonzero(repeats)
    # Most rows have none, and looking up all of their tokens took a tenth of the time of reading short rows.
    positions = positions[np.isin(tokens[positions], special)]
    rows = np.searchsorted(starts, positions, side="right") - 1
    return {row: positions[rows == row] - starts[row] for row in dict.fromkeys(rows.tolist())}


def _unread_keys(chats: Sequence[Chat], template: ChatTemplate) -> list[str]:
    """Returns notes on message keys and variables that the template does not use."""
    messages = (message for chat in chats for message in chat.messages)
    unread = unread_keys(template, messages, {str(name) for chat in chats for name in chat.variables})
    if not unread:
        return []
    names = ", ".join(f"'{key}'" for key in unread)
    values = [message.get(key) for chat in chats for message in chat.messages for key in unread]
    flags = any(isinstance(value, int | float) and value in (0, 1) for value in values)
    learned = "; whatever they say, answers are learned: train: false leaves one out" if flags else ""
    return [f"[data.unused-key] the chat template does not use {names} of messages or chat_template_kwargs{learned}"]


def _render_plain(example: Example, loss: str) -> Rendered:
    match example:
        case Pair(prompt, answer, joint):
            start = len(prompt + joint)
            if loss == AFTER_PROMPT:
                return Rendered(text=prompt + joint + answer, answers=(), prompt=prompt + joint)
            rendered = Rendered(text=prompt + joint + answer, answers=((start, start + len(answer)),))
            return _render_all_learned(rendered.text) if loss == "all" else rendered
        case Text(text):
            return _render_all_learned(text)
    raise TypeError("conversations need a template")


def _render_all_learned(text: str) -> Rendered:
    return Rendered(text=text, answers=((0, len(text)),))


def _with_ends(sample: Encoded, tokenizer: Tokenizer) -> Encoded:
    """Adds the BOS and EOS tokens where the text lacks them."""
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    has_bos, has_eos = sample.tokens[:1].tolist() == [bos], sample.tokens[-1:].tolist() == [eos]
    begin = [bos] if tokenizer.adds_bos and bos is not None and not has_bos else []
    end = [eos] if eos is not None and not has_eos else []
    learns = bool(sample.mask.any())  # an empty text has no learned tokens, EOS included
    tokens = np.concatenate([np.array(begin, np.int32), sample.tokens, np.array(end, np.int32)])
    mask = np.concatenate([np.zeros(len(begin), bool), sample.mask, np.full(len(end), learns)])
    return Encoded(tokens, mask)
