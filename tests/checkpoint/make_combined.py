"""Writes combined.safetensors: adapters, and what PEFT's `add_weighted_adapter` makes of them.

    python3.11 -m venv reference && reference/bin/pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2
    reference/bin/python tests/checkpoint/make_combined.py

PEFT draws what DARE keeps; here it keeps what `kept` says, so that another program can keep the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import peft
import torch
import transformers
from peft.utils import merge_utils
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parents[1]))
from drawn import golden

MODEL = golden("llama3")
ADAPTERS = {  # alpha, rslora, targets; all of rank 3
    "red": (6.0, False, ["q_proj", "down_proj"]),
    "blue": (2.0, True, ["down_proj", "q_proj", "k_proj"]),
    "green": (5.0, False, ["q_proj"]),
}
WEIGHTS = [0.7, -0.4, 1.3]
CASES = {
    "linear": ("linear", None, "total"),
    "cat": ("cat", None, "total"),
    "ties": ("ties", 0.6, "total"),
    "ties by frequency": ("ties", 0.4, "frequency"),
    "magnitude": ("magnitude_prune", 0.5, "total"),
    "dare_linear": ("dare_linear", 0.7, "total"),
    "dare_ties": ("dare_ties", 0.7, "frequency"),
}


def kept(shape: tuple[int, ...], density: float) -> torch.Tensor:
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return ((numbers * 7919 % 1009) / 1009 < density).float()


def main() -> None:
    merge_utils.random_pruning = lambda tensor, density, rescale: tensor * kept(tuple(tensor.shape), density) / density
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for name, (alpha, rslora, targets) in ADAPTERS.items():
        config = peft.LoraConfig(r=3, lora_alpha=alpha, use_rslora=rslora, target_modules=targets)
        model = peft.get_peft_model(model, config, name) if name == "red" else model
        if name != "red":
            model.add_adapter(name, config)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if "lora_" in key:
                tensor.normal_()
    tensors = {
        f"{name}/{key}": tensor.clone()
        for name in ADAPTERS
        for key, tensor in peft.get_peft_model_state_dict(model, adapter_name=name).items()
    }
    for case, (method, density, majority) in CASES.items():
        model.add_weighted_adapter(
            list(ADAPTERS), WEIGHTS, case.replace(" ", "_"), combination_type=method, density=density,
            majority_sign_method=majority,
        )  # fmt: skip
        state = peft.get_peft_model_state_dict(model, adapter_name=case.replace(" ", "_"))
        tensors |= {f"{case}/{key}": tensor.contiguous().clone() for key, tensor in state.items()}
    versions = {package.__name__: package.__version__ for package in (torch, transformers, peft)}
    notes = {"versions": versions, "adapters": ADAPTERS, "weights": WEIGHTS, "cases": CASES}
    save_file(tensors, Path(__file__).parent / "combined.safetensors", {"notes": json.dumps(notes)})


if __name__ == "__main__":
    main()
