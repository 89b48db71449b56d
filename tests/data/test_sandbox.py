"""Templates of unknown origin: whatever they compute, they end soon and take little memory."""

import resource
import time

import pytest
from data_helpers import TEMPLATE, chat, write_model
from template_cases import CONVERSATIONS
from template_fixtures import REASONING_OF_THE_LAST_TURN

from lorafusion_jax.data import ChatTemplate, load_tokenizer
from lorafusion_jax.data.template.compiled import TemplateProblem
from lorafusion_jax.errors import CheckpointError

GROW = "{% set ns = namespace(x=START) %}{% for i in range(80) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x | length }}"
HOSTILE = {
    "nested ranges": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "nested ranges with text": "{% for i in range(100000) %}{% for j in range(9) %}"
    + "x" * 9999
    + "{% endfor %}{% endfor %}",
    "a long text": "{{ 'a' * 10 ** 11 }}",
    "a long text by a literal": "{{ 'a' * 100000000000 }}",
    "a long list": "{{ [0] * 100000000000 }}",
    "a width": "{{ '%100000000000d' % 1 }}",
    "a width from outside": "{{ '%*d' % (100000000000, 1) }}",
    "a width of format": "{{ '{:>100000000000}'.format(1) }}",
    "a width of the filter": "{{ '%100000000000d' | format(1) }}",
    "center": "{{ 'a' | center(100000000000) }}",
    "ljust": "{{ 'a'.ljust(100000000000) }}",
    "zfill": "{{ 'a'.zfill(100000000000) }}",
    "indent": "{{ 'a' | indent(100000000000) }}",
    "indent of json": "{{ [1] | tojson(indent=100000000000) }}",
    "replace": "{% set a = 'a' * 1000000 %}{{ a.replace('a', a) }}",
    "filter replace": "{% set a = 'a' * 1000000 %}{{ a | replace('a', a) }}",
    "join": "{% set a = 'a' * 1000000 %}{{ a.join(range(100000) | map('string') | list) | length }}",
    "filter join": "{% set a = 'a' * 1000000 %}{{ range(100000) | join(a) | length }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "doubled by +": GROW.replace("START", "'a'").replace("STEP", "ns.x + ns.x"),
    "doubled by ~": GROW.replace("START", "'a'").replace("STEP", "ns.x ~ ns.x"),
    "doubled by *": GROW.replace("START", "'a'").replace("STEP", "ns.x * 2"),
    "doubled list": GROW.replace("START", "[1]").replace("STEP", "ns.x + ns.x"),
    "doubled by nesting": GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]").replace("| length", ""),
    "doubled by objects": GROW.replace("START", "[1]").replace("STEP", "dict(a=ns.x, b=ns.x)"),
    "doubled by format": GROW.replace("START", "'a'").replace("STEP", "'{0}{0}'.format(ns.x)"),
    "doubled by join": GROW.replace("START", "'a'").replace("STEP", "[ns.x, ns.x] | join"),
    "doubled by a block": "{% set ns = namespace(x='a') %}{% for i in range(80) %}{% set y %}{{ ns.x }}{{ ns.x }}"
    "{% endset %}{% set ns.x = y %}{% endfor %}",
    "squared numbers": GROW.replace("START", "9").replace("STEP", "ns.x * ns.x").replace("| length", ""),
    "macros that call themselves twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "lipsum": "{{ lipsum(100000000) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_templates_that_compute_without_end_are_refused_soon(name):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(TemplateProblem, match="the template says"):
        ChatTemplate(source=HOSTILE[name]).render(chat("a", "b"))
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{{ " + "9" * 5000 + " }}", "{% if a %}" * 300]
)
def test_templates_that_cannot_be_compiled_are_refused(tmp_path, source):
    with pytest.raises(CheckpointError, match=r"tokenizer\.template"):
        load_tokenizer(write_model(tmp_path / "m", template=source))


def test_a_template_without_end_is_an_error_of_the_rows(load, tmp_path):
    tokenizer = load_tokenizer(write_model(tmp_path / "m", template="{{ 'a' * 10 ** 11 }}"))
    with pytest.raises(ValueError, match=r"data\.template-limit\].*\n.*line 1"):
        load([{"messages": chat("a", "b")}], tokenizer=tokenizer)


@pytest.mark.parametrize("source", [TEMPLATE, REASONING_OF_THE_LAST_TURN], ids=["short", "long"])
def test_long_conversations_are_within_the_limits(source):
    messages = chat(*["a question or an answer " * 40] * 400)
    rendered = ChatTemplate(source=source, special_tokens={"eos_token": "<|end|>"}).render_answers(messages)
    assert len(rendered.answers) == 200


def test_a_large_row_is_within_the_limits():
    text = "a b c " * 600_000
    assert text in ChatTemplate(source=REASONING_OF_THE_LAST_TURN).render(chat("a", text))


def test_limits_hold_for_each_conversation_alone():
    messages, tools = CONVERSATIONS["calls in earlier turns"]
    template = ChatTemplate(source=REASONING_OF_THE_LAST_TURN)
    assert len({template.render(messages, tools=tools) for _ in range(300)}) == 1
