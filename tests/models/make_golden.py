"""Writes small random models of every family with what `transformers` and `peft` compute of them, in float32.

    python3.11 -m venv reference && reference/bin/pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2
    reference/bin/python tests/models/make_golden.py [case …]

Each folder of golden/ is a Hugging Face model directory plus `adapter` (a PEFT folder with LoRA on all projections) and
expected.safetensors: tokens, logits of the base, logits and loss with the adapter, and the gradients of the adapter.
Weights are drawn large, biases and norms too, so that every one of them changes the logits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
ROWS = map(json.loads, GOLDEN.with_name("golden_cases.jsonl").read_text(encoding="utf-8").splitlines())
CASES = {row["name"]: (row["family"], row["changes"]) for row in ROWS}  # what each changes in its config
SMALL = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
TOKENS = 40
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS = [
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
    "per_layer_input_gate", "per_layer_projection",
]  # fmt: skip
TEXT_PARTS = ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe")  # their config is that of the text part
LONG = {"Qwen3_5": 90, "Qwen3_5Moe": 90, "Qwen3Next": 90}  # tokens: more than a chunk of the gated delta rule


def write_model(case: str, out: Path) -> None:
    """Draws one model and one adapter, and saves them to `out` with what is expected of them."""
    import numpy as np
    import peft
    import torch
    import transformers
    from safetensors.numpy import save_file

    name, changes = CASES[case]
    config_name = f"{name}TextConfig" if name in TEXT_PARTS else f"{name}Config"
    config = getattr(transformers, config_name)(**(SMALL | changes))
    config._attn_implementation = "eager"  # the only one with soft caps
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(sum(map(ord, case)))
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float32).eval()
    share = 0.18 if name in LONG else 0.25 if len(changes) > 4 else 0.35
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else share * noise)
            if path.endswith("A_log"):  # memories of a few to some hundred rows
                parameter.copy_(noise - 3)
        for path, buffer in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if path.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.2 * torch.randn(buffer.shape, generator=generator))
    tokens = torch.randint(0, config.vocab_size, (1, LONG.get(name, TOKENS)), generator=generator)
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask).logits[0]
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    modules = {path.rsplit(".", 1)[-1] for path, _ in model.named_modules()}
    targets = [target for target in TARGETS if target in modules]
    parameters = None
    if name == "DeepseekV3" and modules.isdisjoint({"experts"}):
        targets = [target for target in targets if target not in ("gate_proj", "up_proj", "down_proj")]
    if any(path.endswith("mlp.experts") for path, _ in model.named_modules()):
        # In some of these models PEFT reads gate_proj, up_proj and down_proj as those of experts.
        mlp = {
            path.split(".", 3)[-1] for path, _ in model.named_modules() if ".mlp." in path and path.endswith("_proj")
        }
        parameters = EXPERTS + sorted(f"{path}.weight" for path in mlp)
        targets = [target for target in targets if target not in {path.rsplit(".", 1)[-1] for path in mlp}]
    elif "experts" in modules:
        parameters = [path.removeprefix("mlp.") for path in EXPERTS]
    lora = peft.LoraConfig(r=2, lora_alpha=3, target_modules=targets, target_parameters=parameters, lora_dropout=0.0)
    adapted = peft.get_peft_model(model, lora)
    with torch.no_grad():
        for path, parameter in adapted.named_parameters():
            if "lora_" in path:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    result = adapted(tokens, attention_mask=mask, labels=tokens)
    result.loss.backward()
    adapted.save_pretrained(out / "adapter", safe_serialization=True)
    (out / "adapter" / "README.md").unlink(missing_ok=True)
    array = lambda x: x.detach().numpy().astype(np.float32)  # noqa: E731
    expected = {"tokens": tokens[0].numpy().astype(np.int32), "logits": array(logits)}
    expected |= {"adapted": array(result.logits[0]), "loss": array(result.loss)}
    for path, parameter in adapted.named_parameters():
        if "lora_" in path:
            expected[f"grad.{path.replace('.default', '')}"] = array(parameter.grad)
    save_file(expected, out / "expected.safetensors")


def main(cases: list[str]) -> None:
    for case in cases or CASES:
        write_model(case, GOLDEN / case)
        print(f"{case}: written", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
