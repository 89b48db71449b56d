"""PEFT's side of adapters of some projections.

python peft_keys.py make BASE FOLDER     writes a folder whose targets are an expression
python peft_keys.py load BASE FOLDER     loads it, and compares all that PEFT then has with the file
"""

import sys
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

TARGETS = r"model\.layers\.(0\.self_attn\.v|1\.(self_attn\.q|mlp\.down))_proj"


def main(action: str, base: str, folder: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base)
    if action == "make":
        config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(model, config).save_pretrained(folder)
        return
    warnings.filterwarnings("error", message=".*adapter keys.*")  # missing or unexpected
    loaded = get_peft_model_state_dict(PeftModel.from_pretrained(model, folder))
    stored = load_file(Path(folder) / "adapter_model.safetensors")
    assert loaded.keys() == stored.keys(), (sorted(loaded), sorted(stored))
    assert all(torch.equal(loaded[key], stored[key]) for key in stored)
    print(len(stored))


if __name__ == "__main__":
    main(*sys.argv[1:])
