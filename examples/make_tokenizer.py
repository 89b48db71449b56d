"""Trains the tiny base model's byte-level BPE tokenizer on the standard library and writes it in Hugging Face's layout.

python examples/make_tokenizer.py       # examples/base/tokenizer.json, tokenizer_config.json, chat_template.jinja
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stdlib_text import library_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 3072
END = "<|end|>"  # of a text and of a turn: the base model has seen it before any adapter needs it
SPECIAL = [END, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role not in ["system", "user", "assistant"] %}
{{- raise_exception("unknown role " ~ message.role) }}
{%- endif %}
{{- "<|" ~ message.role ~ "|>\\n" ~ message.content ~ "<|end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|assistant|>\\n" }}
{%- endif %}
"""


def train_tokenizer() -> Tokenizer:
    """Learns merges from sources and reference topics; the same on every run."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(library_documents().values(), trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "base")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "bos_token": None,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
