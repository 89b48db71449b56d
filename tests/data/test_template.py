from contextlib import suppress

import pytest
from data_helpers import MARKED_TEMPLATE, TEMPLATE, chat

from lorafusion_jax.data import ChatTemplate
from lorafusion_jax.data.template.chat import check_template
from lorafusion_jax.data.template.compiled import TemplateProblem, compile_template
from lorafusion_jax.data.template.conversation import Conversation
from lorafusion_jax.errors import CheckpointError

TURNS = chat("2+2?", "four", "3+3?", "six", system="Be brief.")
WHOLE = (
    "<|system|>\nBe brief.<|end|>\n<|user|>\n2+2?<|end|>\n<|assistant|>\nfour<|end|>\n"
    "<|user|>\n3+3?<|end|>\n<|assistant|>\nsix<|end|>\n"
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source=source, special_tokens={"eos_token": "<|end|>", "bos_token": "<s>"})


def answers(source: str, messages=TURNS, **options) -> list[str]:
    rendered = template(source).render_answers(messages, **options)
    return [rendered.text[start:stop] for start, stop in rendered.answers]


@pytest.mark.parametrize("source", [TEMPLATE, MARKED_TEMPLATE], ids=["prefixes", "generation"])
def test_answers_are_found_with_and_without_generation_blocks(source):
    assert template(source).render_answers(TURNS).text == WHOLE
    assert answers(source) == ["four<|end|>", "six<|end|>"]
    assert answers(source, last_only=True) == ["six<|end|>"]


def test_generation_blocks_decide_what_is_learned():
    source = MARKED_TEMPLATE.replace("{{ m.content }}<|end|>{% endgeneration %}", "{{ m.content }}{% endgeneration %}!")
    assert answers(source) == ["four", "six"]


def test_generation_prompt():
    assert template(TEMPLATE).render(TURNS[:2], add_generation_prompt=True).endswith("2+2?<|end|>\n<|assistant|>\n")


def test_word_generation_in_a_template_is_no_block():
    assert not template("{{ generation }} endgeneration {# {% endgeneration %} #}").marks_answers


def test_template_that_shows_reasoning_of_the_last_answer_only():
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think></think>"
        "{% endif %}{{ m.content }}<|end|>\n{{ '' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert answers(source) == ["four<|end|>", "<think></think>six<|end|>"]


def test_template_whose_prefix_is_not_one():
    source = "{{ messages | length }}{% for i in range(messages | length) %}{{ messages[i].content }}{% endfor %}"
    with pytest.raises(TemplateProblem, match="not a prefix"):
        answers(source)


def test_helpers_of_hugging_face_templates():
    source = (
        "{%- for m in messages %}{%- if loop.index0 == 1 %}{% break %}{% endif %}"
        "{{ {'a': '<é>'} | tojson }} {{ {'b': 1} | tojson(indent=2) }} {{ strftime_now('%Y') }} "
        "{{ bos_token }}{%- endfor %}"
    )
    assert template(source).render(TURNS) == '{"a": "<é>"} {\n  "b": 1\n} 2024 <s>'


def test_raise_exception_reaches_the_user():
    with pytest.raises(TemplateProblem, match="tools are not for me"):
        template(TEMPLATE).render([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    ["{{ messages.nope.nope }}", "{{ 1 / 0 }}", "{{ messages[9].content.x }}", "{{ messages | nothing_of_the_kind }}"],
)
def test_template_that_fails(source):
    with pytest.raises(TemplateProblem, match="the template says"):
        template(source).render(TURNS)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ messages.append('x') }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_sandbox_keeps_templates_in(source):
    with pytest.raises(TemplateProblem):
        template(source).render(TURNS)


def test_messages_are_not_changed():
    before = [dict(message) for message in TURNS]
    template(TEMPLATE).render_answers(TURNS)
    assert before == TURNS


def test_syntax_error_names_its_line():
    with pytest.raises(CheckpointError) as caught:
        check_template(template("{% if a %}\n{% endfor %}"), "model/tokenizer_config.json")
    assert caught.value.code == "tokenizer.template"
    assert caught.value.where == "model/tokenizer_config.json, template line 2"


def test_hash_tells_templates_and_special_tokens_apart():
    hashes = {template(TEMPLATE).hash, template(MARKED_TEMPLATE).hash, ChatTemplate(source=TEMPLATE).hash}
    assert len(hashes) == 3
    assert template(TEMPLATE).hash == template(TEMPLATE).hash


def test_a_template_that_writes_half_a_character():
    """jinja reads the escape, and no tokenizer takes the text."""
    with pytest.raises(TemplateProblem, match="half a character"):
        ChatTemplate(source=r"{{ '\ud83d' }}{{ messages[0].content }}").render([{"role": "user", "content": "a"}])


LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("{% set x %}LOOP{% endset %}{{ x }}{{ x | length }}", True),
        ("{% macro x() %}LOOP{% endmacro %}{{ x() }}{{ x() | length }}", True),
        ("{% filter trim %}LOOP{% endfilter %}", True),
        ("{% block x %}LOOP{% endblock %}", True),
        ("{% macro x() %}{{ caller() | length }}{% endmacro %}{% call x() %}LOOP{% endcall %}LOOP", True),
        ("{% for n in [messages] recursive %}{{ n | length }}LOOP{% endfor %}", True),
        (r"{{ '\ufdd2\ufdd3' }}LOOP", True),
        ("\ufdd0LOOP\ufdd1", True),
        ("LOOP{{ bos_token }}", False),
    ],
)
def test_marks_change_no_text(source, reads):
    """The text of a conversation is that of a render without marks."""
    source = source.replace("LOOP", LOOP)
    assert compile_template(source)[3] == reads
    for bos in ("<s>", "\ufdd2\ufdd3"):
        special = {"bos_token": bos}
        chat = Conversation(source, special, messages=TURNS, tools=None, variables={})
        with suppress(TemplateProblem):  # of lengths no text is a prefix
            chat.answers(last_only=False)
        assert chat.text == ChatTemplate(source=source, special_tokens=special).render(TURNS)


def test_reserved_code_point_cannot_forge_a_mask():
    with pytest.raises(TemplateProblem, match="FDD0"):
        answers(MARKED_TEMPLATE, chat("\ufdd0\ufdd1", "four"))
