"""What samples say → tokens and the mask of what is learned: by chat template, or plainly.

Pairs go through the model's chat template as user and assistant, so that training and use see the same text. Without a
template they are written plainly: prompt, for instructions an empty line, answer, end token. Texts are always plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lorafusion_jax.data.formats import Chat, Pair, Saying, Text
from lorafusion_jax.data.sources import Rows
from lorafusion_jax.data.template import Rendered, TemplateProblem
from lorafusion_jax.data.tokenizer import Encoded, Tokenizer
from lorafusion_jax.errors import DataError


def encode_sayings(sayings: Sequence[Saying], tokenizer: Tokenizer, *, rows: Rows, adapter: str,
                   loss: str) -> list[Encoded]:
    """Renders and tokenises samples.

    Args:
        loss: assistant (every answer), completion (the last answer) or all.

    Raises:
        DataError: data.no-template, data.template (names the rows).
    """
    plain = isinstance(sayings[0], Text) or tokenizer.chat_template is None
    if plain and isinstance(sayings[0], Chat):
        raise DataError("data.no-template", f"{adapter}: {rows.source} holds conversations, but the base model has no "
                        "chat template to write them with.", where=rows.source,
                        fix="use the model's instruct version, or put a chat_template.jinja into its folder, or give "
                        "the rows as prompt and completion")
    rendered = _render_all(sayings, rows, adapter, _plain if plain else _templated(tokenizer, loss))
    if loss == "all":
        rendered = [Rendered(text=sample.text, answers=((0, len(sample.text)),)) for sample in rendered]
    encoded = tokenizer.encode_rendered(rendered)
    return [_with_ends(sample, tokenizer) for sample in encoded] if plain else encoded


def _render_all(sayings: Sequence[Saying], rows: Rows, adapter: str, render: Callable[[Saying], Rendered]):
    rendered, bad = [], []
    for row, saying in enumerate(sayings):
        try:
            rendered.append(render(saying))
        except TemplateProblem as problem:
            bad.append((row, str(problem)))
    if bad:
        raise DataError("data.template", f"{adapter}: the chat template cannot write {len(bad)} of {len(sayings)} "
                        "rows.", where=rows.places([row for row, _ in bad]),
                        why=f"{rows.place(bad[0][0])}: {bad[0][1]}",
                        fix="repair the rows, or a chat_template.jinja in the model's folder with {% generation %} "
                        "around what the assistant says")
    return rendered


def _templated(tokenizer: Tokenizer, loss: str) -> Callable[[Saying], Rendered]:
    template = tokenizer.chat_template

    def render(saying: Saying) -> Rendered:
        chat = _as_chat(saying) if isinstance(saying, Pair) else saying
        if loss == "all":
            return Rendered(text=template.render(chat.messages, tools=chat.tools), answers=())
        return template.render_answers(chat.messages, tools=chat.tools, last_only=loss == "completion")

    return render


def _as_chat(pair: Pair) -> Chat:
    return Chat([{"role": "user", "content": pair.prompt}, {"role": "assistant", "content": pair.answer}])


def _plain(saying: Saying) -> Rendered:
    if isinstance(saying, Text):
        return Rendered(text=saying.text, answers=((0, len(saying.text)),))
    before = saying.prompt + saying.joint
    return Rendered(text=before + saying.answer, answers=((len(before), len(before) + len(saying.answer)),))


def _with_ends(sample: Encoded, tokenizer: Tokenizer) -> Encoded:
    begin = [tokenizer.bos_id] if tokenizer.adds_bos else []
    end = [tokenizer.eos_id] if tokenizer.eos_id is not None else []
    learns = bool(sample.mask.any())  # an empty text teaches nothing, not even to end
    return Encoded(np.concatenate([begin, sample.tokens, end]).astype(np.int32),
                   np.concatenate([[False] * len(begin), sample.mask, [learns] * len(end)]).astype(bool))
