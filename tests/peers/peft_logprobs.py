"""Computes log p of every token of some texts with PEFT adapters of one base; runs where torch is installed.

python peft_logprobs.py job.json results.npz

job.json has a base folder, texts (token ids) and adapters (PEFT folders) by name. The results are, by name, log p of
all tokens but each text's first, one text after the other; "base" is without an adapter.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def logprobs(model: torch.nn.Module, texts: list[list[int]]) -> np.ndarray:
    parts = []
    for tokens in texts:
        logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
        parts.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
    return torch.cat(parts).numpy()


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    results = {}
    with torch.no_grad():
        for name, folder in {"base": None, **job["adapters"]}.items():
            model = AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32)
            model = model if folder is None else PeftModel.from_pretrained(model, folder)
            results[name] = logprobs(model.eval(), job["texts"])
    np.savez(sys.argv[2], **results)


if __name__ == "__main__":
    main()
