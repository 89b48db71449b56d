import json

import pytest
from data_helpers import TEMPLATE, chat, write_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from lorafusion_jax.data import load_tokenizer
from lorafusion_jax.data.template.conversation import Rendered
from lorafusion_jax.errors import CheckpointError


def fails(folder, code):
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(folder)
    assert caught.value.code == code
    return caught.value


def test_text_survives(tokenizer):
    text = "def add(a, b):\n\treturn a + b  # é 🎉"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "".join(tokenizer.piece(token) for token in tokenizer.encode("yes  no")) == "yes  no"


def test_special_tokens(tokenizer):
    assert tokenizer.eos_id == tokenizer.encode("<|end|>")[0]
    assert tokenizer.piece(tokenizer.eos_id) == "<|end|>"
    assert tokenizer.bos_id is None
    assert not tokenizer.adds_bos


def test_render_marks_what_the_assistant_says(tokenizer):
    rendered = tokenizer.chat_template.render_answers(chat("2+2?", "four"))
    ((tokens, mask),) = tokenizer.encode_rendered([rendered])
    assert tokenizer.decode(tokens[mask]) == "four<|end|>"
    assert tokenizer.decode(tokens[~mask]) == "<|user|>\n2+2?<|end|>\n<|assistant|>\n\n"


def test_prompt_tokens_are_those_of_the_prompt_alone(tokenizer):
    # "yes" is one token, but the model, when used, sees the prompt "…y" encoded alone
    prompt, answer = "no y", "es yes"
    assert tokenizer.encode(prompt + answer)[: len(tokenizer.encode(prompt))] != tokenizer.encode(prompt)
    sample = tokenizer.encode_rendered([Rendered(text=prompt + answer, answers=((4, 10),))])[0]
    assert sample.tokens[~sample.mask].tolist() == tokenizer.encode(prompt)
    assert tokenizer.decode(sample.tokens[sample.mask]) == answer


def test_characters_of_several_tokens(tokenizer):
    text = "é🎉 → 東京"
    sample = tokenizer.encode_rendered([Rendered(text=text, answers=((1, 2), (5, 7)))])[0]
    assert tokenizer.decode(sample.tokens[sample.mask]) == "🎉東京"
    assert tokenizer.decode(sample.tokens[~sample.mask]) == "é → "


def test_words_with_a_space_mark(tmp_path):
    backend = Tokenizer(
        models.BPE({"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "▁b": 5}, [("▁", "a"), ("▁", "b")], unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.piece(token) for token in tokenizer.encode("a b")] == [" a", " b"]
    sample = tokenizer.encode_rendered([Rendered(text="a b", answers=((1, 3),))])[0]
    assert sample.mask.tolist() == [False, True]


def test_bos_is_added_where_the_tokenizer_does(tmp_path):
    folder = write_model(tmp_path / "m", bos_token="<s>")
    assert not load_tokenizer(folder).adds_bos
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.adds_bos
    assert tokenizer.bos_id == 4
    assert tokenizer.encode("a") == load_tokenizer(write_model(tmp_path / "n")).encode("a")


def test_limits_inside_tokenizer_json_are_ignored(tmp_path):
    folder = write_model(tmp_path)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert 4 < len(load_tokenizer(folder).encode("What is two and two and four?")) < 64


def test_template_file_wins_over_the_configuration(tmp_path):
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load_tokenizer(folder).chat_template.source == "{{ messages[0].content }}"


def test_default_of_several_templates(tmp_path):
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    assert load_tokenizer(write_model(tmp_path, template=None, chat_template=named)).chat_template.source == TEMPLATE


def test_special_tokens_as_objects_and_in_other_files(tmp_path):
    folder = write_model(tmp_path, eos_token={"content": "<|end|>", "lstrip": False})
    assert load_tokenizer(folder).eos_id == 0
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|user|>"}))
    assert load_tokenizer(folder).eos_id == 1
    (folder / "special_tokens_map.json").unlink()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert load_tokenizer(folder).eos_id == 2


def declare(folder, name, values):
    file = folder / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | values))
    return folder


def test_tokens_that_are_declared_beside_the_vocabulary_are_tokens(tmp_path, tokenizer):
    """As transformers adds them: those of the table by their ids, then further ones; others are there already."""
    size = tokenizer.backend.get_vocab_size()
    known, think = {"content": "<|end|>", "special": True}, {"content": "<think>", "special": False, "lstrip": True}
    table = {"added_tokens_decoder": {"0": known, str(size + 1): think, str(size): {"content": "<call>"}}}
    values = table | {"extra_special_tokens": ["<image>", "<call>", {"content": "<audio>"}]}
    ours = load_tokenizer(declare(write_model(tmp_path / "a"), "tokenizer_config.json", values))
    texts = {"<call>": size, "<think>": size + 1, "<image>": size + 2, "<audio>": size + 3, "<|end|>": 0}
    assert {text: ours.encode(text) for text in texts} == {text: [number] for text, number in texts.items()}
    assert ours.encode("a <think>") == [*tokenizer.encode("a"), size + 1]
    assert ours.digest != tokenizer.digest

    folder = declare(write_model(tmp_path / "b"), "added_tokens.json", {"<call>": size})
    assert load_tokenizer(folder).encode("<call>") == [size]


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("added_tokens.json", {"<call>": 10**6}, "two ids"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "<call>"}}}, "two ids"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"text": "<call>"}}}, "cannot be read"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"seven": "<call>"}}, "cannot be read"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "cannot be read"),
        ("tokenizer_config.json", {"extra_special_tokens": [""]}, "cannot be read"),
        ("tokenizer_config.json", {"extra_special_tokens": 3}, "cannot be read"),
    ],
)
def test_declared_tokens_that_are_none_are_refused(name, values, why, tmp_path):
    assert why in fails(declare(write_model(tmp_path), name, values), "tokenizer.broken").what


def test_folder_without_tokenizer(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    tokenizer = load_tokenizer(tmp_path)
    for use in (tokenizer.require, lambda: tokenizer.encode("a"), lambda: tokenizer.text([1])):
        with pytest.raises(CheckpointError) as caught:
            use()
        assert caught.value.code == "tokenizer.missing"
        assert "save_pretrained" in caught.value.fix
    assert tokenizer.stop_ids == (7, 9)


@pytest.mark.parametrize("key", ["eos_token", "chat_template"])
def test_half_a_character_in_the_settings(tmp_path, key):
    folder = write_model(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({key: "\ud83d"}))
    assert "half a character" in fails(folder, "tokenizer.broken").why


@pytest.mark.parametrize("identity", [-1, 2**40, [2**64]])
def test_an_end_token_that_no_tokenizer_has(tmp_path, identity):
    folder = write_model(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": identity}))
    assert load_tokenizer(folder).eos_id is None


def test_broken_files(tmp_path):
    folder = write_model(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    fails(folder, "tokenizer.broken")
    (folder / "tokenizer.json").write_text("{}")
    fails(folder, "tokenizer.broken")


def test_broken_template(tmp_path):
    assert "template line 1" in fails(write_model(tmp_path, template="{% for %}"), "tokenizer.template").where


def test_digest_follows_the_vocabulary(tmp_path, tokenizer):
    assert load_tokenizer(write_model(tmp_path)).digest == tokenizer.digest
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text + " ")
    assert load_tokenizer(tmp_path).digest != tokenizer.digest
