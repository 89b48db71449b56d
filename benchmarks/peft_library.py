"""Which layers and calls does Hugging Face PEFT serve? The column beside `benchmarks.lora_libraries`.

    python benchmarks/peft_library.py --out /tmp/peft_library.json     # needs torch, peft, bitsandbytes; CPU

A cell says what came out of PEFT's `inject_adapter_in_model` on a small torch layer: how many layers were adapted, or
the error.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model

X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


class Holder(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module, *more: str):
        super().__init__()
        self.layer, self.more = layer, more

    def forward(self, x):
        y = self.layer(*(x for _ in range(3))) if self.more else self.layer(x)
        return y[0] if isinstance(y, tuple) else y


LAYERS = {
    "linear": lambda: (Holder(torch.nn.Linear(8, 6)), X),
    "attention": lambda: (Holder(torch.nn.MultiheadAttention(8, 2, batch_first=True), "k", "v"), X),
    "convolution": lambda: (Holder(torch.nn.Conv2d(3, 4, 3)), torch.randn(4, 3, 8, 8)),
    "embedding": lambda: (Holder(torch.nn.Embedding(7, 8)), torch.zeros(4, 5, dtype=torch.long)),
}


def config(**options) -> LoraConfig:
    return LoraConfig(r=2, lora_alpha=4, target_modules=["layer"], **options)


def described(model: torch.nn.Module, x: torch.Tensor) -> str:
    (model(x) ** 2).sum().backward()
    grads = {name: leaf.grad for name, leaf in model.named_parameters() if "lora" in name}
    if not grads:
        return "nothing adapted, no error"
    finite = all(grad is not None and grad.isfinite().all() for grad in grads.values())
    return f"served, {len(grads) // 2} layers" if finite else "not finite, or a leaf without a gradient"


def one_call_for_two_adapters() -> str:
    """`adapter_names` chooses an adapter for each example; of two ranks, in training."""
    model = get_peft_model(LAYERS["linear"]()[0], config(), adapter_name="law")
    model.add_adapter("med", LoraConfig(r=4, lora_alpha=4, target_modules=["layer"]))
    model.train()
    return described_call(model)


def two_adapters_in_evaluation() -> str:
    model = get_peft_model(LAYERS["linear"]()[0], config(), adapter_name="law")
    model.add_adapter("med", LoraConfig(r=4, lora_alpha=4, target_modules=["layer"]))
    model.eval()
    return described_call(model)


def described_call(model) -> str:
    y = model(X, adapter_names=["law", "med", "law", "med"])
    return f"served, output {tuple(y.shape)}"


def dropout() -> str:
    model = inject_adapter_in_model(config(lora_dropout=0.5), LAYERS["linear"]()[0]).train()
    for name, leaf in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(leaf)
    same = torch.equal(model(X), model(X))
    return f"dropout, {'the same masks' if same else 'new masks for every call, from the global generator'}"


def a_quantised_base() -> str:
    """bitsandbytes' nf4 layer, as transformers puts it into a model."""
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    layer.weight = bitsandbytes.nn.Params4bit(torch.randn(64, 64), requires_grad=False, quant_type="nf4")
    model = Holder(layer.to("cpu"))
    model.is_loaded_in_4bit = True  # what PEFT asks for
    adapted = get_peft_model(model, config())
    kind = type(adapted.base_model.model.layer).__name__
    return f"{described(adapted, torch.randn(4, 64))}, {kind}"


def merged() -> str:
    model = get_peft_model(LAYERS["linear"]()[0], config())
    for name, leaf in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(leaf)
    before = model(X)
    return f"merged, outputs differ by {(model.merge_and_unload()(X) - before).abs().max().item():.0e}"


def a_wrong_target() -> str:
    inject_adapter_in_model(LoraConfig(target_modules=["laier"]), LAYERS["linear"]()[0])
    return "no error"


def attempt(work) -> str:
    try:
        return work()
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).splitlines()[0]}"[:160]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = {}
    for name, make in LAYERS.items():
        model, x = make()
        found[name] = attempt(lambda model=model, x=x: described(inject_adapter_in_model(config(), model), x))
    cases = {
        "two adapters in a batch, training": one_call_for_two_adapters,
        "two adapters in a batch, evaluation": two_adapters_in_evaluation,
        "dropout": dropout,
        "base in nf4": a_quantised_base,
        "merge": merged,
        "a target that matches nothing": a_wrong_target,
    }
    found |= {name: attempt(work) for name, work in cases.items()}
    for name, cell in found.items():
        print(f"{name:<38}{cell}")
    versions = {name: version(name) for name in ("torch", "peft")}
    args.out.write_text(json.dumps({"versions": versions, "cells": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
