"""Writes a Qwen3-MoE base in FP8 blocks, and the logits of transformers, which widens it, into FOLDER."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Qwen3MoeConfig

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max

folder = Path(sys.argv[1])
config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=256, intermediate_size=256, moe_intermediate_size=384, num_hidden_layers=2,
    num_experts=4, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    initializer_range=0.2, decoder_sparse_step=1, norm_topk_prob=True,
)  # fmt: skip
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config).save_pretrained(folder)
tensors = {}
for name, tensor in load_file(folder / "model.safetensors").items():
    if name.endswith("_proj.weight"):
        rows, columns = tensor.shape
        blocks = tensor.float().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
        tensors[f"{name}_scale_inv"] = scales[:, 0, :, 0].clone()
        tensor = (blocks / scales).reshape(rows, columns).to(torch.float8_e4m3fn)
    tensors[name] = tensor.contiguous()
save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
config.quantization_config = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
config.save_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, experts_implementation="eager", attn_implementation="eager",
    quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=(BLOCK, BLOCK)),
)  # fmt: skip
tokens = torch.arange(3, 27)[None]
with torch.no_grad():
    save_file({"logits": model.float()(tokens).logits[0].contiguous()}, folder / "expected")
