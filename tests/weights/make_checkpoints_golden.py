"""Writes golden/checkpoints/: tiny quantised checkpoints by their own libraries, and the values that these read back.

python -m venv /tmp/quantised && /tmp/quantised/bin/pip install \
    torch==2.13.0 transformers==5.23.0 accelerate bitsandbytes==0.50.2 compressed-tensors==0.20.0 numpy
/tmp/quantised/bin/python tests/weights/make_checkpoints_golden.py

No library on a CPU writes DeepSeek's format with blocks that do not fill, so that one is written here: e4m3 values of a
block are divided by its largest / 448, and multiplied by it in float32 to read them, as in the model's own
`weight_dequant`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import bitsandbytes.functional as bnb
import numpy as np
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent / "golden" / "checkpoints"
# More than one group of NF4's blocks, and blocks of 128 that do not fill. Multiples of 64, because bitsandbytes 0.50
# reads other rows back wrongly on a CPU.
SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 320, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True,
}  # fmt: skip
SHOWN = ("mlp.down_proj",)  # projections whose values are kept
BLOCK = 128


def plain_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3, 5] = 7.0  # an outlier in its channel and block
        model.model.layers[0].mlp.down_proj.weight[4] = 0.0  # nothing to scale by
    return model


def by_bitsandbytes(plain: Path, to: Path, **settings) -> dict[str, torch.Tensor]:
    config = BitsAndBytesConfig(bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, **settings)
    model = LlamaForCausalLM.from_pretrained(
        plain, quantization_config=config, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    model.save_pretrained(to)
    values = {}
    for name in SHOWN:
        weight = model.model.layers[0].get_submodule(name).weight
        if config.load_in_4bit:
            state = weight.quant_state
            state.dtype = torch.float32
            values[name] = bnb.dequantize_4bit(weight.data, state)
        else:
            values[name] = bnb.int8_vectorwise_dequant(weight.data, weight.SCB)
    return values


def by_compressed_tensors(to: Path, **weights) -> dict[str, torch.Tensor]:
    model = plain_model()
    args = {"num_bits": 8, "type": "float", "symmetric": True, **weights}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    config = QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], "weights": args, "input_activations": inputs}},
        ignore=["lm_head"],
        format="float-quantized",
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            largest = module.weight.detach().abs().float()
            shape = {"channel": {"dim": 1, "keepdim": True}, "tensor": {}}[weights["strategy"]]
            scale, _ = calculate_qparams(
                -largest.amax(**shape), largest.amax(**shape), module.quantization_scheme.weights
            )
            module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    state = model.state_dict()
    state.pop("lm_head.weight")
    write(to, state)
    compressor.update_config(str(to))
    wide = {}
    for name in SHOWN:
        module = model.model.layers[0].get_submodule(name)
        wide[name] = module.weight.float() * module.weight_scale.float()
    compressor.decompress_model(model)  # multiplies in the type of the scales
    for name in SHOWN:
        theirs = model.model.layers[0].get_submodule(name).weight
        assert torch.equal(wide[name].to(theirs.dtype), theirs), name
    return wide


def by_blocks(to: Path) -> dict[str, torch.Tensor]:
    state, values = plain_model().state_dict(), {}
    state.pop("lm_head.weight")
    for name in [name for name in state if name.endswith("proj.weight")]:
        wide = state[name].float()
        rows, columns = wide.shape
        padded = torch.nn.functional.pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        factors = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
        state[name] = (wide / factors).to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = scales
        short_name = name.removeprefix("model.layers.0.").removesuffix(".weight")
        if short_name in SHOWN:
            values[short_name] = state[name].float() * factors
    write(to, state)
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]
    }  # fmt: skip
    (to / "config.json").write_text(json.dumps(config, indent=2))
    return values


def write(to: Path, state: dict[str, torch.Tensor]) -> None:
    to.mkdir(parents=True)
    plain_model().config.save_pretrained(to)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, to / "model.safetensors")


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "plain"
        plain_model().save_pretrained(plain)
        values = {
            "nf4": by_bitsandbytes(plain, FOLDER / "nf4", load_in_4bit=True, bnb_4bit_use_double_quant=True),
            "nf4_single": by_bitsandbytes(plain, FOLDER / "nf4_single", load_in_4bit=True),
            "int8": by_bitsandbytes(plain, FOLDER / "int8", load_in_8bit=True),
            "fp8_channels": by_compressed_tensors(FOLDER / "fp8_channels", strategy="channel"),
            "fp8_tensors": by_compressed_tensors(FOLDER / "fp8_tensors", strategy="tensor"),
            "fp8_blocks": by_blocks(FOLDER / "fp8_blocks"),
        }
    for name, arrays in values.items():
        np.savez_compressed(FOLDER / name / "values.npz", **{key: value.numpy() for key, value in arrays.items()})
        for file in (FOLDER / name).iterdir():
            if file.name not in ("config.json", "model.safetensors", "values.npz"):
                file.unlink()
        (FOLDER / name / "model.safetensors").chmod(0o644)
        tensors = load_file(FOLDER / name / "model.safetensors")
        print(name, sum(file.stat().st_size for file in (FOLDER / name).iterdir()), "bytes;", len(tensors), "tensors")


if __name__ == "__main__":
    main()
