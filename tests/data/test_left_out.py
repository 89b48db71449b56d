"""What a chat template leaves out of messages without an error is found."""

from __future__ import annotations

import pytest
from template_fixtures import DEFAULT_SYSTEM_AND_TOOLS

from lorafusion_jax.data.template.chat import ChatTemplate
from lorafusion_jax.data.template.left_out import left_out_key, left_out_message

ONLY_TWO = """\
{%- if messages[0].role == 'system' %}{{ messages[0].content ~ '\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role in ('user', 'assistant') %}
{{- m.role ~ (' ' ~ m.name if m.name) ~ ': ' ~ m.content.split('</t>')[-1] ~ '\\n' }}{% endif %}
{%- endfor %}"""
USER, SYSTEM = {"role": "user", "content": "how many"}, {"role": "system", "content": "be brief"}
CALL = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": "{}"}}


def in_text(source: str, messages: list[dict]) -> str:
    return ChatTemplate(source=source).render(messages, add_generation_prompt=True)


def find(source: str, messages: list[dict]) -> tuple[int | None, tuple[int, str] | None]:
    template = ChatTemplate(source=source)
    text = template.render(messages, add_generation_prompt=True)
    return left_out_message(template, messages, text), left_out_key(template, messages, text)


@pytest.mark.parametrize(
    ("messages", "left_out"),
    [
        ([SYSTEM, USER], None),
        ([USER, SYSTEM], 1),  # this template writes the first one only
        ([USER, {"role": "tool", "content": "seven"}, USER], 1),
        ([USER, {"role": "assistant", "content": "<t>four and three</t>seven"}, USER], None),  # written, in part
    ],
)
def test_a_message_that_is_not_written_is_found(messages, left_out):
    assert find(ONLY_TWO, messages)[0] == left_out


@pytest.mark.parametrize(
    ("source", "more", "left_out"),
    [
        (ONLY_TWO, {"name": "eve"}, None),
        (DEFAULT_SYSTEM_AND_TOOLS, {"name": "eve"}, (0, "name")),
        (ONLY_TWO, {"mood": "good"}, (0, "mood")),
    ],
)
def test_a_key_that_is_not_written_is_found(source, more, left_out):
    assert find(source, [USER | more, USER])[1] == left_out


def test_calls_and_their_results_are_written_or_named():
    said = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    said += [{"role": "tool", "content": "seven", "tool_call_id": "c1", "name": "count"}]
    assert find(DEFAULT_SYSTEM_AND_TOOLS, said) == (None, None)
    assert find(ONLY_TWO, said) == (2, (1, "tool_calls"))


def test_thoughts_count_as_written_where_the_template_knows_them():
    said = [USER, {"role": "assistant", "content": "seven", "reasoning_content": "four and three"}, USER]
    knows = ONLY_TWO + "{% if messages[-1].reasoning_content %}{{ messages[-1].reasoning_content }}{% endif %}"
    assert find(knows, said)[1] is None
    assert find(ONLY_TWO, said)[1] == (1, "reasoning_content")


def test_a_developer_is_the_system_where_the_template_does_not_know_the_role():
    messages = [{"role": "developer", "content": "be brief"}, USER]
    assert in_text(ONLY_TWO, messages) == in_text(ONLY_TWO, [SYSTEM, USER])
    assert in_text(ONLY_TWO.replace("'user'", "'developer'"), messages) == "developer: be brief\n"
    learned = ChatTemplate(source=ONLY_TWO).render_answers([*messages, {"role": "assistant", "content": "seven"}])
    assert learned.text.startswith("be brief\n")  # in training as in chats
