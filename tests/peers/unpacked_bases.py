"""Writes small bases that libraries pack, a folder per form, and the logits of transformers, which unpacks them.

    python unpacked_bases.py FOLDER

gptqmodel packs GPTQ and AWQ, compressed-tensors what llm-compressor writes. transformers loads each folder by its own
rules. The layers of gptqmodel round what they unpack to float16, so each gives its kernel with scales in float32 here,
and the products are plain.
"""

import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Qwen2Config

GPTQ, AWQ = {"quant_method": "gptq"}, {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
FORMS = {
    "gptq": GPTQ | {"bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "gptq_by_activation": GPTQ | {"bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    "gptq_8_bits_one_group": GPTQ | {"bits": 8, "group_size": -1, "sym": True, "desc_act": False},
    "gptq_2_bits": GPTQ | {"bits": 2, "group_size": 32, "sym": False, "desc_act": False},
    "gptq_v2": GPTQ | {"bits": 4, "group_size": 32, "sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"},
    "gptq_v2_8_bits": GPTQ
    | {"bits": 8, "group_size": 128, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
    "awq": AWQ | {"group_size": 128},
    "awq_groups_of_32": AWQ | {"group_size": 32},
}
WORDS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
COMPRESSED = {  # (format, its weights)
    "pack_quantized": ("pack-quantized", WORDS),
    "pack_quantized_zeros": ("pack-quantized", WORDS | {"symmetric": False, "group_size": 128}),
    "pack_quantized_8_bits": ("pack-quantized", {**WORDS, "num_bits": 8, "strategy": "channel", "group_size": None}),
    "int_quantized": ("int-quantized", {**WORDS, "num_bits": 8, "strategy": "channel", "group_size": None}),
    "float_quantized_blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [128, 128]},
    ),
}


def plain_model() -> nn.Module:
    """With biases of queries, keys and values, and sides that are no powers of two."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias"):
            nn.init.normal_(parameter, std=0.5)
    return model


def grid(weight_nk, form):
    """Scales [N, G], zeros [N, G] and the group of each column, by the smallest and largest weight of a group."""
    features, largest = weight_nk.shape[1], 2 ** form["bits"] - 1
    size = form["group_size"] if form["group_size"] > 0 else features
    group_k = torch.arange(features) // size
    if form.get("desc_act"):
        group_k = group_k[torch.randperm(features)]
    groups = torch.stack([weight_nk[:, group_k == group] for group in range(features // size)], 1)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    if form.get("sym"):
        scales = 2 * torch.maximum(-low, high) / largest
        zeros = torch.full_like(scales, 2 ** (form["bits"] - 1))
    else:
        scales = (high - low) / largest
        zeros = torch.round(-low / scales).clamp(1, largest)  # zeros less one are stored, and 0 has none
    return scales.half().float(), zeros, group_k.int()


def packed(linear, form):
    """A layer of gptqmodel that has rounded a plain one."""
    scales, zeros, group_k = grid(linear.weight.data, form)
    sizes = {"in_features": linear.in_features, "out_features": linear.out_features, "bias": linear.bias is not None}
    sizes |= {"bits": form["bits"], "group_size": form["group_size"], "register_buffers": True}
    if form["quant_method"] == "awq":
        layer = AwqTorchLinear(sym=False, desc_act=False, **sizes)
        layer.pack(linear, scales, zeros)
        return layer
    layer = TorchLinear(sym=form["sym"], desc_act=form["desc_act"], **sizes)
    layer.pack_original(linear, scales, zeros, group_k)
    if form.get("checkpoint_format") != "gptq_v2":
        convert_gptq_v2_to_v1_format_module(layer, SETTINGS)
    return layer


def unpacked(layer):
    """A plain layer with the kernel that a layer of gptqmodel unpacks."""
    scales = layer.scales.float()
    if hasattr(layer, "g_idx"):
        layer.scales = scales
        kernel_kn = layer.dequantize_weight()
    else:
        size = layer.group_size if layer.group_size > 0 else layer.in_features
        kernel_kn = dequantize_gemm(layer.qweight, layer.qzeros, scales, layer.bits, size)
    linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    linear.weight.data = kernel_kn.float().T
    if layer.bias is not None:
        linear.bias.data = layer.bias.float()
    return linear


def compressed(linear, stored, scheme):
    """The tensors that compressed-tensors writes for a plain layer; scales are in float32."""
    weight_nk, args = linear.weight.data, scheme.weights
    rows, size = args.block_structure or (1, args.group_size or weight_nk.shape[1])
    blocks = weight_nk.reshape(len(weight_nk) // rows, rows, -1, size)
    scales, zeros = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
    tensors = {"weight": weight_nk, "weight_scale": scales.float(), "weight_zero_point": zeros}
    return BaseCompressor.get_value_from_registry(stored).compress(tensors, scheme)


def write(folder, settings, tensors_of):
    """A folder with the layers' linears packed.

    Args:
        tensors_of: a linear → the tensors in its place, but for its bias.
    """
    model = plain_model()
    tensors = model.state_dict()
    for name, linear in model.model.layers.named_modules(prefix="model.layers"):
        if isinstance(linear, nn.Linear):
            tensors.pop(f"{name}.weight")
            tensors |= {f"{name}.{end}": tensor for end, tensor in tensors_of(linear).items()}
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    model.config.architectures, model.config.quantization_config = ["Qwen2ForCausalLM"], settings
    model.config.save_pretrained(folder)


def write_logits(folder, **options):
    """Those of the model as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu", **options).eval()
    for name, layer in [*model.named_modules()]:
        if hasattr(layer, "qweight"):
            model.set_submodule(name, unpacked(layer))
    with torch.no_grad():
        save_file({"logits": model.double()(torch.arange(3, 27)[None]).logits[0].contiguous()}, folder / "expected")


ROOT, SETTINGS = Path(sys.argv[1]), QuantizeConfig()
for name, form in FORMS.items():
    write(ROOT / name, form, lambda linear, form=form: packed(linear, form).state_dict())
    write_logits(ROOT / name)
for name, (stored, weights) in COMPRESSED.items():
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    settings = {"quant_method": "compressed-tensors", "format": stored, "ignore": ["lm_head"]}
    settings |= {"quantization_status": "compressed", "config_groups": {"group_0": scheme.model_dump()}}
    write(ROOT / name, settings, lambda linear, stored=stored, scheme=scheme: compressed(linear, stored, scheme))
    write_logits(ROOT / name, quantization_config=CompressedTensorsConfig(dequantize=True))
