"""The byte-level tokenizer with which templates are compared; needs `tokenizers` alone."""

from __future__ import annotations

from pathlib import Path

from template_fixtures import ADDED
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def write_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer.json whose tokens are bytes and the special tokens of the fixtures; returns its path."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(bytes_)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ADDED])
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return path
