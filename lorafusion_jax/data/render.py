"""What samples say → tokens and the mask of what is learned: by chat template, or plainly.

Pairs go through the model's chat template as user and assistant, so that training and use see the same text. Without a
template they are written plainly: prompt, for instructions an empty line, answer, end token. Texts are always plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lorafusion_jax.data.formats import Chat, Pair, Saying, Text
from lorafusion_jax.data.sources import Rows
from lorafusion_jax.data.template import ChatTemplate, Rendered, TemplateProblem
from lorafusion_jax.data.tokenizer import Encoded, Tokenizer
from lorafusion_jax.errors import DataError


def encode_sayings(
    sayings: Sequence[Saying], tokenizer: Tokenizer, *, rows: Rows, adapter: str, loss: str
) -> list[Encoded]:
    """Renders and tokenises samples.

    Args:
        loss: assistant (every answer), completion (the last answer) or all.

    Raises:
        DataError: data.no-template, data.template (names the rows).
    """
    template = tokenizer.chat_template
    if template is not None and not isinstance(sayings[0], Text):
        rendered = _render_all(sayings, rows, adapter, lambda saying: _by_template(saying, template, loss))
        return tokenizer.encode_rendered(rendered)
    if isinstance(sayings[0], Chat):
        raise DataError(
            "data.no-template",
            f"{adapter}: {rows.source} holds conversations, but the base model has no "
            "chat template to write them with.",
            where=rows.source,
            fix="use the model's instruct version, or put a chat_template.jinja into its folder, or give "
            "the rows as prompt and completion",
        )
    rendered = [_plainly(saying, loss) for saying in sayings]
    return [_with_ends(sample, tokenizer) for sample in tokenizer.encode_rendered(rendered)]


def _render_all(
    sayings: Sequence[Saying], rows: Rows, adapter: str, render: Callable[[Saying], Rendered]
) -> list[Rendered]:
    rendered, bad = [], []
    for row, saying in enumerate(sayings):
        try:
            rendered.append(render(saying))
        except TemplateProblem as problem:
            bad.append((row, str(problem)))
    if bad:
        raise DataError(
            "data.template",
            f"{adapter}: the chat template cannot write {len(bad)} of {len(sayings)} rows.",
            where=rows.places([row for row, _ in bad]),
            why=f"{rows.place(bad[0][0])}: {bad[0][1]}",
            fix="repair the rows, or a chat_template.jinja in the model's folder with {% generation %} "
            "around what the assistant says",
        )
    return rendered


def _by_template(saying: Saying, template: ChatTemplate, loss: str) -> Rendered:
    match saying:
        case Chat(messages, tools):
            pass
        case Pair(prompt, answer):
            messages, tools = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], None
        case _:
            raise TypeError("plain text has no roles")
    if loss == "all":
        return _whole(template.render(messages, tools=tools))
    return template.render_answers(messages, tools=tools, last_only=loss == "completion")


def _plainly(saying: Saying, loss: str) -> Rendered:
    match saying:
        case Pair(prompt, answer, joint):
            start = len(prompt + joint)
            rendered = Rendered(text=prompt + joint + answer, answers=((start, start + len(answer)),))
            return _whole(rendered.text) if loss == "all" else rendered
        case Text(text):
            return _whole(text)
    raise TypeError("conversations need a template")


def _whole(text: str) -> Rendered:
    return Rendered(text=text, answers=((0, len(text)),))


def _with_ends(sample: Encoded, tokenizer: Tokenizer) -> Encoded:
    begin = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    end = [tokenizer.eos_id] if tokenizer.eos_id is not None else []
    learns = bool(sample.mask.any())  # an empty text teaches nothing, not even to end
    tokens = np.concatenate([np.array(begin, np.int32), sample.tokens, np.array(end, np.int32)])
    mask = np.concatenate([np.zeros(len(begin), bool), sample.mask, np.full(len(end), learns)])
    return Encoded(tokens, mask)
