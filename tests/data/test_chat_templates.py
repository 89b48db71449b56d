"""`data.chat_template`: adapters of one base write conversations each in their own way, from the row to the folder."""

from __future__ import annotations

import json

import pytest
from data_helpers import SPECIAL, TEMPLATE, chat, learned, write_model

from lorafusion_jax.config.chat_templates import NAMED
from lorafusion_jax.config.load import examine_config, load_config
from lorafusion_jax.data.prepare import prepare, tokenizer_of
from lorafusion_jax.data.tokenizer import load_tokenizer, with_template
from lorafusion_jax.errors import LoraFusionError

WRITTEN = {  # of a system text, a question and an answer, as the models' own templates write them
    "chatml": "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nyes?<|im_end|>\n"
    "<|im_start|>assistant\nno<|im_end|>\n",
    "qwen": "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nyes?<|im_end|>\n"
    "<|im_start|>assistant\nno<|im_end|>\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nyes?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nno<|eot_id|>",
    "gemma": "<s><start_of_turn>user\nBe kind.\n\nyes?<end_of_turn>\n<start_of_turn>model\nno<end_of_turn>\n",
    "mistral": "<s>[INST] Be kind.\n\nyes?[/INST] no<|end|>",
    "alpaca": "Be kind.\n\n### Instruction:\nyes?\n\n### Response:\nno<|end|>",
}  # fmt: skip
ASKED = {  # a question alone, and what generation continues
    "chatml": "<|im_start|>user\nyes?<|im_end|>\n<|im_start|>assistant\n",
    "qwen": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nyes?<|im_end|>\n<|im_start|>assistant\n",
    "mistral": "<s>[INST] yes?[/INST]",
    "alpaca": "Below is an instruction that describes a task. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\nyes?\n\n### Response:\n",
}  # fmt: skip


@pytest.fixture
def base(tmp_path):
    return write_model(tmp_path / "base", None, bos_token="<s>")


@pytest.mark.parametrize("name", NAMED)
def test_named_templates_write_what_the_models_do(base, name):
    template = with_template(load_tokenizer(base), NAMED[name], name).chat_template
    assert template is not None
    assert template.render(chat("yes?", "no", system="Be kind.")) == WRITTEN[name]
    if name in ASKED:
        assert template.render(chat("yes?"), add_generation_prompt=True) == ASKED[name]
    answer = template.render_answers(chat("yes?", "no", "maybe?", "yes"))
    assert ["no" in answer.text[start:stop] or "yes" in answer.text[start:stop] for start, stop in answer.answers] == [
        True,
        True,
    ]


def job(tmp_path, base, **templates):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": chat("yes?", "no")}) + "\n")
    path = tmp_path / "jobs.json"
    adapters = [
        {"name": name, "data": {"train": "rows.jsonl", **({"chat_template": value} if value else {})}}
        for name, value in templates.items()
    ]
    path.write_text(json.dumps({"base": {"model": str(base)}, "adapters": adapters}))
    return path


def test_the_members_of_a_sweep_are_read_with_one_line(tmp_path, base):
    path = tmp_path / "sweep.yaml"
    text = job(tmp_path, base, a=TEMPLATE).read_text()
    path.write_text(text.replace('"name": "a"', '"name": "a", "lora": {"rank": [2, 4, 8]}'))
    lines = []
    assert len(prepare(load_config(path), progress=lines.append).adapters) == 3
    assert lines == ["reading rows.jsonl"]


def test_adapters_of_one_base_have_templates_of_their_own(tmp_path, base):
    (tmp_path / "own.jinja").write_text(TEMPLATE.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>:"))
    config = load_config(job(tmp_path, base, named="mistral", file="own.jinja", text=TEMPLATE))
    (tmp_path / "own.jinja").unlink()  # the job has its text
    prepared = prepare(config)
    texts = {
        name: prepared.tokenizer.decode(data.train.sample(0)[0].tolist()) for name, data in prepared.adapters.items()
    }
    assert texts == {
        "named": "<s>[INST] yes?[/INST] no<|end|>",
        "file": "<|user|>:\nyes?<|end|>\n<|assistant|>:\nno<|end|>\n",
        "text": "<|user|>\nyes?<|end|>\n<|assistant|>\nno<|end|>\n",
    }
    assert learned(prepared.adapters["text"].train, prepared.tokenizer) == ["no<|end|>"]
    end = prepared.tokenizer.backend.token_to_id(SPECIAL[0])
    assert all(end in tokenizer_of(adapter, prepared.tokenizer).stop_ids for adapter in config.adapters)


def test_without_one_conversations_are_refused_with_the_key(tmp_path, base):
    with pytest.raises(LoraFusionError, match=r"data\.no-template") as caught:
        prepare(load_config(job(tmp_path, base, bare=None)))
    assert "data.chat_template" in str(caught.value)


@pytest.mark.parametrize(("value", "part"), [("chatlm", "did you mean 'chatml'"), ("none.jinja", "No such file")])
def test_a_template_that_is_nowhere_is_refused(tmp_path, base, value, part):
    config, errors = examine_config(job(tmp_path, base, wrong=value))
    assert config is None, "rows that it would write are not looked at"
    assert [error.code for error in errors] == ["config.chat-template"]
    assert part in str(errors[0])
    assert "adapters[0]" in errors[0].where or "jobs.json" in errors[0].where
    _, (error,) = examine_config(job(tmp_path, base, none=None), [f"data.chat_template={value}"])
    assert error.where == f"data.chat_template={value} on the command line"


def test_a_broken_template_names_its_adapter(tmp_path, base):
    with pytest.raises(LoraFusionError, match=r"(?s)tokenizer\.template.*data\.chat_template of broken"):
        prepare(load_config(job(tmp_path, base, broken="{% for m in messages %}{{ m.content }}")))
