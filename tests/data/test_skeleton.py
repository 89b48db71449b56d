"""What is rendered by putting contents into the text of another conversation is what the template writes itself."""

from __future__ import annotations

import random

import pytest
from template_cases import CONVERSATIONS
from template_fixtures import TEMPLATES, unmarked

from lorafusion_jax.data import ChatTemplate
from lorafusion_jax.data.template.compiled import TemplateProblem
from lorafusion_jax.data.template.conversation import Conversation

SOURCES = TEMPLATES | {f"{name}, unmarked": unmarked(source) for name, source in TEMPLATES.items()}
EACH = "{% for m in messages %}"
WRITES = "{{ m.role }}: {{ m.content }}\n"
END = "{% endfor %}"
SOURCES |= {
    "asks what is in it": EACH + "{% if 'a' in m.content %}!{% endif %}" + WRITES + END,
    "asks how it begins": EACH + "{{ ':' if m.content.startswith('a') }}" + WRITES + END,
    "strips lines": EACH + "{{ '<' + m.role + '>' + m.content.strip('\\n') + '\n' }}" + END,
    "joins": EACH + "{{ '<' ~ m.role ~ '>' ~ m.content ~ '</s>' }}" + END,
    "counts": EACH + "{{ m.content | length }}" + WRITES + END,
    "compares": EACH + "{{ '!' if m.content == 'a' }}" + WRITES + END,
    "is part of": EACH + "{{ '!' if m.content in 'abc' }}" + WRITES + END,
    "looks into a sum": EACH + "{% set t = m.role + m.content %}{{ t.split('a')[0] }}\n" + END,
    "writes a message": EACH + "{{ m.role }}: {{ m | tojson }}\n" + END,
    "asks for an attribute": EACH + "{{ '!' if m.content.text is defined or m.content.joined }}" + WRITES + END,
    "strips by content": EACH + "{{ 'say yes a' | trim(m.content) }}" + WRITES + END,
    "joins values": EACH + "{% set t = ''.join(m.values()) %}{{ '!' if t[-3:] == 'yes' }}" + WRITES + END,
    "selects": "{{ messages | reverse | selectattr('content', 'in', 'abc') | list | length }}" + EACH + WRITES + END,
    "is the same": EACH + "{{ '!' if m.content is sameas 'a' }}" + WRITES + END,
    "looks up": EACH + "{{ {'a': '!', 'yes': '?'}[m.content] }}" + WRITES + END,
    "own end": EACH + "{{ m.role ~ ': ' ~ m.content ~ '\n# End\n\n' }}" + END,
    "around": EACH + "{{ m.role ~ ': <' ~ m.content ~ '>\n' }}" + END,
    "measures itself": "{% set t %}" + EACH + WRITES + END + "{% endset %}{{ t | length }}{{ t }}",
}
WORDS = ["a", "yes", "<", ">", "<think>", "</think>", "\n", "  ", "<|im_", "end|>", "<|im_end|>", "</s>", "é", "|"]
WORDS += ["# End", "# End\n# End", "/s"]
STOPS = ("<|im_end|>", "</s>", "<|eot_id|>")


def draw_text(draw):
    text = "".join(draw.choices(WORDS, k=draw.randint(1, 4)))
    return draw.choice((text, draw.choice(WORDS), f"plain words {draw.random()}", f" {text}", "A", "a"))


def draw_conversations(seed):
    draw = random.Random(seed)
    for turns in (1, 1, 2, 3) * 3:
        system = [{"role": "system", "content": draw_text(draw)}] * draw.randint(0, 1)
        yield system + [
            {"role": role, "content": draw_text(draw)} for _ in range(turns) for role in ("user", "assistant")
        ]


def rendered(template, messages, way):
    try:
        if way == "after a prompt":
            return template.render_after_prompt(messages, len(messages) - 1)
        return (
            template.render_whole(messages)
            if way == "whole"
            else template.render_answers(messages, last_only=way == "last")
        )
    except TemplateProblem as problem:
        return str(problem)


@pytest.mark.parametrize("name", SOURCES)
def test_both_ways_are_equal(name, monkeypatch):
    template = ChatTemplate(source=SOURCES[name], special_tokens={"eos_token": "</s>", "bos_token": "<s>"}, stops=STOPS)
    cases = [*draw_conversations(name), *(messages for messages, tools in CONVERSATIONS.values() if not tools)]
    ways = ("answers", "last", "whole", "after a prompt")
    ours = [rendered(template, messages, way) for messages in cases for way in ways]
    monkeypatch.setattr(ChatTemplate, "_pattern", lambda *arguments: None)
    assert ours == [rendered(template, messages, way) for messages in cases for way in ways]


def test_an_empty_list_of_tools_is_not_none():
    template = ChatTemplate(source="{{ 'tools' if tools is not none }}" + EACH + WRITES + END)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert template.render_answers(messages, tools=[]).text == template.render(messages, tools=[])


QUICK = {
    "own end",
    "around",
    "asks what is in it",
    "turns",
    "default system and tools",
    "reasoning of the last turn",
    "end after the last message",
    "trimmed, without system",
    "headers",
    "without end token",
    "by number",
    "asks how it begins",
    "strips lines",
    "joins",
}


def test_usual_templates_render_a_shape_once(monkeypatch):
    renders = []
    render = Conversation.render
    monkeypatch.setattr(Conversation, "render", lambda *args, **kwargs: (renders.append(1), render(*args, **kwargs))[1])
    once = set()
    for name in SOURCES.keys() - {"asks for reasoning"}:
        template, counts = ChatTemplate(source=SOURCES[name], stops=STOPS), []
        for answer in ("it is four", "it is five then", "no"):
            renders.clear()
            rendered(
                template, [{"role": "user", "content": "two?"}, {"role": "assistant", "content": answer}], "answers"
            )
            counts.append(len(renders))
        once |= {name} if counts[0] and not any(counts[1:]) else set()
    assert {name.removesuffix(", unmarked") for name in once} == QUICK
