"""Every learned answer ends with a token at which generation stops, or a note says that it does not.

The templates are written for these tests, in the manner of those whose name they have.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from data_helpers import chat, learned, write_model
from template_cases import CONVERSATIONS
from tokenizers import decoders, models, pre_tokenizers

from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data.template.compiled import TemplateProblem
from lorafusion_jax.data.tokenized import load_samples
from lorafusion_jax.data.tokenizer import Tokenizer, load_tokenizer
from lorafusion_jax.objective.choose import choose

PEERS = os.environ.get("LORAFUSION_PEERS", "")
TURNS = "{% for m in messages %}"
ASK = "{% endfor %}{% if add_generation_prompt %}"
MARKED = {  # the marker of the next role ends an answer
    "glm4": TURNS + "<|{{ m.role }}|>\n{{ m.content }}" + ASK + "<|assistant|>{% endif %}",
    "glm4-0414": TURNS
    + "{% if m.role == 'assistant' %}<|assistant|>{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}\n{{ "
    "m.tool_calls[0].function.arguments }}{% else %}\n{{ m.content }}{% endif %}{% elif m.role == 'tool' %}"
    "<|observation|>\n{{ m.content }}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}"
    + ASK
    + "<|assistant|>{% endif %}",
    "glm4.5": TURNS + "{% if m.role == 'assistant' %}<|assistant|>\n<think></think>\n{{ m.content.strip() }}{% else %}"
    "<|{{ m.role }}|>\n{{ m.content }}{% endif %}" + ASK + "<|assistant|>\n<think></think>{% endif %}",
    "glm4.7": TURNS
    + "{% if m.role == 'assistant' %}<|assistant|></think>{{ m.content.strip() }}{% else %}<|{{ m.role }}|>"
    "{{ m.content }}{% endif %}" + ASK + "<|assistant|><think>{% endif %}",
    "marked": TURNS
    + "<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ '\\n' }}" + ASK + "<|assistant|>\n{% endif %}",
}
ENDLESS = {
    "amberchat": TURNS
    + "### {{ 'Human' if m.role == 'user' else 'Assistant' }}: {{ m.content }}\n"
    + ASK
    + "### Assistant:{% endif %}",
    "chatqa": TURNS + "{{ m.role.title() }}: {{ m.content }}\n\n" + ASK + "Assistant:{% endif %}",
    "falcon-instruct": TURNS
    + "{{ '\n\n' if not loop.first }}{{ m.role.title() }}: {{ m.content }}"
    + ASK
    + "\n\nAssistant:{% endif %}",
    "solar-instruct": TURNS + "### {{ m.role.title() }}:\n{{ m.content }}\n\n" + ASK + "### Assistant:\n{% endif %}",
    "jamba": TURNS + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{% endif %}"
    "{% endfor %}",
    "llava": TURNS + "{{ m.role.upper() }}: {{ m.content }} " + ASK + "ASSISTANT:{% endif %}",
}
METHARME = (
    TURNS
    + "{{ '<|user|>' if m.role == 'user' else '<|model|>' }}{{ m.content }}"
    + ("{% endfor %}{% if add_generation_prompt %}<|model|>{% else %}{{ eos_token }}{% endif %}")
)
CHATML = TURNS + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n" + ASK + "<|assistant|>\n{% endif %}"
TWO_TURNS = {"messages": chat("hello", "first", "and", "second")}


@pytest.fixture
def read(tmp_path):
    """read(template, rows, **settings) → (rows, tokenizer) of a model that stops at the next user, as GLM does."""

    def load(template: str, rows: list[dict], objective: str = "sft", stops=("<|user|>", "<s>"), **settings):
        base = write_model(tmp_path / "model", template, eos_token="<|end|>")
        tokenizer = load_tokenizer(base)
        ids = [tokenizer.backend.token_to_id(token) for token in stops]
        (base / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        tokenizer = load_tokenizer(base)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        samples = load_samples(
            "rows.jsonl",
            settings=DataSettings(train=(), **settings),
            tokenizer=tokenizer,
            adapter="a",
            base_dir=tmp_path,
            cache_dir=tmp_path / "cache",
            objective=choose(objective, {}),
        )
        assert tokenizer.eos_id in tokenizer.stop_ids
        assert set(ids) <= set(tokenizer.stop_ids)
        return samples, tokenizer

    return load


@pytest.mark.parametrize("name", MARKED)
def test_the_marker_of_the_next_role_ends_an_answer(name, read):
    samples, tokenizer = read(MARKED[name], [TWO_TURNS])
    texts = learned(samples, tokenizer)
    assert [text.split("<|user|>")[0].split("</think>")[-1].strip() for text in texts] == ["first", "second"]
    assert all(text.endswith("<|user|>") for text in texts)
    tokens, _ = samples.sample(0)
    text = tokenizer.decode(tokens.tolist())
    assert text.count("<|user|>") == 3
    assert not [note for note in samples.report.notes if "end]" in note]


def test_a_call_ends_with_the_marker_of_its_result(read):
    call = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    rows = [
        {"messages": [*chat("hello"), call]},
        {"messages": [*chat("hello"), call, {"role": "tool", "content": "yes"}, *chat("no", "four")[1:]]},
    ]
    stops = ("<|user|>", "<|system|>")
    template = MARKED["glm4-0414"].replace("<|observation|>", "<|system|>")
    samples, tokenizer = read(template, rows, stops=stops)
    assert learned(samples, tokenizer, 0)[0].endswith("<|system|>")
    first, last = learned(samples, tokenizer, 1)
    assert first.endswith("<|system|>")
    assert last.endswith("four<|user|>")


@pytest.mark.parametrize("loss", ["all", "completion"])
def test_other_losses_end_answers_too(loss, read):
    samples, tokenizer = read(MARKED["glm4.5"], [TWO_TURNS], loss=loss)
    assert learned(samples, tokenizer)[-1].endswith("second<|user|>")


def test_both_answers_of_a_pair_end(read):
    row = {"prompt": "hello", "chosen": chat("", "yes")[1:], "rejected": chat("", "no")[1:]}
    samples, tokenizer = read(MARKED["glm4"], [row], "dpo")
    assert [text[-8:] for text in learned(samples, tokenizer)] == ["<|user|>"] * 2
    scored, _ = read(MARKED["glm4"], [row], "reward")  # the state of the last token of the answer is scored
    assert len(scored.tokens) == len(samples.tokens) - 2


@pytest.mark.parametrize("template", [*ENDLESS.values(), METHARME], ids=[*ENDLESS, "metharme"])
def test_answers_without_an_end_are_noted(template, read):
    samples, _ = read(template, [TWO_TURNS, TWO_TURNS], stops=("<s>",))
    (note,) = [note for note in samples.report.notes if "data.no-end" in note]
    assert "2 of 2 rows" in note
    assert "message 1" in note


def test_a_token_in_an_answer_at_which_generation_stops_is_noted(read):
    samples, _ = read(CHATML, [TWO_TURNS, {"messages": chat("hello", "a <|user|> b")}])
    (note,) = samples.report.notes
    assert "[data.early-end] 1 of 2 rows" in note
    assert "line 2, message 1" in note


@pytest.mark.parametrize("row", [TWO_TURNS, {"prompt": "hello", "completion": "yes"}])
def test_answers_that_end_are_as_they_were(row, read):
    samples, tokenizer = read(CHATML, [row])
    assert learned(samples, tokenizer)[-1].endswith("<|end|>")
    assert samples.report.notes == ()


def test_results_that_a_template_writes_into_the_calling_turn_are_not_learned(read):
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}\n{% elif m.role == 'assistant' %}"
        "{{ '<|assistant|>' if messages[loop.index0 - 1].role == 'user' }}{{ m.content }}"
        "{% if m.tool_calls %}[{{ m.tool_calls[0].function.name }}]<s>{got {{ messages[loop.index0 + 1].content }}}"
        "{% else %}<|end|>\n{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role == 'user' %}<|assistant|>{% endif %}"
    )
    call = {"role": "assistant", "content": "so ", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    row = {"messages": [*chat("2+2?"), call, {"role": "tool", "content": "it is 4"}, *chat("", "four")[1:]]}
    samples, tokenizer = read(template, [row], stops=("<s>",))
    assert learned(samples, tokenizer) == ["so [add]<s>", "four<|end|>"]
    assert "it is 4" in tokenizer.decode(samples.tokens)
    assert samples.report.notes == ()


ENDED = [  # tokens as texts, whether each is learned, whether they end
    (("a", "b", "<|end|>"), "011", True),
    (("a", "b", "<|user|>"), "011", True),
    (("a", "b", "<|end|>", " "), "0111", True),
    (("a", "b", "<|end|>", " "), "0110", True),
    (("a", "b", "c"), "011", False),
    (("a", "b", "c", "<|end|>"), "0101", False),
    (("a", "b", " "), "011", False),
    (("a", "b", "<|end|>", "c"), "0111", False),
    (("a", "b", "c"), None, False),
    (("a", "b", "<|end|>"), None, True),
]


@pytest.mark.parametrize(("texts", "mask", "ends"), ENDED)
def test_rows_of_tokens_that_do_not_end_are_noted(texts, mask, ends, read, tmp_path):
    encode = load_tokenizer(write_model(tmp_path / "other")).encode
    ids = [encode(text)[0] for text in texts]
    labels = {} if mask is None else {"labels": [i if on == "1" else -100 for i, on in zip(ids, mask, strict=True)]}
    whole = {"input_ids": [*ids, encode("<|end|>")[0]]}
    rows = [whole | ({} if mask is None else {"labels": whole["input_ids"]}), {"input_ids": ids} | labels]
    samples, _ = read(CHATML, rows)
    notes = [note for note in samples.report.notes if note.startswith("[data.no-end] 1 of 2 rows")]
    assert bool(notes) != ends
    assert all("<|end|>, <|user|>, <s>" in note or "first line 2" in note for note in notes)


@pytest.mark.parametrize(
    ("row", "stops", "noted"),
    [
        ({"text": "<|user|>\nhi<|end|>\n"}, (), True),
        ({"text": "hi<|user|>"}, ("<|user|>",), True),
        ({"prompt": "hi", "completion": " there<|end|>\n"}, (), True),
        ({"text": "hi<|end|>"}, (), False),
        ({"text": "hi<|user|>"}, (), False),
        ({"text": "hi <|end|> there\n"}, (), False),
    ],
)
def test_a_text_that_ends_already_is_noted(row, stops, noted, read, tmp_path):
    template = CHATML if "text" in row else None
    samples, tokenizer = read(template, [dict.fromkeys(row, "hello"), row], stops=stops)
    assert any("[data.end-twice] 1 of 2 rows" in note and "line 2" in note for note in samples.report.notes) == noted
    assert samples.sample(1)[0][-1] == tokenizer.eos_id


LAST_WITHOUT = (
    TURNS + "<|{{ m.role }}|>\n{{ m.content }}{{ '<s>\n' if not loop.last }}" + ASK + "<|assistant|>\n{% endif %}"
)
BEHIND = (  # the end is written at the start of the next message
    TURNS
    + "{% if not loop.first %}<s>{% endif %}<|{{ m.role }}|>{{ m.content }}"
    + "{% endfor %}<s>{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SEVERAL = CHATML.replace("<|end|>\n", "<s>\n").replace(
    "{% endfor %}", "{% endfor %}{{ eos_token if not add_generation_prompt }}"
)


@pytest.mark.parametrize(
    ("template", "stops", "ends"),
    [
        (LAST_WITHOUT, ("<s>",), ("<s>", "<s>")),
        (LAST_WITHOUT, (), ("<s>", "<s>")),  # what the template writes between turns is its end
        (BEHIND, ("<s>",), ("<s>", "<s>")),
        (BEHIND, (), ("<s>", "<s>")),
        (SEVERAL, ("<s>",), ("<s>", "<s>\n<|end|>")),
    ],
    ids=["last without", "last without, unnamed", "behind", "behind, unnamed", "several"],
)
def test_an_end_outside_the_last_answer_is_learned(template, stops, ends, read):
    samples, tokenizer = read(template, [TWO_TURNS], stops=stops)
    texts = [text.split("\n", 1)[-1] if text[:1] == "\n" else text for text in learned(samples, tokenizer)]
    assert texts == [f"first{ends[0]}", f"second{ends[1]}"]
    assert tokenizer.backend.token_to_id("<s>") in tokenizer.stop_ids
    assert samples.report.notes == ()


def test_a_header_that_is_always_written_is_no_end(read):
    template = TURNS + "<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    samples, tokenizer = read(template, [TWO_TURNS], stops=("<s>",))
    assert tokenizer.backend.token_to_id("<|assistant|>") not in tokenizer.stop_ids
    assert any("data.no-end" in note for note in samples.report.notes)


FOLDERS = [
    *([Path(os.environ["LORAFUSION_TEMPLATES"])] if os.environ.get("LORAFUSION_TEMPLATES") else []),
    *(Path(PEERS).parents[1].glob("lib/python3*/site-packages/trl/chat_templates") if PEERS else ()),
]
# Ends that templates write as text, where the published tokenizer or generation settings name them.
NAMED = {
    "glm": ("<|user|>", "<|observation|>"), "exaone": ("[|endofturn|]",), "minimax": ("[e~[", "<end_of_sentence>"),
    "phi": ("<|end|>",), "gpt-?oss": ("<|return|>", "<|call|>"), "jamba": ("<|eom|>",),
    "apertus": ("<|assistant_end|>",),
    "nano-v2": ("<SPECIAL_12>",), "reka": ("<sep>",), "apriel": ("<|end|>",), "laguna": ("</assistant>",),
    "qwen1.5": ("<|im_end|>",), "hy3": ("<｜hy_eos:opensource｜>",), "codellama-70b": ("<step>",),
}  # fmt: skip
SPECIAL_TEXT = r"<\|[^|>\s]+\|>|<｜[^｜]+｜>|\[/?[A-Z_]+\]|</?s>|<(?:start|end)_of_\w+>"
BYTES = {piece: number for number, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def tokenizer_of(file: Path, folder: Path) -> Tokenizer:
    """Bytes and the special tokens of a published template, with the ends that are published beside it."""
    source = file.read_text(encoding="utf-8")
    named = [end for name, ends in NAMED.items() if re.search(name, file.name.lower()) for end in ends]
    backend = tokenizers.Tokenizer(models.BPE(vocab=BYTES, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = dict.fromkeys(["<eos>", "<bos>", *named, *re.findall(SPECIAL_TEXT, source)])
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in texts])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": source}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    stops = [backend.token_to_id(text) for text in ["<eos>", *named]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return load_tokenizer(folder)


def ending(tokenizer: Tokenizer, messages: list[dict], tools: list | None) -> str:
    """Says how the answers of a conversation end: stops, warned or refused."""
    assert tokenizer.chat_template is not None
    messages = list(tokenizer.chat_template.with_arguments(messages, tools=tools))
    try:
        rendered = tokenizer.chat_template.render_answers(messages, tools=tools)
    except TemplateProblem:
        return "refused"
    sample = tokenizer.encode_rendered([rendered])[0]
    runs = np.split(sample.tokens, np.flatnonzero(np.diff(sample.mask.astype(int))) + 1)[not sample.mask[:1].any() :: 2]
    last = [next((token for token in run[::-1].tolist() if tokenizer.decode([token]).strip()), None) for run in runs]
    answers = sum(message["role"] == "assistant" for message in messages)
    if sum(token in tokenizer.stop_ids for token in last) >= answers:
        return "stops"
    return "silent" if rendered.unended is None else "warned"


@pytest.mark.nightly
@pytest.mark.skipif(not FOLDERS, reason="neither LORAFUSION_TEMPLATES nor a Python with trl in LORAFUSION_PEERS")
def test_every_published_template_ends_its_answers_or_that_is_said(tmp_path):
    """LORAFUSION_TEMPLATES=FOLDER of files such as GLM-4.6.jinja, beside those that TRL ships."""
    counts: Counter[str] = Counter()
    silent = []
    for file in sorted(file for folder in FOLDERS for file in folder.glob("*.jinja")):
        tokenizer = tokenizer_of(file, tmp_path)
        endings = {name: ending(tokenizer, *conversation) for name, conversation in CONVERSATIONS.items()}
        silent += [(file.name, name) for name, how in endings.items() if how == "silent"]
        counts[endings["two turns"]] += 1
    print(dict(counts))  # shown by -s
    assert not silent
    assert counts["stops"] > 0.8 * counts.total() > 48
