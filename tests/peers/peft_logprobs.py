"""Computes log p of every token of some texts with PEFT adapters of one base; runs where torch is installed.

python peft_logprobs.py job.json results.npz

job.json has a base folder, texts (token ids), adapters (PEFT folders) by name, and a folder for trained ones. The
results are, by name, log p of all tokens but each text's first, one text after the other; "base" is without an adapter.
Each adapter is then trained for some steps and saved, and "NAME trained" is its log p.
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


def train(model: torch.nn.Module, texts: list[list[int]]) -> None:
    """Takes three steps of AdamW."""
    optimizer = torch.optim.AdamW([leaf for leaf in model.parameters() if leaf.requires_grad], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        for tokens in texts:
            inputs = torch.tensor([tokens])
            model(input_ids=inputs, labels=inputs).loss.backward()
        optimizer.step()


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    results = {}
    for name, folder in {"base": None, **job["adapters"]}.items():
        model = AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32).eval()
        if folder is not None:
            model = PeftModel.from_pretrained(model, folder, is_trainable=True).eval()
        with torch.no_grad():
            results[name] = logprobs(model, job["texts"])
        if folder is None:
            continue
        train(model, job["texts"])
        model.save_pretrained(f"{job['trained']}/{name}")
        with torch.no_grad():
            results[f"{name} trained"] = logprobs(model, job["texts"])
    np.savez(sys.argv[2], **results)


if __name__ == "__main__":
    main()
