"""What the data tests share: a model folder with a small tokenizer, conversations, and what of a sample is learned."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lorafusion_jax.data import TokenizedSet

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<s>"]
TEXT = ["What is two and two? The answer is four.", "def add(a, b):\n    return a + b\n", "yes no maybe 0123456789"] * 3
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('tools are not for me') }}{% endif %}"
    "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{{ '\\n' }}{% endfor %}"
)


def write_model(folder: Path, template: str | None = TEMPLATE, **config) -> Path:
    """Writes a folder with a byte-level tokenizer of a few hundred entries."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=340,
            special_tokens=SPECIAL,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", **config} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def chat(*contents: str, system: str | None = None) -> list[dict]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def learned(samples: TokenizedSet, tokenizer, index: int = 0) -> list[str]:
    """The runs of learned tokens of one sample, as text."""
    tokens, mask = samples.sample(index)
    runs, before = [], False
    for token, now in zip(tokens.tolist(), mask.tolist(), strict=True):
        if now:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = now
    return [tokenizer.decode(run) for run in runs]
