"""Trains adapters of one base with PEFT and torch in float64, one sample at a time; runs where torch is installed.

python peft_training.py job.json results.npz

job.json has a base folder and adapters: a start (a PEFT folder), batches of samples (tokens and what is learned of
them) and optimizer settings. The results are losses and norms of every step, and the weights after the last.
"""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def rate(settings: dict, step: int, steps: int) -> float:
    """The learning rate of a step: linear warm-up, then constant or a cosine to a share of the peak."""
    warm = settings["warmup"]
    if step < warm:
        return settings["lr"] * (step + 1) / warm
    if settings["schedule"] == "constant":
        return settings["lr"]
    least = settings["min_lr_ratio"]
    return settings["lr"] * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


def optimizer(settings: dict, parameters: list) -> torch.optim.Optimizer:
    if settings["name"] == "sgd":
        return torch.optim.SGD(parameters, lr=1.0, momentum=settings["momentum"], weight_decay=settings["weight_decay"])
    betas = settings["b1"], settings["b2"]
    return torch.optim.AdamW(parameters, lr=1.0, betas=betas, eps=1e-8, weight_decay=settings["weight_decay"])


def train(base: str, adapter: dict) -> dict[str, np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    model = PeftModel.from_pretrained(model, adapter["start"], is_trainable=True).double()
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    stepper, losses, norms = optimizer(adapter["optim"], list(weights.values())), [], []
    for step, batch in enumerate(adapter["batches"]):
        learned = sum(sum(mask) for _, mask in batch)
        total = 0.0
        for tokens, mask in batch:
            logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
            nll = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
            loss = (nll * torch.tensor(mask[1:], dtype=torch.float64)).sum() / learned
            loss.backward()
            total += loss.item()
        clip = adapter["optim"]["clip"] or math.inf
        norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), clip).item())
        losses.append(total)
        for group in stepper.param_groups:
            group["lr"] = rate(adapter["optim"], step, len(adapter["batches"]))
        stepper.step()
        stepper.zero_grad()
    tensors = {name.replace(".default", ""): weight.detach().numpy() for name, weight in weights.items()}
    return tensors | {"losses": np.array(losses), "norms": np.array(norms)}


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    results = {}
    for name, adapter in job["adapters"].items():
        results |= {f"{name}/{key}": array for key, array in train(job["base"], adapter).items()}
    np.savez(sys.argv[2], **results)


if __name__ == "__main__":
    main()
