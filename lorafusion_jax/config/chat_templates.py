"""`data.chat_template`: a name, a file or the text of a template; a loaded job has names and texts only.

The named ones are for bases that have none. They write what the templates of the models do for texts of the roles
system, user and assistant, without tools.
"""

from __future__ import annotations

from lorafusion_jax.config.values import check_folder
from lorafusion_jax.readable import TEMPLATE

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_QWEN = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a "
    "helpful assistant.<|im_end|>\\n' }}{% endif %}" + _CHATML
)
_LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' "
    "+ message.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# A system text stands before the first user's message where the model has no role for it.
_SPLIT = (
    "{% set start = messages[0].content | trim + '\\n\\n' if messages[0].role == 'system' else '' %}"
    "{% set turns = messages[1:] if start else messages %}"
    "{% for message in turns %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) or message.role not in ('user', 'assistant') %}"
    "{{ raise_exception('user and assistant have to take turns') }}{% endif %}"
    "{% set content = (start if loop.first else '') + message.content | trim %}"
)
_GEMMA = (
    "{{ bos_token }}" + _SPLIT + "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' "
    "+ content + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}" + _SPLIT + "{{ '[INST] ' + content + '[/INST]' if message.role == 'user' "
    "else ' ' + content + eos_token }}{% endfor %}"
)
_ALPACA = (
    "{% set first = messages[0].role == 'system' %}"
    "{{ messages[0].content if first else 'Below is an instruction that describes a task. Write a response that "
    "appropriately completes the request.' }}"
    "{% for message in (messages[1:] if first else messages) %}"
    "{{ '\\n\\n### Instruction:\\n' + message.content if message.role == 'user' "
    "else '\\n\\n### Response:\\n' + message.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\n### Response:\\n' }}{% endif %}"
)
NAMED = {
    "chatml": _CHATML,
    "qwen": _QWEN,
    "llama3": _LLAMA_3,
    "gemma": _GEMMA,
    "mistral": _MISTRAL,
    "alpaca": _ALPACA,
}


def is_template(text: str) -> bool:
    """Whether a text is a template itself, rather than a name or a path.

    >>> is_template("{{ bos_token }}"), is_template("chat.jinja")
    (True, False)
    """
    return "{{" in text or "{%" in text


def check_template(value: str) -> str:
    """Refuses what can be neither a name, nor a path, nor a template."""
    if not is_template(value):
        return check_folder(value)
    if len(value) > TEMPLATE:
        raise ValueError(f"a template of at most {TEMPLATE} characters, not {len(value)}")
    return value


def template_text(value: str) -> str:
    """The template of a loaded job.

    >>> template_text("chatml")[:7]
    '{% for '
    """
    return NAMED.get(value, value)
