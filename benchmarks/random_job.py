"""Inputs of a job whose weights and words are random: speed and memory are a real model's, losses are meaningless."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rope_theta": 500000.0,
}
SMALL = {
    "vocab_size": 3072,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}


def write_data(path: Path, mean: float, spread: float, rows: int, tokenizer_file: Path, longest: int) -> None:
    """Writes prompt/completion rows with log-normal token lengths."""
    from tokenizers import Tokenizer

    tokenizer, draw = Tokenizer.from_file(str(tokenizer_file)), random.Random(path.name)
    words = [word for word in (tokenizer.decode([i]).strip() for i in range(300, 3000)) if word.isalpha()]
    variance = math.log(1 + (spread / mean) ** 2)
    with path.open("w") as file:
        for _ in range(rows):
            length = min(max(int(draw.lognormvariate(math.log(mean) - variance / 2, variance**0.5)), 32), longest)
            text = draw.choices(words, k=length)
            cut = length // 3
            file.write(json.dumps({"prompt": " ".join(text[:cut]), "completion": " " + " ".join(text[cut:])}) + "\n")
