"""What transformers and PEFT compute of drawn models, in float64.

    python drawn_families.py > tests/models/drawn_families.jsonl
    python drawn_families.py --golden > tests/models/golden.jsonl    # the models of golden_cases.jsonl
    python drawn_families.py --only glm4 --out FOLDER    # these cases, with their folders

A row has a config, names and shapes of the checkpoint and of an adapter as both libraries save them, and probes of
logits, loss and gradients, see `drawn`; of some golden ones also with the load-balancing loss of their routers.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[1]))
from drawn import FACTOR, TOKENS, adapter, probe, tokens, weights

MODELS = Path(__file__).parents[1] / "models"
SMALL = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
TEXT_PARTS = ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe")  # their config is that of the text part
DELTA_NETS = ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next")
LONG = 90  # tokens: more than a chunk of the gated delta rule
# Top-k of a softmax and weights that are not normalised; softmax of the chosen; layers of an MLP, and delta nets.
WITH_ROUTERS = ("qwen3_moe_unnormalised", "gpt_oss", "qwen3_next_dense")
TARGETS = [
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
    "per_layer_input_gate", "per_layer_projection", "c_fc", "c_proj", "in_proj", "input_linear", "output_linear",
    "w1", "w2", "w3", "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "g_proj", "a_proj", "b_proj",
    "c_attn",
]  # fmt: skip
EXPERTS = ["gate_up_proj", "up_proj", "down_proj"]
warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()


def read_cases(name: str) -> list[dict]:
    return [json.loads(line) for line in (MODELS / name).read_text(encoding="utf-8").splitlines()]


def golden_case(name: str, family: str, changes: dict) -> dict:
    share = 0.18 if family in DELTA_NETS else 0.25 if len(changes) > 4 else 0.35
    config = f"{family}Text" if family in TEXT_PARTS else family
    count = LONG if family in DELTA_NETS else TOKENS
    return {
        "case": name,
        "class": family,
        "of_config": config,
        "config": SMALL | changes,
        "share": share,
        "count": count,
    }


def shapes_in(file: Path) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in sorted(load_file(file).items())}


def zeros(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def shapes_of(arrays: dict[str, np.ndarray]) -> dict[str, list[int]]:
    return {name: list(array.shape) for name, array in sorted(arrays.items())}


def as_published(shapes: dict[str, list[int]], config: transformers.PreTrainedConfig) -> dict[str, list[int]]:
    """The names of OLMo hybrid as published: transformers 5.23 saves its convolutions in three equal parts, and norms
    after attention under the name of those before MLPs."""
    if config.model_type != "olmo_hybrid":
        return shapes
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    sizes = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}
    published = {}
    for name, shape in shapes.items():
        module = name.split(".")[-2]
        if name.startswith("model.layers.") and config.layer_types[int(name.split(".")[2])] == "full_attention":
            name = name.replace("feedforward_layer_norm", "post_attention_layernorm")
        published[name] = [sizes[module], *shape[1:]] if module in sizes else shape
    return published


def as_tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def peft_config(model: torch.nn.Module) -> peft.LoraConfig:
    paths = [path for path, _ in model.named_modules()]
    has_towers = any("visual" in path or "vision" in path for path in paths)
    ends = {path.rsplit(".", 1)[-1] for path in paths if "language_model" in path or not has_towers}
    refused = ("out_proj",) if model.config.model_type in ("falcon_h1", "nemotron_h") else ()
    if model.config.model_type == "deepseek_v3" and "experts" not in ends:  # PEFT takes them for those of experts
        refused = ("gate_proj", "up_proj", "down_proj")
    targets, parameters = [name for name in TARGETS if name in ends and name not in refused], None
    inside = next((path for path in paths if path.endswith(".experts")), None)
    if model.config.model_type == "llama4_text":  # whose A and B PEFT exchanges, so that they are frozen here
        inside = None
    if inside is not None and (module := inside.split(".")[-2]).isdecimal():  # beside the MLP of a layer
        parameters = [f"experts.{name}" for name in EXPERTS if hasattr(model.get_submodule(inside), name)]
    elif inside is not None:
        inner = [name for name in EXPERTS if hasattr(model.get_submodule(inside), name)]
        parameters = [f"{module}.experts.{name}" for name in inner]
        beside = {path.split(".layers.")[1].split(".", 1)[1] for path in paths
                  if f".{module}." in path and path.endswith("_proj") and module != "mixer"}  # fmt: skip
        dense = {name.rsplit(".", 1)[-1] for name in beside}
        parameters += sorted(f"{path}.weight" for path in beside)
        targets = [name for name in targets if name not in dense]
    if has_towers:
        targets = rf".*language_model.*\.({'|'.join(targets)})"
    return peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=targets, target_parameters=parameters, lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(module, transformers.pytorch_utils.Conv1D) for module in model.modules()),
    )  # fmt: skip


# Ling 2 has no class in transformers. Its function is that of GLM-4.5 with q, k and v as one projection: what one A and
# one B of it get is what three pairs with the same A get together.
LING = {
    "embed_tokens": "word_embeddings", "self_attn": "attention", "q_norm": "query_layernorm", "k_norm": "key_layernorm",
    "o_proj": "dense", "e_score_correction_bias": "expert_bias",
}  # fmt: skip
FUSED, PARTS = "query_key_value", ("q_proj", "k_proj", "v_proj")
OF_GLM = {
    "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias",
}  # fmt: skip
LING_ONLY = ("architectures", "model_type", "use_bias", "use_qkv_bias", "partial_rotary_factor", "rope_theta")


def glm_config(config: dict) -> dict:
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    rope["partial_rotary_factor"] = config["partial_rotary_factor"]
    values = {OF_GLM.get(key, key): value for key, value in config.items() if key not in LING_ONLY or key in OF_GLM}
    return values | {"rope_parameters": rope, "norm_topk_prob": True}


def ling_name(name: str) -> str:
    return ".".join(LING.get(part, part) for part in name.split("."))


def to_ling(arrays: dict[str, np.ndarray], *, gradients: bool = False) -> dict[str, np.ndarray]:
    """Arrays of GLM under the names of Ling; q, k and v one below the other, and their A added up."""
    merged: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        part = next((part for part in PARTS if f".{part}." in name), None)
        if part is None:
            merged[ling_name(name)] = array
        elif part == PARTS[0]:
            three = [arrays[name.replace(part, other)] for other in PARTS]
            joined = np.concatenate(three)
            if ".lora_A." in name:
                joined = np.sum(three, axis=0) if gradients else three[0]
            merged[ling_name(name.replace(part, FUSED))] = joined
    return merged


def to_glm(arrays: dict[str, np.ndarray], shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """The inverse, for tensors of these names and shapes."""
    split = {}
    for name, shape in shapes.items():
        part = next((part for part in PARTS if f".{part}." in name), None)
        array = arrays[ling_name(name if part is None else name.replace(part, FUSED))]
        if part is not None and ".lora_A." not in name:
            before = [shapes[name.replace(part, other)][0] for other in PARTS[: PARTS.index(part)]]
            array = array[sum(before) : sum(before) + shape[0]]
        split[name] = array
    return split


def write(row: dict, folder: Path) -> dict:
    ling, settings = row["class"] == "BailingMoeV2", row["config"]
    row = row | ({"class": "Glm4Moe", "config": glm_config(settings)} if ling else {})
    name, share, count = row["class"], row["share"], row.get("count", TOKENS)
    config = getattr(transformers, f"{row.get('of_config', name)}Config")(**row["config"])
    model_class = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))
    (model_class.from_config if name in OF_OTHERS else model_class)(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    shapes = as_published(shapes_in(folder / "model.safetensors"), config)
    glm_shapes = shapes
    if ling:
        shapes = shapes_of(to_ling(zeros(shapes)))
    drawn = weights(shapes, share)
    save_file(as_tensors(to_glm(drawn, glm_shapes) if ling else drawn), folder / "model.safetensors", {"format": "pt"})
    model = model_class.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model.config._experts_implementation = "eager"
    model.eval()
    lora = peft_config(model)
    if ling:  # whose experts are modules of their own
        lora.target_parameters = [name for name in lora.target_parameters if name.endswith(".weight")]
    adapted = peft.get_peft_model(model, lora)
    adapted.save_pretrained(folder / "adapter")
    (folder / "adapter" / "README.md").unlink(missing_ok=True)
    adapter_shapes = shapes_in(folder / "adapter" / "adapter_model.safetensors")
    glm_adapter = adapter_shapes
    if ling:
        adapter_shapes = shapes_of(to_ling(zeros(adapter_shapes)))
    values = adapter(adapter_shapes)
    values = to_glm(values, glm_adapter) if ling else values
    save_file(as_tensors(values), folder / "adapter" / "adapter_model.safetensors")
    leaves = {path.replace(".default", ""): leaf for path, leaf in adapted.named_parameters() if "lora_" in path}
    assert leaves.keys() == values.keys(), leaves.keys() ^ values.keys()
    with torch.no_grad():
        for path, leaf in leaves.items():
            leaf.copy_(torch.from_numpy(values[path]))
    text = getattr(config, "text_config", config)
    predicted = getattr(text, "output_vocab_size", None) or text.vocab_size  # labels must have logits
    ids = torch.from_numpy(tokens(count, predicted))[None].long()
    mask = torch.ones_like(ids)
    with torch.no_grad(), adapted.disable_adapter():
        plain = adapted(input_ids=ids, attention_mask=mask).logits[0]
    result = adapted(input_ids=ids, attention_mask=mask, labels=ids)
    result.loss.backward()
    arrays = {"logits": plain, "adapted": result.logits[0]}
    arrays |= {f"grad.{path}": leaf.grad for path, leaf in leaves.items()}
    values = {path: array.detach().numpy() for path, array in arrays.items()}
    values = to_ling(values, gradients=True) if ling else values
    probes = {path: probe(path, array) for path, array in values.items()}
    routers = {}
    if row["case"] in WITH_ROUTERS:
        adapted.zero_grad()
        model.router_aux_loss_coef = FACTOR
        again = adapted(input_ids=ids, attention_mask=mask, labels=ids, output_router_logits=True)
        again.loss.backward()
        of_routers = {f"grad.{path}": probe(f"grad.{path}", leaf.grad.numpy()) for path, leaf in leaves.items()}
        routers = {"routers": {"balance": float(again.aux_loss), "loss": float(again.loss), "probes": of_routers}}
    described = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    if ling:
        described["target_modules"] = [FUSED, "dense"]
    return {
        "case": row["case"],
        **({"family": name, "count": count} if "count" in row else {}),
        "share": share,
        "config": settings if ling else json.loads((folder / "config.json").read_text()),
        "tensors": shapes,
        "adapter_config": {
            key: value
            for key, value in described.items()
            if value not in (None, False, [], {}) and key != "base_model_name_or_path"
        },
        "adapter": adapter_shapes,
        "loss": float(result.loss),
        "probes": probes,
        **routers,
    }


OF_OTHERS = ("Exaone", "SarvamMoE", "SarvamMLA")  # which have the classes of other families
WHOLES = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Apertus1p5")
CLASSES = {
    **dict.fromkeys(OF_OTHERS, "AutoModelForCausalLM"),
    "GPT2": "GPT2LMHeadModel",
    **{name: f"{name}ForConditionalGeneration" for name in WHOLES},
}


def rounded(row: dict) -> dict:
    """Nine digits of every probe."""
    probes = {name: [float(f"{number:.9g}") for number in values] for name, values in row["probes"].items()}
    return row | {"probes": probes} | ({"routers": rounded(row["routers"])} if "routers" in row else {})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--golden", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    golden = (golden_case(**row) for row in read_cases("golden_cases.jsonl"))
    for row in golden if options.golden else read_cases("drawn_cases.jsonl"):
        case = row["case"]
        if not case.startswith(tuple(options.only.split(","))):
            continue
        with TemporaryDirectory() as folder:
            try:
                result = write(row, options.out / case if options.out else Path(folder))
            except Exception as error:
                if not options.out:
                    raise
                import traceback

                traceback.print_exc()
                print(f"{case}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
                continue
            print(json.dumps(rounded(result), sort_keys=True, separators=(",", ":")), flush=True)
            print(case, result["loss"], file=sys.stderr)


main()
