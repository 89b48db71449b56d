"""Chat templates that behave like those of well-known models, each with `{% generation %}` around what is said.

They are written for these tests; what a name says about a model is the behaviour that is imitated, not its words.
"""

from __future__ import annotations

import re

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
ADDED = ["<s>", "</s>", "<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|eot|>", "<｜A｜>", "<｜U｜>"]
TAG = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")

TURNS = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{%- else %}{{- m.content + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

DEFAULT_SYSTEM_AND_TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'You help.') + '\\n<tools>' }}
{%- for t in tools %}{{- '\\n' }}{{- t | tojson }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}
{%- if m.content %}{{- m.content }}{% endif %}
{%- for call in m.tool_calls %}
{%- set call = call.function %}
{{- '\\n<tool_call>\\n' }}{{- {'name': call.name, 'arguments': call.arguments} | tojson }}{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- elif not (tools and loop.first and m.role == 'system') %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

REASONING_OF_THE_LAST_TURN = """\
{%- set ns = namespace(last=0, open=true) %}
{%- for m in messages[::-1] %}
{%- if ns.open and m.role == 'user' %}{% set ns.open = false %}{% set ns.last = messages | length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'assistant' %}
{%- set thought = '' %}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}{% generation %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' + content }}
{%- else %}{{- content }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name + ' ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{% endif %}
{{- '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

# The text that asks for an answer opens the reasoning; answers are written without it.
ASKS_FOR_REASONING = """\
{%- set ns = namespace(system='', tool=false) %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.tool = false %}{{- '<｜U｜>' + m.content }}
{%- elif m.role == 'assistant' and m.content is none %}
{{- '<｜A｜>' }}{% generation %}
{%- for call in m.tool_calls %}{{- '<calls>' + call.function.name + call.function.arguments | tojson }}{% endfor %}
{{- eos_token }}{% endgeneration %}
{%- elif m.role == 'assistant' %}
{%- if ns.tool %}{{- '</results>' }}{% else %}{{- '<｜A｜>' }}{% endif %}
{%- set ns.tool = false %}
{%- generation %}{{- m.content.split('</think>')[-1] + eos_token }}{% endgeneration %}
{%- elif m.role == 'tool' %}{% set ns.tool = true %}{{- '<result>' + m.content }}
{%- endif %}
{%- endfor %}
{%- if ns.tool %}{{- '</results>' }}{% elif add_generation_prompt %}{{- '<｜A｜><think>\\n' }}{% endif %}"""

# The system's text stands in the last question, so every longer conversation is written differently.
SYSTEM_IN_THE_LAST_QUESTION = """\
{%- if messages[0].role == 'system' %}{% set how = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- set questions = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in turns %}
{%- if m.role == 'user' %}
{%- if tools and m == questions[-1] %}{{- '[TOOLS] ' + tools | tojson + '[/TOOLS]' }}{% endif %}
{{- '[INST] ' }}{%- if m == questions[-1] and how is defined %}{{- how + '\\n\\n' }}{% endif %}
{{- m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{%- generation %}{{- '[CALLS] ' }}{% for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{% endif %}
{{- call.function | tojson }}{% endfor %}{{- eos_token }}{% endgeneration %}
{%- elif m.role == 'assistant' %}{% generation %}{{- ' ' + m.content | trim + eos_token }}{% endgeneration %}
{%- elif m.role == 'tool' %}
{{- '[RESULTS] ' + {'content': m.content, 'call_id': m.tool_call_id} | tojson + '[/RESULTS]' }}
{%- else %}{{- raise_exception('only user, assistant and tool after the system') }}
{%- endif %}
{%- endfor %}"""

END_AFTER_THE_LAST_MESSAGE = """\
{%- for m in messages %}
{{- '<|' + m.role + '|>\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>\\n' }}{% endgeneration %}
{%- else %}{{- m.content + '<|end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}
{%- elif messages[-1].role == 'assistant' %}{% generation %}{{- eos_token }}{% endgeneration %}
{%- else %}{{- eos_token }}{% endif %}"""

TRIMMED_WITHOUT_SYSTEM = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('no system') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must take turns') }}{% endif %}
{%- if m.role == 'assistant' %}
{{- '<turn>model\\n' }}{% generation %}{{- m.content | trim + '<end>' }}{% endgeneration %}{{- '\\n' }}
{%- else %}{{- '<turn>user\\n' + m.content | trim + '<end>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<turn>model\\n' }}{% endif %}"""

HEADERS = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set how = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set how = '' %}{% endif %}
{{- '<h>system</h>\\n\\n' + how + '<|eot|>' }}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<h>assistant</h>\\n\\n' }}{% generation %}{{- '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}' + '<|eot|>' }}{% endgeneration %}
{%- elif m.role == 'assistant' %}
{{- '<h>assistant</h>\\n\\n' }}{% generation %}{{- m.content | trim + '<|eot|>' }}{% endgeneration %}
{%- elif m.role == 'tool' %}{{- '<h>ipython</h>\\n\\n' }}{{- m.content | tojson }}{{- '<|eot|>' }}
{%- else %}{{- '<h>' + m.role + '</h>\\n\\n' + m.content | trim + '<|eot|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<h>assistant</h>\\n\\n' }}{% endif %}"""

WITHOUT_END_TOKEN = """\
{%- for m in messages %}
{{- '### ' + m.role + ':\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '\\n' }}{% endgeneration %}
{%- else %}{{- m.content + '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### assistant:\\n' }}{% endif %}"""

BY_NUMBER = """\
{%- for i in range(messages | length) %}
{%- set m = messages[i] %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{%- else %}{{- m.content + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

MACROS = """\
{%- macro body(m) %}{{- m.content | trim }}{% for c in m.tool_calls %} {{ c.function.name }}{% endfor %}{% endmacro %}
{%- for m in messages %}
{%- set said %}{{ body(m) }}{% endset %}
{%- if m.role == 'assistant' %}{{- '<|A|> ' }}{% generation %}{{- said + '<|end|>' }}{% endgeneration %}{{- '\\n' }}
{%- else %}{{- '<|' + m.role + '|> ' + said + '<|end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|A|> ' }}{% endif %}"""

TEMPLATES = {
    "turns": TURNS,
    "default system and tools": DEFAULT_SYSTEM_AND_TOOLS,
    "reasoning of the last turn": REASONING_OF_THE_LAST_TURN,
    "asks for reasoning": ASKS_FOR_REASONING,
    "system in the last question": SYSTEM_IN_THE_LAST_QUESTION,
    "end after the last message": END_AFTER_THE_LAST_MESSAGE,
    "trimmed, without system": TRIMMED_WITHOUT_SYSTEM,
    "headers": HEADERS,
    "without end token": WITHOUT_END_TOKEN,
    "by number": BY_NUMBER,
    "macros": MACROS,
}


def unmarked(source: str) -> str:
    """The template without its generation blocks, as models ship it; white space around the tags stays as it was."""
    return TAG.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source)
