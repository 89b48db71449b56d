"""bitsandbytes' side of quantised bases; runs where it is installed, on a CPU.

python bnb_bases.py matrices FILE OUT        stores matrices in four bits, once and twice quantised
python bnb_bases.py base BASE OUT KIND       writes BASE as transformers stores it: nf4, nf4_single or int8. OUT-values
                                             has the numbers that bitsandbytes reads back from it, in float32
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import bitsandbytes as bnb
import numpy as np
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

KINDS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "nf4_single": {"load_in_4bit": True},
    "int8": {"load_in_8bit": True},
}


def store_matrices(file: str, out: str) -> None:
    results = {}
    for name, w_NK in np.load(file).items():
        for twice in (False, True):
            packed, state = bnb.functional.quantize_4bit(
                torch.from_numpy(w_NK), blocksize=64, quant_type="nf4", compress_statistics=twice
            )
            kind = "nf4" if twice else "nf4_single"
            results[f"{name}/{kind}/codes"] = packed.numpy().reshape(-1)
            results[f"{name}/{kind}/absmax"] = state.absmax.numpy()
            if twice:
                results[f"{name}/{kind}/group_absmax"] = state.state2.absmax.numpy()
                results[f"{name}/{kind}/offset"] = state.offset.numpy().reshape(1)
    np.savez(out, **results)


def values_of(module: torch.nn.Module) -> torch.Tensor:
    weight = module.weight
    if isinstance(module, bnb.nn.Linear8bitLt):
        return bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB)
    state = weight.quant_state
    state.dtype = torch.float32
    return bnb.functional.dequantize_4bit(weight.data, state)


def store_base(base: str, out: str, kind: str) -> None:
    config = BitsAndBytesConfig(bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, **KINDS[kind])
    stored = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
    )
    stored.save_pretrained(out)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    count = 0
    for name, module in stored.named_modules():
        if isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            plain.get_submodule(name).weight.data = values_of(module)
            count += 1
    assert count == 7 * plain.config.num_hidden_layers
    plain.save_pretrained(f"{out}-values")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for folder in (out, f"{out}-values"):
            shutil.copyfile(Path(base) / name, Path(folder) / name)


if __name__ == "__main__":
    {"matrices": store_matrices, "base": store_base}[sys.argv[1]](*sys.argv[2:])
