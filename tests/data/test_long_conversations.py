"""Conversations of thousands of messages: the work grows with their length, not with its square. It is counted."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from data_helpers import MARKED_TEMPLATE, TEMPLATE, chat, learned

from lorafusion_jax.data import ChatTemplate
from lorafusion_jax.data.template import conversation
from lorafusion_jax.data.template.compiled import TemplateProblem

MANY = 5000
LOOK = 3  # messages


def messages_of(count: int) -> list[dict]:
    return [{**message, "reasoning_content": f"why {turn}"} for turn, message in enumerate(chat(*["yes no"] * count))]


@pytest.fixture
def rendered(monkeypatch) -> list[int]:
    """The number of messages of each render; not of those with which a process looks at a template once."""
    counts, render = [], conversation.render

    def count(source, values, marked=None):
        counts.extend(number for number in [len(values["messages"])] if number > LOOK)
        return render(source, values, marked)

    monkeypatch.setattr(conversation, "render", count)
    return counts


def test_marked_answers_take_one_render(load, marked_tokenizer, rendered):
    samples = load([{"messages": chat(*["yes no"] * MANY)}], tokenizer=marked_tokenizer, max_length=10**6)
    assert rendered == [MANY]
    assert learned(samples, marked_tokenizer) == ["yes no<|end|>"] * (MANY // 2)


@pytest.mark.parametrize("loss", ["all", "completion"])
def test_so_do_those_that_take_no_render_each(loss, load, tokenizer, rendered):
    """The whole text, or the last answer, of a template without marks."""
    samples = load([{"messages": chat(*["yes no"] * MANY)}], loss=loss, max_length=10**6)
    assert len(rendered) <= 2
    assert len(learned(samples, tokenizer)) == 1


def test_a_render_for_each_answer_has_a_limit(load, rendered):
    with pytest.raises(ValueError, match=r"5000 messages.* 1000 at most(.|\n)*generation"):
        load([{"messages": chat(*["yes no"] * MANY)}])
    assert rendered == []


class Searched(str):
    """A text that counts the characters that are looked at."""

    seen: ClassVar[Counter[str]] = Counter()

    def find(self, part, start=0):
        position = super().find(part, start)
        self.seen["characters"] += (position if position >= 0 else len(self)) - start
        return position

    def __contains__(self, part):
        self.seen["characters"] += len(self)
        return super().__contains__(part)


def test_what_a_template_leaves_out_is_looked_for_once_through_the_text(monkeypatch):
    source = MARKED_TEMPLATE.replace("{{ m.content }}", "{{ m.reasoning_content }}\n{{ m.content }}")
    seen = {}
    for count in (MANY // 10, MANY):
        messages = messages_of(count)
        text = Searched(ChatTemplate(source=source).render(messages))
        monkeypatch.setattr(Searched, "seen", Counter())
        assert conversation._first_omitted(text, messages) is None
        seen[count] = Searched.seen["characters"]
        assert seen[count] <= 8 * len(text)
    assert seen[MANY] < 12 * seen[MANY // 10]


class Offsets:
    """An encoding whose character ranges are a new list at every access."""

    def __init__(self, count: int):
        self.ids, self.accesses = [0] * count, 0

    @property
    def offsets(self):
        self.accesses += 1
        return [(token, token + 1) for token in range(len(self.ids))]


def test_a_mask_reads_the_ranges_of_tokens_once(tokenizer):
    answers = tuple((start, start + 3) for start in range(0, MANY, 10))
    sample = conversation.Rendered(text="x" * MANY, answers=answers)
    encoding = Offsets(MANY)
    mask = tokenizer._with_loss_mask(sample, encoding).mask
    np.testing.assert_array_equal(np.flatnonzero(mask), [start + more for start, _ in answers for more in range(3)])
    assert encoding.accesses == 1


def test_a_long_conversation_without_marks_is_as_it_was():
    """Up to the limit, each answer begins after the prompt that is written before it."""
    template = ChatTemplate(source=TEMPLATE, special_tokens={"eos_token": "<|end|>"})
    short = template.render_answers(chat(*["yes"] * 6))
    assert [short.text[start:stop] for start, stop in short.answers] == ["yes<|end|>"] * 3
    with pytest.raises(TemplateProblem, match="1001 messages"):
        template.render_answers(chat(*["yes"] * 1001))
